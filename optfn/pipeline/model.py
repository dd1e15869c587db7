"""The stages of a pipeline as one program that every device runs.

Like stages are one function, applied to the weights that a device has. Unlike stages are the
branches of a switch, with everything that enters and leaves it packed into buffers of one size.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from optfn.autodiff.pullback import StageFn, inexact_leaves, with_inexact_leaves
from optfn.leaves import tree
from optfn.pipeline import buffers
from optfn.pipeline.stage import Stage, recomputed, split, stashed

# (y, target, shared) -> scalar
LossFn = Callable[[Any, Any, Any], jax.Array]


class At(NamedTuple):
    """Where a device is: the stage of the model, and the microbatch that it works on."""

    stage: Any
    feed: Any  # the model's input
    target: Any
    key: Any


class Weights(NamedTuple):
    """The weights of one stage: its own (packed, where stages are unlike), and the shared ones."""

    own: Any
    shared: Any


class Gradient(NamedTuple):
    """The gradient of `Weights`, floating-point leaves only."""

    own: list[jax.Array]
    shared: list[jax.Array]


class Model(NamedTuple):
    """What the engine runs.

    wire: the shapes of what a stage hands to the next; its floating-point part goes back.
    loss: the dtype of the loss.
    forward: (at, weights, wire) -> (wire, kept)
    backward: (at, weights, kept, cotangent) -> (loss, gradient of the loss with respect to the
      shared weights, cotangent, context); the loss is 0 but in the last stage.
    gradient: (at, weights, context) -> Gradient
    """

    wire: Any
    loss: Any
    forward: Callable[[At, Weights, Any], tuple[Any, Any]]
    backward: Callable[[At, Weights, Any, Any], tuple[jax.Array, list[jax.Array], Any, Any]]
    gradient: Callable[[At, Weights, Any], Gradient]


class Kept(NamedTuple):
    """What is kept between the slots of a microbatch."""

    stash: str  # "input" or "residual"
    splits: bool  # whether the gradient of the weights has a slot of its own

    def stage(self, fn: StageFn, weights: Any, x: Any, key: Any, *, keep_output: bool) -> Stage:
        """Return the stage of a function; the arguments are examples."""
        if self.splits:
            recompute = self.stash == "input"
            return split(fn, weights, x, key, keep_output=keep_output, recompute=recompute)
        if self.stash == "input":
            return recomputed(fn)
        return stashed(fn, weights, x, key, keep_output=keep_output)


def _loss(loss_fn: LossFn, y: Any, target: Any, shared: Any) -> tuple[jax.Array, list[Any], Any]:
    """Return (loss, gradient of shared, cotangent of y)."""

    def of_floats(y_floats: list[Any], shared_floats: list[Any]) -> jax.Array:
        return loss_fn(
            with_inexact_leaves(y, y_floats), target, with_inexact_leaves(shared, shared_floats)
        )

    loss, (cotangent, gradient) = jax.value_and_grad(of_floats, (0, 1))(
        inexact_leaves(y), inexact_leaves(shared)
    )
    return loss, gradient, cotangent


def check_loss(loss_fn: LossFn, y: Any, target: Any, shared: Any) -> Any:
    """Return the dtype of the loss, a real scalar."""
    loss = jax.eval_shape(loss_fn, y, target, shared)
    shape, dtype = getattr(loss, "shape", None), getattr(loss, "dtype", None)
    if shape != () or dtype is None:
        came = type(loss).__name__ if shape is None else f"an array of shape {shape}"
        raise ValueError(
            f"loss_fn must return a scalar, the mean over the examples it is given; got {came}"
        )
    if not jnp.issubdtype(dtype, jnp.floating):
        raise TypeError(f"loss_fn must return a real number; got dtype {dtype}")
    return dtype


def alike(
    stage_fn: Callable[[Weights, Any, Any], Any],
    loss_fn: LossFn,
    kept: Kept,
    num_stages: int,
    weights: Weights,
    at: At,
) -> Model:
    """Return the model of `num_stages` stages that are one function.

    `weights` and `at` are examples, to trace with.
    """
    wire = jax.eval_shape(lambda x: x, at.feed)
    fn = _returning(wire, stage_fn)
    loss_dtype = check_loss(loss_fn, wire, at.target, weights.shared)
    stage = kept.stage(fn, weights, at.feed, at.key, keep_output=True)

    def forward(at: At, weights: Weights, arriving: Any) -> tuple[Any, Any]:
        x = jax.tree.map(partial(jnp.where, at.stage == 0), at.feed, arriving)
        return stage.forward(weights, x, at.key)

    def backward(at: At, weights: Weights, stash: Any, arriving: Any) -> Any:
        def seed(y: Any) -> tuple[Any, Any]:
            def last() -> Any:
                return _loss(loss_fn, y, at.target, weights.shared)

            def inner() -> Any:
                nothing = jax.tree.map(jnp.zeros_like, inexact_leaves(weights.shared))
                return jnp.zeros((), loss_dtype), nothing, arriving

            # The loss costs only the last stage; a value that is not used may be NaN.
            loss, shared, cotangent = lax.cond(at.stage == num_stages - 1, last, inner)
            return (loss, shared), cotangent

        (loss, shared), cotangent, context = stage.backward(weights, stash, at.key, seed)
        return loss, shared, cotangent, context

    def gradient(at: At, weights: Weights, context: Any) -> Gradient:
        del at
        return _by_kind(weights, stage.gradient(weights, context))

    return Model(wire, loss_dtype, forward, backward, gradient)


def _by_kind(weights: Weights, gradient: list[Any]) -> Gradient:
    own = len(inexact_leaves(weights.own))
    return Gradient(list(gradient[:own]), list(gradient[own:]))


def _returning(wire: Any, stage_fn: Callable[[Weights, Any, Any], Any]) -> StageFn:
    """Return `stage_fn`, checked to give what it takes."""

    def fn(weights: Any, x: Any, key: Any) -> Any:
        y = jax.tree.map(jnp.asarray, stage_fn(weights, x, key))
        hint = (
            "every stage must return what it takes, so that any can follow any; "
            "give a list of functions for stages of different shapes"
        )
        came: Any = jax.tree.structure(y)
        needed: Any = jax.tree.structure(wire)
        if came != needed:
            raise ValueError(f"stage_fn takes {needed} and returns {came}: {hint}")
        for name, a, b in zip(
            tree.paths(wire), jax.tree.leaves(wire), jax.tree.leaves(y), strict=False
        ):
            if (a.shape, a.dtype) != (b.shape, b.dtype):
                raise ValueError(
                    f"stage_fn takes {a.dtype}{list(a.shape)}{f' ({name})' if name else ''} and "
                    f"returns {b.dtype}{list(b.shape)}: {hint}"
                )
        # A weakly typed y would not be the x of the next stage.
        return jax.tree.map(lambda a: lax.convert_element_type(a, a.dtype), y)

    return fn


def unlike(
    stage_fns: Sequence[Callable[[Weights, Any, Any], Any]],
    loss_fn: LossFn,
    kept: Kept,
    params: Sequence[Any],
    weights: Weights,
    at: At,
) -> Model:
    """Return the model whose stages are different functions.

    Args:
      stage_fns: (weights, x, key) -> y, with that stage's params as weights.own.
      loss_fn: (y, target, shared) -> scalar.
      kept: what is kept.
      params: the params of each stage; only their shapes are read.
      weights: an example: one stage's params as `buffers.pack` gives them, and the shared ones.
      at: an example.
    """
    chain = _Chain(stage_fns, loss_fn, kept, params, weights, at)
    branches = range(len(stage_fns))

    def forward(at: At, weights: Weights, arriving: Any) -> Any:
        return lax.switch(
            at.stage, [partial(chain.forward, i) for i in branches], at, weights, arriving
        )

    def backward(at: At, weights: Weights, stash: Any, arriving: Any) -> Any:
        return lax.switch(
            at.stage, [partial(chain.backward, i) for i in branches], at, weights, stash, arriving
        )

    def gradient(at: At, weights: Weights, context: Any) -> Any:
        return lax.switch(
            at.stage, [partial(chain.gradient, i) for i in branches], weights, context
        )

    wire = {k: jax.ShapeDtypeStruct((n,), jnp.dtype(k)) for k, n in chain.wires.items()}
    return Model(wire, chain.loss, forward, backward, gradient)


class _Chain:
    """Unlike stages, and the buffers in which each of them finds and leaves things."""

    def __init__(
        self,
        stage_fns: Sequence[StageFn],
        loss_fn: LossFn,
        kept: Kept,
        params: Sequence[Any],
        weights: Weights,
        at: At,
    ) -> None:
        self.loss_fn = loss_fn
        self.last = len(stage_fns) - 1
        self.params = params
        self.inputs = [jax.eval_shape(lambda x: x, at.feed)]
        self.stages: list[Stage] = []
        self.kept: list[Any] = []
        for i, (fn, own) in enumerate(zip(stage_fns, params, strict=True)):
            example = (Weights(own, weights.shared), self.inputs[i], at.key)
            self.stages.append(kept.stage(fn, *example, keep_output=i == self.last))
            y, stash = jax.eval_shape(self.stages[i].forward, *example)
            self.inputs.append(y)
            self.kept.append(stash)
        self.loss = check_loss(loss_fn, self.inputs.pop(), at.target, weights.shared)
        self.wires = buffers.sizes(self.inputs[1:])
        self.returns = buffers.inexact(self.wires)
        self.gradients = buffers.inexact({k: x.size for k, x in weights.own.items()})
        self.kept_sizes = buffers.sizes(self.kept)
        self.contexts = [
            jax.eval_shape(partial(self._backward, i), at, weights, self.kept[i], self._no_return())
            for i in range(len(stage_fns))
        ]
        self.contexts = [context for *_, context in self.contexts]
        self.context_sizes = buffers.sizes(self.contexts)

    def _no_return(self) -> list[jax.Array]:
        return [jnp.zeros(n, jnp.dtype(k)) for k, n in self.returns.items()]

    def _weights(self, i: int, weights: Weights) -> Weights:
        return Weights(buffers.unpack(weights.own, self.params[i]), weights.shared)

    def forward(self, i: int, at: At, weights: Weights, arriving: Any) -> Any:
        """Run stage i on what has arrived, or on the model's input."""
        x = at.feed if i == 0 else buffers.unpack(arriving, self.inputs[i])
        y, stash = self.stages[i].forward(self._weights(i, weights), x, at.key)
        # The output of the last stage, often the largest of all, goes nowhere.
        leaving = buffers.pack(None if i == self.last else y, self.wires)
        return leaving, buffers.pack(stash, self.kept_sizes)

    def backward(self, i: int, at: At, weights: Weights, stash: Any, arriving: Any) -> Any:
        """Run the backward of stage i on the cotangent that has arrived, or on the loss."""
        stash = buffers.unpack(stash, self.kept[i])
        loss, shared, cotangent, context = self._backward(i, at, weights, stash, arriving)
        back = buffers.pack(cotangent if i else None, self.returns)
        return loss, shared, list(back.values()), buffers.pack(context, self.context_sizes)

    def _backward(self, i: int, at: At, weights: Weights, stash: Any, arriving: Any) -> Any:
        def seed(y: Any) -> Any:
            if i == self.last:
                loss, shared, cotangent = _loss(self.loss_fn, y, at.target, weights.shared)
                return (loss, shared), cotangent
            nothing = jax.tree.map(jnp.zeros_like, inexact_leaves(weights.shared))
            back = dict(zip(self.returns, arriving, strict=True))
            cotangent = buffers.unpack(back, inexact_leaves(self.inputs[i + 1]))
            return (jnp.zeros((), self.loss), nothing), cotangent

        stage_weights = self._weights(i, weights)
        (loss, shared), cotangent, context = self.stages[i].backward(
            stage_weights, stash, at.key, seed
        )
        return loss, shared, cotangent, context

    def gradient(self, i: int, weights: Weights, context: Any) -> Gradient:
        """Return the gradient of stage i's weights, packed as they are."""
        weights = self._weights(i, weights)
        context = buffers.unpack(context, self.contexts[i])
        own, shared = _by_kind(weights, self.stages[i].gradient(weights, context))
        return Gradient(list(buffers.pack(own, self.gradients).values()), shared)
