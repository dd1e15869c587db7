"""Updates inside the backward pass: a layer takes its step as soon as its gradient is there.

The layers of `scan_layers` lie in mutable arrays while the loss is differentiated. The backward
pass reads a layer, computes its gradient, updates the slices of params and of the optimizer's state
that belong to it, and writes them back, so that the gradients of all layers never exist at once:

    forward:   x = fn(params[i], x)                                       i = 0 … n − 1
    backward:  g = gradient;  params[i], state[i] = update by g           i = n − 1 … 0

All other leaves are updated by the ordinary step, in which those of the layers are masked.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import optax
from jax import lax

from optfn.leaves import tree
from optfn.leaves.opaque import OpaqueLeaf
from optfn.leaves.tree import Pattern
from optfn.leaves.types import Batch, Leaf, OptState, Params, PyTree, Updates
from optfn.leaves.updates import apply_updates
from optfn.mesh import Axes
from optfn.parallel.means import mean_over_workers
from optfn.parallel.parts import scanning_by
from optfn.train.independence import check_independent, extra_arguments, owners_of, refusal
from optfn.train.loss_form import Values
from optfn.train.objective import Objective, Seen
from optfn.train.state import StepFn, TrainState
from optfn.transforms.in_place import in_passes


def updating_in_backward(
    step_of: Callable[[Objective], StepFn],
    objective_of: Callable[[Seen], Objective],
    tx: optax.GradientTransformationExtraArgs,
    pattern: Pattern,
    workers: Axes,
) -> StepFn:
    """Return a step in which the selected leaves are updated in the backward pass.

    Args:
      step_of: makes the step of one worker from an objective.
      objective_of: makes the objective from the context manager that gives the params of the loss.
      tx: the optimizer.
      pattern: the leaves, of a `Stacked` that the loss gives to `scan_layers`.
      workers: the mesh axes over which gradients are averaged.
    """

    def step(state: TrainState, batch: Batch) -> tuple[TrainState, dict[str, Any]]:
        layers = _Layers(state, tx, pattern, workers)
        rest, metrics = step_of(layers.objective(objective_of))(layers.rest(state), batch)
        return layers.joined(rest), metrics

    return step


class _Layers:
    """The selected leaves of params, and the arrays of the state that belong to each, in a step.

    leaves: the selected leaves as the loss sees them, by path.
    owners: the path of the parameter that each array of (params, opt_state) belongs to; None for
      counters and rates, which all leaves share.
    arrays: the arrays; those of the selected leaves are mutable.
    """

    def __init__(
        self,
        state: TrainState,
        tx: optax.GradientTransformationExtraArgs,
        pattern: Pattern,
        workers: Axes,
    ) -> None:
        self.tx, self.workers = tx, workers
        self.leaves = _selected(pattern, state.params)
        arrays, self.structure = jax.tree.flatten((state.params, state.opt_state))
        self.owners = owners_of(state.params, state.opt_state)
        check_independent(tx, state.params, state.opt_state, self.owners, self.leaves)
        self.arrays = {i: jax.new_ref(x) if self._is_own(i) else x for i, x in enumerate(arrays)}

    def _is_own(self, i: int) -> bool:
        return self.owners[i] in self.leaves

    def rest(self, state: TrainState) -> TrainState:
        """Return the state with all arrays of the layers masked."""
        others = {i: x for i, x in self.arrays.items() if not self._is_own(i)}
        return self._state_of(others, state)

    def joined(self, rest: TrainState) -> TrainState:
        """Undo `rest` after the step: return its state with the new arrays of the layers."""
        others = iter(jax.tree.leaves((rest.params, rest.opt_state)))
        new = {
            i: jax.freeze(x) if self._is_own(i) else next(others) for i, x in self.arrays.items()
        }
        return self._state_of(new, rest)

    def _state_of(self, arrays: dict[int, Any], like: TrainState) -> TrainState:
        params, opt_state = self._values_of(arrays)
        return like._replace(params=params, opt_state=opt_state)

    def _values_of(self, arrays: dict[int, Any]) -> tuple[Params, OptState]:
        """Return params and state of arrays by their numbers, the others masked."""
        leaves = [arrays.get(i, optax.MaskedNode()) for i in range(len(self.owners))]
        values: tuple[Params, OptState] = jax.tree.unflatten(self.structure, leaves)
        return values

    def objective(self, objective_of: Callable[[Seen], Objective]) -> Objective:
        """Return the objective as a function of the masked params, to be evaluated once."""

        @contextlib.contextmanager
        def seen(given: tuple[Params, jax.Array]) -> Iterator[Params]:
            params, self.token = given
            self.trace = jex.get_opaque_trace_state()
            with scanning_by(self.scan):
                yield tree.map_named(lambda place, x: self.leaves.get(str(place), x), params)

        inner = objective_of(seen)

        def value_and_grad(params: Params, *others: Any) -> tuple[Values, Updates]:
            # By a number with a derivative, JAX runs the backward pass of every layer.
            values, (grads, _) = inner.value_and_grad((params, jnp.zeros(())), *others)
            for leaf in self.leaves.values():
                if not leaf.is_updated:
                    raise refusal(leaf.path, "the loss does not depend on it through scan_layers")
            return values, grads

        return Objective(lambda *arguments: value_and_grad(*arguments)[0], value_and_grad)

    def scan(
        self, fn: Callable[[list[Leaf], PyTree], PyTree], stacked: Sequence[Leaf], x: PyTree
    ) -> PyTree:
        """Return x after fn(leaves of a layer, x) for each layer; its gradient updates the layers.

        The backward pass computes the activations inside a layer again.
        """
        own = {k: leaf for k, leaf in enumerate(stacked) if isinstance(leaf, _LayersOfLeaf)}
        if not own:
            return lax.scan(lambda x, layer: (fn(layer, x), None), x, list(stacked))[0]
        others = {k: leaf for k, leaf in enumerate(stacked) if k not in own}
        for leaf in own.values():
            leaf.use(self.trace)

        def of_layer(own: dict[int, Leaf], others: dict[int, Leaf], *rest: Any) -> PyTree:
            return fn([leaf for _, leaf in sorted((own | others).items())], *rest)

        like = {k: jnp.zeros(leaf.shape[1:], leaf.dtype) for k, leaf in own.items()}
        first = {k: leaf[0] for k, leaf in others.items()}
        # The arrays that fn closes over have a gradient as well.
        of_layer, closed_over = jax.closure_convert(of_layer, like, first, x)
        run = self._updating(of_layer, own)

        def body(x: PyTree, layer: tuple[jax.Array, dict[int, Leaf]]) -> tuple[PyTree, None]:
            number, others = layer
            return run(self.token, self.arrays, number, others, x, *closed_over), None

        count = next(iter(own.values())).shape[0]
        return lax.scan(body, x, (jnp.arange(count), others))[0]

    def _updating(
        self, fn: Callable[..., PyTree], own: dict[int, "_LayersOfLeaf"]
    ) -> Callable[..., PyTree]:
        """Return (token, arrays, number of a layer, *rest) -> fn(that layer, *rest).

        Its backward pass updates the layer.
        """

        def read(arrays: dict[int, Any], number: jax.Array) -> dict[int, jax.Array]:
            return {k: arrays[self.owners.index(leaf.path)][number] for k, leaf in own.items()}

        @jax.custom_vjp
        def run(token: jax.Array, arrays: Any, number: jax.Array, *rest: Any) -> PyTree:
            return fn(read(arrays, number), *rest)

        def forward(token: jax.Array, *rest: Any) -> tuple[PyTree, Any]:
            return run(token, *rest), rest

        def backward(residuals: Any, cotangent: PyTree) -> tuple[Any, ...]:
            arrays, number, *rest = residuals
            _, pull = jax.vjp(fn, read(arrays, number), *rest)
            grads, *of_rest = pull(cotangent)
            self._update(arrays, number, {leaf.path: grads[k] for k, leaf in own.items()})
            return None, None, None, *of_rest

        run.defvjp(forward, backward)
        return run

    def _update(
        self, arrays: dict[int, Any], number: jax.Array, grads: dict[str, jax.Array]
    ) -> None:
        """Update a layer in place by its gradients, which have the paths of its leaves."""
        means = mean_over_workers(grads, self.workers)
        grads = {path: g[None] for path, g in means.items()}
        owned = {i: self.owners[i] for i in arrays}
        shared = {i: arrays[i] for i, owner in owned.items() if owner is None}
        axes = {i: arrays[i].ndim - grads[o].ndim for i, o in owned.items() if o in grads}
        at = {i: (*[slice(None)] * axis, number) for i, axis in axes.items()}  # of the layers
        slices = {i: jnp.expand_dims(arrays[i][at[i]], axis) for i, axis in axes.items()}

        def updated(slices: PyTree, grads: dict[str, Any], shared: PyTree) -> tuple[PyTree]:
            params, state = self._values_of(slices | shared)
            updates = tree.map_named(lambda place, p: grads.get(str(place), p), params)
            extra = extra_arguments(updates, jnp.zeros(()))  # no update depends on the loss
            updates, state = self.tx.update(updates, state, params, **extra)
            leaves = jax.tree.leaves((apply_updates(params, updates), state))
            new = dict(zip(sorted(slices | shared), leaves, strict=True))
            return ({i: new[i] for i in slices},)

        # One loop, which all gradients enter: none is computed after its layer has changed.
        (new,) = in_passes([updated], (slices,), grads, shared)
        for i, axis in axes.items():
            arrays[i][at[i]] = jnp.squeeze(new[i], axis)
        for path in grads:
            self.leaves[path].is_updated = True


class _LayersOfLeaf(OpaqueLeaf):
    """A selected leaf as the loss sees it: it can be given to `scan_layers` once, and no more."""

    is_used = is_updated = False

    def use(self, trace: object) -> None:
        """Raise a ValueError if the leaf is used already, or not where the loss is traced."""
        if self.is_used:
            raise refusal(self.path, "scan_layers gets it twice")
        if jex.get_opaque_trace_state() != trace:
            raise refusal(
                self.path,
                "scan_layers is called inside another transformation (jit, vmap, checkpoint, scan, "
                "cond), which may run it any number of times; call it in the loss itself",
            )
        self.is_used = True

    def _refusal(self, use: str) -> TypeError:
        why = f"the loss uses it outside of scan_layers ({use})"
        return TypeError(str(refusal(self.path, why)))


def _selected(pattern: Pattern, params: Params) -> dict[str, _LayersOfLeaf]:
    """Return the leaves that a pattern selects, checked, by path."""
    chosen = tree.matching(pattern, params, "update_in_backward")
    stacked = tree.stacked_axes(params)
    found = {}
    for place, x in tree.items(params):
        path = str(place)
        if path in chosen and not (stacked[place.number] and tree.is_inexact(x)):
            raise refusal(path, "it is no floating-point leaf of an optfn.Stacked")
        if path in chosen:
            found[path] = _LayersOfLeaf(x, path)
    return found
