"""A scan over shards of layers, which the backward pass gathers and recomputes one by one.

JAX would make the backward pass from the equations of the forward pass. Here it is a second scan,
in one `custom_vjp` over all layers:

    forward    gather layer l, run it, keep its input
    backward   gather layer l again, recompute it from its input, pull the cotangents back, and
               scatter the gradients of layer l

The reason is the schedule of XLA for GPUs, which delays the scatters of a layer by an iteration of
the loop. In JAX's backward scan no product is between the start of a scatter and its end. Here the
products that give the gradients of the next layer are: of Llama 2 7B on 8 H100s 1.5 of 33 ms of
scatters a step are exposed, for 32 (`benchmarks/schedule.py`). The values are the same to the bit.

XLA runs the gather of a leaf beside the products of leaves before it. The leaves that a layer uses
first have none before them: of the 7B on 8 H100s 0.4 ms of a layer are exposed. To gather them a
layer ahead would save 2 % of the step.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from optfn.core import tree
from optfn.loss.jaxprs.equations import Value
from optfn.loss.jaxprs.primitives import RECOMPUTED
from optfn.loss.jaxprs.pullback import pullback, select_inexact_leaves
from optfn.loss.jaxprs.sharded_param import ShardedParam

Arrays = list[jax.Array]
Body = Callable[[Sequence[Value]], list[Value]]


class Order(NamedTuple):
    """The order of the layers in a scan.

    length: the number of layers.
    reverse: whether the last layer runs first.
    unroll: how many layers an iteration of the loop runs.
    """

    length: int
    reverse: bool
    unroll: Any

    def turn(self) -> "Order":
        """Return the opposite order."""
        return self._replace(reverse=not self.reverse)

    def scan(self, body: Callable[..., Any], init: Any) -> Any:
        """Run `lax.scan` over the numbers of the layers in this order, and return the last carry
        and the stacked results."""
        # Layers are taken by their numbers: as elements of the scan, they would follow from the
        # counter of the loop, and XLA would expose the scatters again.
        numbers = jnp.arange(self.length)
        return lax.scan(body, init, numbers, reverse=self.reverse, unroll=self.unroll)


def scan_recomputed(
    run: Body,
    constants: Sequence[Value],
    init: Sequence[Value],
    stacks: Sequence[Value],
    order: Order,
) -> list[Value]:
    """Run a scan over stacked layers, and return its last carry and stacked results, with a
    backward pass that gathers and recomputes each layer from its input.

    Forward-mode differentiation is an error, as it is for each gather of a param.

    Args:
      run: the body: [*constants, *carry, *layer] -> [*carry, *results].
      constants: values that are the same for all layers.
      init: the first carry.
      stacks: the arrays that the scan runs over; a ShardedParam is divided within each layer.
      order: the order of the layers.
    """
    constants, init = [tree.as_array(x) for x in constants], [tree.as_array(x) for x in init]

    @jax.custom_vjp
    def scan(constants: Arrays, init: Arrays, stacks: list[Value]) -> Arrays:
        return forward(constants, init, stacks)[0]

    def run_layer(weights: tuple[Arrays, list[Value]], carry: Arrays, key: object = None) -> Arrays:
        constants, layer = weights
        return run([*constants, *carry, *layer])

    def forward(constants: Arrays, init: Arrays, stacks: list[Value]) -> tuple[Arrays, Any]:
        def body(carry: Arrays, number: jax.Array) -> tuple[Arrays, Any]:
            results = run_layer((constants, _take_layer(stacks, number)), carry)
            return results[: len(init)], (results[len(init) :], carry)

        carry, (results, inputs) = order.scan(body, init)
        return [*carry, *results], (constants, inputs, stacks)

    def backward(kept: Any, cotangents: Sequence[Any]) -> tuple[Any, Any, Any]:
        constants, inputs, stacks = kept

        def body(state: tuple[Arrays, Arrays], number: jax.Array) -> tuple[Any, Arrays]:
            carry, sums = state
            weights = constants, _take_layer(stacks, number)
            # JAX's name for equations that run again: profiles and `count_model_flops` read it.
            with jax.named_scope(RECOMPUTED):
                _, pull_back = pullback(run_layer, weights, _take_layer(inputs, number), None)
            of_weights, carry = pull_back([*carry, *_take_layer(of_results, number)])
            of_constants, of_layer = of_weights[: len(sums)], of_weights[len(sums) :]
            return (carry, [a + b for a, b in zip(sums, of_constants, strict=True)]), of_layer

        of_carry = _select_gradients(cotangents[: len(inputs)])
        of_results = _select_gradients(cotangents[len(inputs) :])
        zeros = [jnp.zeros_like(x) for x in select_inexact_leaves(constants)]
        (of_init, sums), of_stacks = order.turn().scan(body, (of_carry, zeros))
        return _spread(constants, sums), _spread(inputs, of_init), _spread(stacks, of_stacks)

    scan.defvjp(forward, backward)
    return list(scan(constants, init, list(stacks)))


def _take_layer(stacks: Sequence[Value], number: Any) -> list[Value]:
    """Return the layer with this number of each stack, as a ShardedParam if the stack is one, else
    as an array."""

    def take(stack: jax.Array) -> jax.Array:
        return lax.dynamic_index_in_dim(stack, number, 0, keepdims=False)

    return [
        x.layer(take(x.shard.array)) if isinstance(x, ShardedParam) else take(x) for x in stacks
    ]


def _select_gradients(cotangents: Sequence[Any]) -> Arrays:
    """Return the cotangents, and leave out the float0 that integers have."""
    return [g for g in cotangents if g.dtype != jax.dtypes.float0]


def _spread(values: Any, gradients: Sequence[Any]) -> Any:
    """Return a tree like `values` with the gradients, in order, in place of its inexact leaves, and
    None in place of the rest."""
    remaining = iter(gradients)
    return jax.tree.map(lambda x: next(remaining) if tree.is_inexact(x) else None, values)
