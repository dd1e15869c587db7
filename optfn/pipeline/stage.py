"""A stage function as three functions: forward, backward, and the gradient of the weights.

A schedule runs the three in different ticks, with further microbatches in between, so the values
that one of them passes to the next have to be saved. The three builders here differ in how much
they save.

A stage function takes (weights, x, key) and returns y. A gradient or a cotangent is a list for the
inexact leaves of its tree; integer leaves have none.
"""

from collections.abc import Callable, Iterable
from functools import partial
from typing import NamedTuple, TypeAlias

import jax
import jax.numpy as jnp

from optfn.core import tree
from optfn.core.types import Params, PyTree
from optfn.loss.jaxprs.equations import Equations, Value, bindings, read, shapes_of, variables
from optfn.loss.jaxprs.primitives import Variable
from optfn.loss.jaxprs.pullback import Key, Pullback, StageFn, pullback
from optfn.pipeline.split_scans import split_scans

# A gradient or a cotangent: one array for each inexact leaf.
Leaves: TypeAlias = list[jax.Array]
# Values that forward saves for backward, and (the context) backward for the weight gradient.
Stash: TypeAlias = PyTree
Context: TypeAlias = PyTree
# The function that starts the backward of a stage: y -> (an auxiliary result, cotangent of y).
Seed: TypeAlias = Callable[[PyTree], tuple[PyTree, Leaves]]


class Stage(NamedTuple):
    """The functions of a stage that a schedule runs.

    forward: (weights, x, key) -> (y, stash)
    backward: (weights, stash, key, seed) -> (auxiliary result of the seed, cotangent of x, context)
    weight_gradient: (weights, context) -> gradient of the weights
    """

    forward: Callable[[Params, PyTree, Key], tuple[PyTree, Stash]]
    backward: Callable[[Params, Stash, Key, Seed], tuple[PyTree, Leaves, Context]]
    weight_gradient: Callable[[Params, Context], Leaves]


def input_stashing_stage(fn: StageFn) -> Stage:
    """Return a stage that saves only its input x, and runs again in backward, which computes the
    weight gradient too."""

    return _make_unsplit_stage(
        lambda weights, x, key: (fn(weights, x, key), x), partial(pullback, fn)
    )


def _make_unsplit_stage(
    forward: Callable[[Params, PyTree, Key], tuple[PyTree, Stash]],
    restore: Callable[[Params, Stash, Key], tuple[PyTree, Pullback]],
) -> Stage:
    """Return a stage whose backward computes the weight gradient too, by the pullback that
    restore(weights, stash, key) -> (y, pullback) returns."""

    def backward(
        weights: Params, stash: Stash, key: Key, seed: Seed
    ) -> tuple[PyTree, Leaves, Context]:
        y, pull = restore(weights, stash, key)
        aux, cotangent = seed(y)
        gradient, cotangent = pull(cotangent)
        return aux, cotangent, gradient

    return Stage(forward, backward, lambda weights, context: context)


def residual_stashing_stage(
    fn: StageFn, weights: Params, x: PyTree, key: Key, *, keep_output: bool
) -> Stage:
    """Return a stage that saves the residuals that depend on x or the key, computes the residuals
    of the weights alone again, and does not run again in backward.

    Residuals that depend only on the weights, such as casts and transposes, are the same for every
    microbatch.

    Args:
      fn: the stage function.
      weights: an example, to trace with.
      x: an example.
      key: an example.
      keep_output: whether the seed reads y; otherwise it gets None.
    """
    program = _ResidualProgram(fn, weights, x, key, keep_output)

    def restore(weights: Params, stash: Stash, key: Key) -> tuple[PyTree, Pullback]:
        del key  # residuals that depend on it are in the stash
        y, residuals = program.restore(weights, stash)
        return y, partial(program.pull, residuals)

    return _make_unsplit_stage(program.forward, restore)


