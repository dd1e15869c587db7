"""A stage function as three: forward, backward, and the gradient of the weights.

A schedule runs the three at different ticks, with other microbatches in between; what one hands to
the next is kept as arrays. How much is kept is the choice between the three makers here.

A stage function takes (weights, x, key) and returns y. Gradients and cotangents are lists of the
floating-point leaves of the tree that they belong to; other leaves have none.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from optfn.autodiff.equations import Equations, read, shapes_of, variables, with_split_scans
from optfn.autodiff.pullback import StageFn, pullback

# y -> (whatever the caller wants of it, the cotangent of y)
Seed = Callable[[Any], tuple[Any, list[jax.Array]]]


class Stage(NamedTuple):
    """What a schedule needs of a stage.

    forward: (weights, x, key) -> (y, kept)
    backward: (weights, kept, key, seed) -> (what seed gives, cotangent of x, context)
    gradient: (weights, context) -> gradient of the weights
    """

    forward: Callable[[Any, Any, Any], tuple[Any, Any]]
    backward: Callable[[Any, Any, Any, Seed], tuple[Any, list[jax.Array], Any]]
    gradient: Callable[[Any, Any], list[jax.Array]]


def recomputed(fn: StageFn) -> Stage:
    """Keep x, and run the stage again to differentiate it."""

    def forward(weights: Any, x: Any, key: Any) -> tuple[Any, Any]:
        return fn(weights, x, key), x

    def backward(weights: Any, kept: Any, key: Any, seed: Seed) -> Any:
        y, pull = pullback(fn, weights, kept, key)
        given, cotangent = seed(y)
        gradient, cotangent = pull(cotangent)
        return given, cotangent, gradient

    return Stage(forward, backward, lambda weights, context: context)


def stashed(fn: StageFn, weights: Any, x: Any, key: Any, *, keep_output: bool) -> Stage:
    """Keep the residuals, and differentiate without running the stage again.

    Only residuals that depend on x are kept; casts and transposes of the weights, of which every
    microbatch would keep the same, are made again.

    Args:
      fn: the stage function.
      weights: example arguments, to trace with.
      x: as `weights`.
      key: as `weights`.
      keep_output: whether the seed reads y; otherwise it gets None.
    """
    residuals = _Residuals(fn, weights, x, key, keep_output)

    def backward(weights: Any, kept: Any, key: Any, seed: Seed) -> Any:
        del key  # what depends on it has been kept
        y, all_residuals = residuals.restore(weights, kept)
        given, cotangent = seed(y)
        gradient, cotangent = residuals.pull(all_residuals, cotangent)
        return given, cotangent, gradient

    return Stage(residuals.forward, backward, lambda weights, context: context)


def split(
    fn: StageFn, weights: Any, x: Any, key: Any, *, keep_output: bool, recompute: bool
) -> Stage:
    """Split backward in two, so that the cotangent of x need not wait for the weights' gradient.

    Backward does the equations that the cotangent of x needs. What the others read of them, and of
    the residuals, is the context; the gradient does the others. Nothing is done twice but what
    depends on weights only. A lax.scan inside the stage is divided as well; a jax.checkpoint is
    one equation, and stays whole, in backward.

    Args:
      fn: the stage function.
      weights: example arguments, to trace with.
      x: as `weights`.
      key: as `weights`.
      keep_output: whether the seed reads y; otherwise it gets None.
      recompute: keep x, and run the stage again in backward, instead of keeping residuals.
    """
    residuals = _Residuals(fn, weights, x, key, keep_output or recompute)
    parts = _Split(residuals)

    def forward(weights: Any, x: Any, key: Any) -> tuple[Any, Any]:
        return (fn(weights, x, key), x) if recompute else residuals.forward(weights, x, key)

    def backward(weights: Any, kept: Any, key: Any, seed: Seed) -> Any:
        if recompute:
            _, kept = residuals.forward(weights, kept, key)
        y, all_residuals = residuals.restore(weights, kept)
        given, cotangent = seed(y)
        cotangent, context = parts.backward(all_residuals, cotangent)
        return given, cotangent, context

    def gradient(weights: Any, context: list[jax.Array]) -> list[jax.Array]:
        return parts.gradient(residuals.of_weights(weights), context)

    return Stage(forward, backward, gradient)


class _Residuals:
    """The forward of a stage, its residuals, and its pullback as a function of them."""

    def __init__(self, fn: StageFn, weights: Any, x: Any, key: Any, keep_output: bool) -> None:
        def run(weights: Any, x: Any, key: Any) -> tuple[Any, list[Any]]:
            y, pull = pullback(fn, weights, x, key)
            self.y_structure = jax.tree.structure(y)
            leaves, self.pull_structure = jax.tree.flatten(pull)
            self.key_kinds = [
                jax.random.key_impl(a) if jnp.issubdtype(a.dtype, jax.dtypes.prng_key) else None
                for a in leaves
            ]
            # What is kept is numbers; a random key among the residuals goes in as its bits.
            pairs = zip(leaves, self.key_kinds, strict=True)
            return y, [jax.random.key_data(a) if kind else a for a, kind in pairs]

        self.program = program = Equations(run, weights, x, key)
        count = len(program.outputs) - len(self.key_kinds)
        self.y, self.residuals = program.outputs[:count], program.outputs[count:]
        self.given = program.inputs[: len(jax.tree.leaves(weights))]
        wanted = variables([*self.residuals, *(self.y if keep_output else [])])
        weights_only = program.computable_from(self.given)
        self.kept = [a for a in wanted if a not in weights_only]
        self.rebuild = program.needed_for(a for a in wanted if a in weights_only)
        self.keep_output = keep_output

    def forward(self, weights: Any, x: Any, key: Any) -> tuple[Any, list[jax.Array]]:
        """Return y and what of the residuals depends on x."""
        program = self.program
        known = dict(zip(program.inputs, jax.tree.leaves((weights, x, key)), strict=True))
        values = program.run(program.equations, known)
        return jax.tree.unflatten(self.y_structure, read(values, self.y)), read(values, self.kept)

    def restore(self, weights: Any, kept: list[jax.Array]) -> tuple[Any, list[jax.Array]]:
        """Return y (None where it is not kept) and all residuals."""
        known = dict(zip(self.given, jax.tree.leaves(weights), strict=True))
        values = self.program.run(self.rebuild, known)
        values.update(zip(self.kept, kept, strict=True))
        y = jax.tree.unflatten(self.y_structure, read(values, self.y)) if self.keep_output else None
        return y, read(values, self.residuals)

    def of_weights(self, weights: Any) -> dict[int, jax.Array]:
        """Return the residuals that depend on the weights only, by their positions."""
        known = dict(zip(self.given, jax.tree.leaves(weights), strict=True))
        values = self.program.run(self.rebuild, known)
        return {i: read(values, [self.residuals[i]])[0] for i in self.weight_positions}

    @property
    def weight_positions(self) -> list[int]:
        """The positions of the residuals that depend on the weights only."""
        kept = set(self.kept)
        return [i for i, a in enumerate(self.residuals) if not kept.intersection(variables([a]))]

    def pull(self, residuals: list[Any], cotangent: list[jax.Array]) -> tuple[list[Any], list[Any]]:
        """Return (gradient of weights, cotangent of x)."""
        leaves = [
            jax.random.wrap_key_data(a, impl=kind) if kind else a
            for a, kind in zip(residuals, self.key_kinds, strict=True)
        ]
        return jax.tree.unflatten(self.pull_structure, leaves)(cotangent)


class _Split:
    """The equations of a pullback in two parts: for the cotangent of x, and for the weights."""

    def __init__(self, residuals: _Residuals) -> None:
        cotangent = [a for a in shapes_of(residuals.y) if jnp.issubdtype(a.dtype, jnp.inexact)]
        whole = Equations(residuals.pull, shapes_of(residuals.residuals), cotangent)
        targets = jax.tree.unflatten(whole.structure, whole.outputs)[1]
        # Effects tie equations together that share no variable: then nothing is divided.
        tied = whole.has_effects
        self.program = program = whole if tied else with_split_scans(whole, targets)
        self.gradients, self.cotangent = jax.tree.unflatten(program.structure, program.outputs)
        self.first = program.equations if tied else program.needed_for(self.cotangent)
        # What weights alone decide is cheaper to make again than to keep for every microbatch.
        cheap = program.computable_from(
            () if tied else self._of_weights(residuals.weight_positions)
        )
        done = {id(e) for e in self.first if tied or not cheap.issuperset(e.outvars)}
        self.second = [e for e in program.needed_for(self.gradients) if id(e) not in done]
        made = {a for e in self.second for a in e.outvars} | cheap
        read_by = [a for e in self.second for a in e.invars]
        self.context = [a for a in variables([*read_by, *self.gradients]) if a not in made]

    def _of_weights(self, positions: list[int]) -> list[Any]:
        return [self.program.inputs[i] for i in positions]

    def backward(self, residuals: list[Any], cotangent: list[jax.Array]) -> tuple[Any, Any]:
        """Return (cotangent of x, context)."""
        known = dict(zip(self.program.inputs, [*residuals, *cotangent], strict=True))
        values = self.program.run(self.first, known)
        return read(values, self.cotangent), read(values, self.context)

    def gradient(self, of_weights: dict[int, Any], context: list[Any]) -> list[jax.Array]:
        """Return the gradient of the weights."""
        known = {self.program.inputs[i]: a for i, a in of_weights.items()}
        known.update(zip(self.context, context, strict=True))
        return read(self.program.run(self.second, known), self.gradients)
