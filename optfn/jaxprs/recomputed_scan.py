"""A scan over shards of layers, which the backward pass gathers and recomputes one by one.

JAX would make the backward pass from the equations of the forward pass. Here it is a scan of its
own, in one `custom_vjp` over all layers:

    forward    gather layer l, run it, keep its input
    backward   gather layer l again, recompute it from its input, pull the cotangents back, and
               scatter the gradients of layer l

The reason is the schedule of XLA for GPUs, which delays the scatters of a layer by an iteration of
the loop. In JAX's backward scan no product is between the start of a scatter and its end. Here the
products that give the gradients of the next layer are: of Llama 2 7B on 8 H100s 1.5 of 33 ms of
scatters a step are exposed, for 32 (`benchmarks/schedule.py`). The values are the same to the bit.

XLA runs the gather of a leaf beside the products of leaves before it, but the leaves that a layer
uses first have none before them. They are gathered a layer ahead, and the loops carry them. They
are one or two leaves, not a layer: XLA copies a whole layer in the carry, and gathers it last. The
last leaves ahead of the forward pass are the first of the backward pass, whose own last are not
used: a step gathers these leaves of one layer more than before.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from optfn.core import tree
from optfn.jaxprs.equations import RECOMPUTED, Value
from optfn.jaxprs.first_gather import FirstGather, find_first_gathers, take_layer
from optfn.jaxprs.pullback import pullback, select_inexact_leaves

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

    def is_rolled(self) -> bool:
        """Tell whether each iteration of the loop runs one of several layers."""
        return self.length > 1 and self.unroll == 1

    def first(self) -> int:
        """Return the number of the first layer."""
        return self.length - 1 if self.reverse else 0

    def next(self, number: jax.Array) -> jax.Array:
        """Return the number of the layer after this one; the last layer is its own next layer."""
        if self.reverse:
            return jnp.maximum(number - 1, 0)
        return jnp.minimum(number + 1, self.length - 1)

    def scan(self, body: Callable[..., Any], init: Any) -> Any:
        """Return the results of a scan over the numbers of layers."""
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
    """Return the last carry of a scan and its stacked results; its backward pass recomputes them.

    Forward-mode differentiation is an error, as it is for each gather of a param.

    Args:
      run: the body: [*constants, *carry, *layer] -> [*carry, *results].
      constants: values that are the same for all layers.
      init: the first carry.
      stacks: what the scan runs over; a ShardedParam is divided within each layer.
      order: the order of the layers.
    """
    constants, init = [tree.as_array(x) for x in constants], [tree.as_array(x) for x in init]
    ahead = find_first_gathers(run, [*constants, *init], stacks) if order.is_rolled() else []

    @jax.custom_vjp
    def scan(constants: Arrays, init: Arrays, stacks: list[Value]) -> Arrays:
        return forward(constants, init, stacks)[0]

    def forward(constants: Arrays, init: Arrays, stacks: list[Value]) -> tuple[Arrays, Any]:
        passes = _Passes(run, constants, stacks, order, ahead)
        results, inputs, early = passes.run_forward(init)
        return results, (constants, inputs, stacks, early)

    def backward(kept: Any, cotangents: Sequence[Any]) -> tuple[Any, Any, Any]:
        constants, inputs, stacks, early = kept
        passes = _Passes(run, constants, stacks, order.turn(), ahead)
        return passes.run_backward(inputs, early, cotangents)

    scan.defvjp(forward, backward)
    results: list[Value] = scan(constants, init, list(stacks))
    return results


class _Passes(NamedTuple):
    """The forward or the backward pass of `scan_recomputed`.

    run, constants, stacks: its arguments.
    order: the order of the layers in the pass.
    ahead: the leaves that are gathered a layer ahead.
    """

    run: Body
    constants: Arrays
    stacks: list[Value]
    order: Order
    ahead: list[FirstGather]

    def run_forward(self, init: Arrays) -> tuple[Arrays, Arrays, Arrays]:
        """Return [*carry, *results], the inputs of all layers, and the first leaves of the last."""

        def body(state: tuple[Arrays, Arrays], number: jax.Array) -> tuple[Any, Any]:
            early, carry = state
            later = self._gather_next(number)
            weights = self.constants, take_layer(self.stacks, number)
            results = self._run_layer(early, weights, carry)
            return (later, results[: len(init)]), (results[len(init) :], carry)

        (early, carry), (results, inputs) = self.order.scan(body, (self._gather_first(init), init))
        return [*carry, *results], inputs, early

    def run_backward(
        self, inputs: Arrays, early: Arrays, cotangents: Sequence[Any]
    ) -> tuple[Any, Any, Any]:
        """Return the gradients of constants, first carry and stacks; None for integers.

        early: the first leaves of the first layer of this pass, if they are gathered ahead.
        """

        def body(state: tuple[Arrays, Arrays, Arrays], number: jax.Array) -> tuple[Any, Arrays]:
            early, carry, sums = state
            later = self._gather_next(number)
            weights = self.constants, take_layer(self.stacks, number)
            run_layer = partial(self._run_layer, early)
            # As JAX names what a checkpoint runs again, for profiles and for `count_model_flops`.
            with jax.named_scope(RECOMPUTED):
                _, pull_back = pullback(run_layer, weights, take_layer(inputs, number), None)
            if any(gather.is_sent_alone for gather in self.ahead):
                # XLA for TPUs would stretch the gather over the whole layer, and the scatters would
                # wait for it, and run beside no product. A barrier ends it before they begin.
                later, carry = lax.optimization_barrier((later, carry))
            of_weights, carry = pull_back([*carry, *take_layer(of_results, number)])
            of_constants, of_layer = of_weights[: len(sums)], of_weights[len(sums) :]
            sums = [a + b for a, b in zip(sums, of_constants, strict=True)]
            return (later, carry, sums), of_layer

        of_carry = _select_gradients(cotangents[: len(inputs)])
        of_results = _select_gradients(cotangents[len(inputs) :])
        zeros = [jnp.zeros_like(x) for x in select_inexact_leaves(self.constants)]
        (_, of_init, sums), of_stacks = self.order.scan(body, (early, of_carry, zeros))
        return (
            _as_cotangent(self.constants, sums),
            _as_cotangent(inputs, of_init),
            _as_cotangent(self.stacks, of_stacks),
        )

    def _run_layer(
        self,
        early: Arrays,
        weights: tuple[Arrays, list[Value]],
        carry: Arrays,
        key: object = None,
    ) -> Arrays:
        constants, layer = weights
        for gather, whole in zip(self.ahead, early, strict=True):
            layer = gather.place(layer, whole)
        return self.run([*constants, *carry, *layer])

    def _gather_first(self, carry: Arrays) -> Arrays:
        """Return the leaves of the first layer that are gathered ahead."""
        return [x.gather(self.stacks, self.order.first(), carry) for x in self.ahead]

    def _gather_next(self, number: jax.Array) -> Arrays:
        """Return the leaves of the layer after this one that are gathered ahead."""
        return [x.gather(self.stacks, self.order.next(number)) for x in self.ahead]


def _select_gradients(cotangents: Sequence[Any]) -> Arrays:
    return [g for g in cotangents if g.dtype != jax.dtypes.float0]


def _as_cotangent(values: Any, gradients: Sequence[Any]) -> Any:
    """Return a tree like `values` of the gradients of its inexact leaves, None for others."""
    remaining = iter(gradients)
    return jax.tree.map(
        lambda x: next(remaining) if jnp.issubdtype(x.dtype, jnp.inexact) else None, values
    )