def make_split_backward_stage(
    fn: StageFn, weights: Params, x: PyTree, key: Key, *, keep_output: bool, stash_input: bool
) -> Stage:
    """Return a stage whose backward runs only the equations that the cotangent of x needs, and
    leaves the remaining equations of the weight gradient to a later call.

    The previous stage then need not wait for the weight gradient. The context has the results of
    backward and the residuals that the remaining equations read. Only values that depend on nothing
    but the weights are computed twice. A lax.scan inside the stage is split as well. A
    jax.checkpoint is one equation, which is not split and belongs to backward.

    Args:
      fn: the stage function.
      weights: an example, to trace with.
      x: an example.
      key: an example.
      keep_output: whether the seed reads y; otherwise it gets None.
      stash_input: whether to save x and run the stage again in backward, instead of saving
        residuals.
    """
    program = _ResidualProgram(fn, weights, x, key, keep_output or stash_input)
    split = _SplitPullback(program)

    def forward(weights: Params, x: PyTree, key: Key) -> tuple[PyTree, Stash]:
        return (fn(weights, x, key), x) if stash_input else program.forward(weights, x, key)

    def backward(
        weights: Params, stash: Stash, key: Key, seed: Seed
    ) -> tuple[PyTree, Leaves, Context]:
        if stash_input:
            _, stash = program.forward(weights, stash, key)
        y, residuals = program.restore(weights, stash)
        aux, cotangent = seed(y)
        cotangent, context = split.backward(residuals, cotangent)
        return aux, cotangent, context

    def weight_gradient(weights: Params, context: Context) -> Leaves:
        return split.weight_gradient(program.compute_weight_residuals(weights), context)

    return Stage(forward, backward, weight_gradient)


class _ResidualProgram:
    """The forward of a stage, its residuals, and its pullback as a function of them."""

    def __init__(
        self, fn: StageFn, weights: Params, x: PyTree, key: Key, keep_output: bool
    ) -> None:
        def run(weights: Params, x: PyTree, key: Key) -> tuple[PyTree, list[jax.Array]]:
            y, pull = pullback(fn, weights, x, key)
            self.y_structure = jax.tree.structure(y)
            leaves, self.pull_structure = jax.tree.flatten(pull)
            self.key_impls = [jax.random.key_impl(a) if tree.is_key(a) else None for a in leaves]
            # The stash consists of numbers, so a random key among the residuals is saved as bits.
            pairs = zip(leaves, self.key_impls, strict=True)
            return y, [jax.random.key_data(a) if impl else a for a, impl in pairs]

        self.program = program = Equations(run, weights, x, key)
        num_y = len(program.outputs) - len(self.key_impls)
        self.y, self.residuals = program.outputs[:num_y], program.outputs[num_y:]
        self.weight_inputs = program.inputs[: len(jax.tree.leaves(weights))]
        restored = variables([*self.residuals, *(self.y if keep_output else [])])
        # The same for each microbatch: to stash them would take m times the memory.
        weights_only = program.find_computable(self.weight_inputs)
        self.stashed = [a for a in restored if a not in weights_only]
        self.from_weights = program.find_equations(a for a in restored if a in weights_only)
        self.keep_output = keep_output

    def forward(self, weights: Params, x: PyTree, key: Key) -> tuple[PyTree, Stash]:
        """Run the stage, and return y and the stash, the residuals and a kept y as far as they
        depend on x or the key."""
        program = self.program
        known = bindings(program.inputs, jax.tree.leaves((weights, x, key)))
        values = program.run(program.equations, known)
        y = jax.tree.unflatten(self.y_structure, read(values, self.y))
        return y, read(values, self.stashed)

    def restore(self, weights: Params, stash: Stash) -> tuple[PyTree, list[Value]]:
        """Return y, or None if it is not kept, and all residuals, computed again if they depend
        only on the weights, and else from the stash."""
        values = self._run_on_weights(weights) | bindings(self.stashed, stash)
        y = jax.tree.unflatten(self.y_structure, read(values, self.y)) if self.keep_output else None
        return y, read(values, self.residuals)

    def compute_weight_residuals(self, weights: Params) -> dict[int, Value]:
        """Compute the residuals that depend only on the weights, and return them by their
        positions."""
        values = self._run_on_weights(weights)
        return {i: read(values, [self.residuals[i]])[0] for i in self.weight_positions}

    def _run_on_weights(self, weights: Params) -> dict[Variable, Value]:
        """Run the equations of residuals, and of a kept y, that depend only on the weights, and
        return the values of all their variables."""
        known = bindings(self.weight_inputs, jax.tree.leaves(weights))
        return self.program.run(self.from_weights, known)

    @property
    def weight_positions(self) -> list[int]:
        """The positions of the residuals that depend only on the weights."""
        stashed = set(self.stashed)
        return [i for i, a in enumerate(self.residuals) if not stashed.intersection(variables([a]))]

    def pull(self, residuals: Iterable[Value], cotangent: Leaves) -> tuple[Leaves, Leaves]:
        """Run the pullback on the cotangent of y, and return (gradient of weights, cotangent of x),
        from residuals whose random keys are given as bits."""
        pairs = zip(residuals, self.key_impls, strict=True)
        leaves = [jax.random.wrap_key_data(a, impl=impl) if impl else a for a, impl in pairs]
        return jax.tree.unflatten(self.pull_structure, leaves)(cotangent)


class _SplitPullback:
    """The equations of a pullback: first those for the cotangent of x, then the remaining ones."""

    def __init__(self, stage: _ResidualProgram) -> None:
        cotangent = [a for a in shapes_of(stage.y) if jnp.issubdtype(a.dtype, jnp.inexact)]
        unsplit = Equations(stage.pull, shapes_of(stage.residuals), cotangent)
        _, targets = jax.tree.unflatten(unsplit.structure, unsplit.outputs)
        # Effects may order equations that share no variable. Then backward runs all of them.
        ordered = any(e.effects for e in unsplit.equations)
        self.program = program = unsplit if ordered else split_scans(unsplit, targets)
        self.gradients, self.cotangent = jax.tree.unflatten(program.structure, program.outputs)
        # 1. Backward runs the equations of the cotangent of x.
        self.first = program.equations if ordered else program.find_equations(self.cotangent)
        # Compute values that depend only on the weights in both halves: in the context they would
        # take the same memory again for every microbatch.
        weight_inputs = [program.inputs[i] for i in stage.weight_positions]
        from_weights = program.find_computable(() if ordered else weight_inputs)
        # 2. The remaining equations of the weight gradient run later.
        in_first = {id(e) for e in self.first if ordered or not from_weights.issuperset(e.outvars)}
        self.second = [e for e in program.find_equations(self.gradients) if id(e) not in in_first]
        available: set[Variable] = {a for e in self.second for a in e.outvars} | from_weights
        # 3. Values that the second half reads, and that nothing computes again, are the context.
        reads = [a for e in self.second for a in e.invars]
        self.context = [a for a in variables([*reads, *self.gradients]) if a not in available]

    def backward(self, residuals: list[Value], cotangent: Leaves) -> tuple[Leaves, Context]:
        """Run the first half of the pullback, and return the cotangent of x, and the context that
        `weight_gradient` reads."""
        known = bindings(self.program.inputs, [*residuals, *cotangent])
        values = self.program.run(self.first, known)
        return read(values, self.cotangent), read(values, self.context)

    def weight_gradient(self, residuals_of_weights: dict[int, Value], context: Context) -> Leaves:
        """Run the second half of the pullback on the context and the residuals of weights alone,
        and return the gradient of the weights."""
        known = {self.program.inputs[i]: a for i, a in residuals_of_weights.items()}
        known |= bindings(self.context, context)
        return read(self.program.run(self.second, known), self.gradients)
