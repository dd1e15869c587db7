"""The stages of a pipeline as one program that every device runs.

Homogeneous stages are one function, applied to the weights that a device has. Heterogeneous stages
are the branches of a switch, with all inputs and outputs ravelled into buffers of one size.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jax import lax

from optfn.core import tree
from optfn.core.types import Params, PyTree
from optfn.loss.jaxprs.pullback import Key, StageFn, replace_inexact_leaves, select_inexact_leaves
from optfn.loss.mean import Mean, check_constant_weight, is_mean
from optfn.pipeline import buffers
from optfn.pipeline.stage import (
    Context,
    Leaves,
    Stage,
    Stash,
    input_stashing_stage,
    make_split_backward_stage,
    residual_stashing_stage,
)

# An integer that is known when tracing, or a traced one.
Index: TypeAlias = int | jax.Array
# The output of a stage, which is passed to the next stage, or its cotangent, which comes back from
# there. All stages have the same type.
Activation: TypeAlias = PyTree
# (outputs, target, shared weights) -> the loss, a scalar or a `Mean`
StageLossFn: TypeAlias = Callable[[PyTree, PyTree, Params], Any]
# Backward, like that of a `Stage`: ((loss, its gradient of the shared weights), cotangent, context)
BackwardResult: TypeAlias = tuple[tuple[PyTree, Leaves], Activation, Context]


class WorkItem(NamedTuple):
    """One piece of work of a device: a stage of the model, and one microbatch."""

    stage: Index
    model_input: PyTree
    target: PyTree
    key: Key


class Weights(NamedTuple):
    """The weights of one stage (ravelled if stages are heterogeneous), and the shared ones."""

    stage: Params
    shared: Params


# (weights, x, key) -> y
WeightsFn: TypeAlias = Callable[[Weights, PyTree, Key], PyTree]


class ModelFunctions(NamedTuple):
    """The functions of the stages of a model, one if they are homogeneous, and of its loss."""

    stages: Sequence[WeightsFn]
    loss: StageLossFn


class Gradient(NamedTuple):
    """The gradient of `Weights`, inexact leaves only."""

    stage: Leaves
    shared: Leaves


class Model(NamedTuple):
    """A model as the engine runs it.

    activation: the shapes of the output of a stage; cotangents have the shapes of its inexact
      leaves.
    loss: the shape and dtype of the loss, or of both numbers of a `Mean`.
    forward: (item, weights, activation) -> (activation, stash)
    backward: (item, weights, stash, cotangent) -> ((loss, gradient of the loss with respect to the
      shared weights), cotangent, context); the loss is 0 in all stages but the last.
    weight_gradient: (item, weights, context) -> Gradient
    """

    activation: Activation
    loss: PyTree
    forward: Callable[[WorkItem, Weights, Activation], tuple[Activation, Stash]]
    backward: Callable[[WorkItem, Weights, Stash, Activation], BackwardResult]
    weight_gradient: Callable[[WorkItem, Weights, Context], Gradient]


class StashPolicy(NamedTuple):
    """The values saved between forward, backward and weight gradient of a microbatch."""

    stash: str  # "input" or "residual"
    splits_backward: bool  # whether the gradient of the weights is scheduled apart from backward

    def make_stage(
        self, fn: StageFn, weights: Params, x: PyTree, key: Key, *, keep_output: bool
    ) -> Stage:
        """Return the stage of `fn` that saves its input or its residuals, and splits its backward
        or not, by this policy, with the remaining arguments as examples to trace."""
        stash_input = self.stash == "input"
        if self.splits_backward:
            return make_split_backward_stage(
                fn, weights, x, key, keep_output=keep_output, stash_input=stash_input
            )
        if stash_input:
            return input_stashing_stage(fn)
        return residual_stashing_stage(fn, weights, x, key, keep_output=keep_output)


def check_loss(loss_fn: StageLossFn, y: PyTree, target: PyTree, shared: Params) -> PyTree:
    """Trace the loss, and return its shape and dtype, for a `Mean` of both numbers. Raise an error
    unless the loss is a real scalar of constant weight.

    Raises:
      TypeError: the loss is not real.
      ValueError: the loss is not a scalar, or the weight of a `Mean` depends on the params.
    """
    loss = jax.eval_shape(loss_fn, y, target, shared)
    total = loss.total if is_mean(loss) else loss
    is_array = isinstance(total, jax.ShapeDtypeStruct)
    if not is_array or total.shape != ():
        got = f"an array of shape {total.shape}" if is_array else type(total).__name__
        raise ValueError(
            f"loss_fn must return a scalar, the mean over the examples that it gets; got {got}"
        )
    if not jnp.issubdtype(total.dtype, jnp.floating):
        raise TypeError(f"loss_fn must return a real number; got dtype {total.dtype}")
    if is_mean(loss) and jnp.issubdtype(loss.weight.dtype, jnp.floating):

        def weight_of(reads: tuple[PyTree, Params]) -> jax.Array:
            return loss_fn(reads[0], target, reads[1]).weight

        check_constant_weight(weight_of, (y, shared))
    return Mean(total, jax.ShapeDtypeStruct((), total.dtype)) if is_mean(loss) else loss


def _differentiate_loss(
    loss_fn: StageLossFn, y: PyTree, target: PyTree, shared: Params
) -> tuple[tuple[PyTree, Leaves], Leaves]:
    """Return ((loss, gradient of shared), cotangent of y), the last two for inexact leaves only, of
    the total for a `Mean`, and 0 if its weight is 0."""

    def loss_of(y_leaves: Leaves, shared_leaves: Leaves) -> tuple[jax.Array, PyTree]:
        outputs = replace_inexact_leaves(y, y_leaves)
        loss = loss_fn(outputs, target, replace_inexact_leaves(shared, shared_leaves))
        return (loss.total, loss.weight) if is_mean(loss) else (loss, None)

    value_and_grad = jax.value_and_grad(loss_of, (0, 1), has_aux=True)
    (loss, weight), (cotangent, gradient) = value_and_grad(
        select_inexact_leaves(y), select_inexact_leaves(shared)
    )
    if weight is None:
        return (loss, gradient), cotangent
    gradient, cotangent = jax.tree.map(
        lambda g: jnp.where(weight == 0, jnp.zeros_like(g), g), (gradient, cotangent)
    )
    return (Mean(loss, weight.astype(loss.dtype)), gradient), cotangent


def _make_zero_loss(loss: PyTree, shared: Params) -> tuple[PyTree, Leaves]:
    """Return zeros for the loss and its gradient of `shared`, for stages that are not the last."""
    gradient = jax.tree.map(jnp.zeros_like, select_inexact_leaves(shared))
    return jax.tree.map(lambda x: jnp.zeros((), x.dtype), loss), gradient


def _split_gradient(weights: Weights, leaves: Leaves) -> Gradient:
    """Split the leaves of a gradient: the stage's first, then the shared ones."""
    num_stage_leaves = len(select_inexact_leaves(weights.stage))
    return Gradient(list(leaves[:num_stage_leaves]), list(leaves[num_stage_leaves:]))


def make_homogeneous_model(
    functions: ModelFunctions,
    policy: StashPolicy,
    num_stages: int,
    weights: Weights,
    item: WorkItem,
) -> Model:
    """Return the model that runs one function as each of `num_stages` stages, takes its input in
    stage 0, and computes the loss in the last stage only.

    `weights` and `item` are examples, to trace with.
    """
    # The model's input has the type of every stage's output.
    activation = jax.eval_shape(lambda x: x, item.model_input)
    (stage_fn,), loss_fn = functions
    fn = _add_output_check(activation, stage_fn)
    like = check_loss(loss_fn, activation, item.target, weights.shared)
    stage = policy.make_stage(fn, weights, item.model_input, item.key, keep_output=True)

    def forward(item: WorkItem, weights: Weights, received: Activation) -> tuple[Activation, Stash]:
        # All devices run one program: stage 0 selects the model's input.
        x = jax.tree.map(partial(jnp.where, item.stage == 0), item.model_input, received)
        return stage.forward(weights, x, item.key)

    def backward(
        item: WorkItem, weights: Weights, stash: Stash, received: Activation
    ) -> BackwardResult:
        def seed(y: PyTree) -> tuple[PyTree, Leaves]:
            # With a cond only the last stage computes the loss; in inner ones it may be NaN.
            return lax.cond(
                item.stage == num_stages - 1,
                lambda: _differentiate_loss(loss_fn, y, item.target, weights.shared),
                lambda: (_make_zero_loss(like, weights.shared), received),
            )

        return stage.backward(weights, stash, item.key, seed)

    def weight_gradient(item: WorkItem, weights: Weights, context: Context) -> Gradient:
        del item
        return _split_gradient(weights, stage.weight_gradient(weights, context))

    return Model(activation, like, forward, backward, weight_gradient)


def _add_output_check(activation: Activation, stage_fn: WeightsFn) -> WeightsFn:
    """Wrap `stage_fn` so that it raises a ValueError if its output has another structure, shape or
    dtype than `activation`, and returns it otherwise."""

    def fn(weights: Weights, x: PyTree, key: Key) -> PyTree:
        y = jax.tree.map(jnp.asarray, stage_fn(weights, x, key))
        hint = (
            "every stage must return the shapes and dtypes that it takes, since the next stage is "
            "the same function. If your stages differ, pass a list of functions"
        )
        returned: Any = jax.tree.structure(y)
        needed: Any = jax.tree.structure(activation)
        if returned != needed:
            raise ValueError(f"stage_fn takes {needed} but returns {returned}: {hint}")
        for place, a, b in tree.items(activation, y):
            if not tree.is_masked(a) and (a.shape, a.dtype) != (b.shape, b.dtype):
                at = f" ({place})" if str(place) else ""
                raise ValueError(
                    f"stage_fn takes {a.dtype}{list(a.shape)}{at} but returns "
                    f"{b.dtype}{list(b.shape)}: {hint}"
                )
        # If y were weakly typed, its type would differ from the type of the next stage's x.
        return jax.tree.map(lambda a: lax.convert_element_type(a, a.dtype), y)

    return fn


def make_heterogeneous_model(
    functions: ModelFunctions,
    policy: StashPolicy,
    params: Sequence[Params],
    weights: Weights,
    item: WorkItem,
) -> Model:
    """Return the model that runs each stage as a branch of `lax.switch`, with inputs, outputs and
    saved values ravelled into buffers of one size.

    Args:
      functions: the stage functions and the loss; weights.stage are the params of a stage.
      policy: which values are saved between forward and backward.
      params: the params of each stage; only their shapes are read.
      weights: an example to trace with: the params of one stage, ravelled, and the shared ones.
      item: an example to trace with.
    """
    stages = _RavelledStages(functions, policy, params, weights, item)

    def choose(method: Callable[..., Any]) -> Callable[..., Any]:
        branches = [partial(method, i) for i in range(len(functions.stages))]
        return lambda item, *arguments: lax.switch(item.stage, branches, item, *arguments)

    return Model(
        buffers.make_shapes(stages.activation_lengths),
        stages.loss,
        choose(stages.forward),
        choose(stages.backward),
        choose(stages.weight_gradient),
    )


class _RavelledStages:
    """Heterogeneous stages, with inputs and outputs in buffers of the same size for all stages."""

    def __init__(
        self,
        functions: ModelFunctions,
        policy: StashPolicy,
        params: Sequence[Params],
        weights: Weights,
        item: WorkItem,
    ) -> None:
        self.loss_fn = functions.loss
        self.last = len(functions.stages) - 1
        self.params = params
        self.inputs = [jax.eval_shape(lambda x: x, item.model_input)]
        self.stages: list[Stage] = []
        self.stashes: list[Stash] = []
        # 1. Trace each stage on the shapes that the previous one returns.
        for i, (fn, stage_params) in enumerate(zip(functions.stages, params, strict=True)):
            example = (Weights(stage_params, weights.shared), self.inputs[i], item.key)
            self.stages.append(policy.make_stage(fn, *example, keep_output=i == self.last))
            y, stash = jax.eval_shape(self.stages[i].forward, *example)
            self.inputs.append(y)
            self.stashes.append(stash)
        self.loss = check_loss(self.loss_fn, self.inputs.pop(), item.target, weights.shared)
        # 2. The longest tree of each kind decides the buffers.
        self.activation_lengths = buffers.find_lengths(self.inputs[1:])
        self.cotangent_lengths = buffers.select_inexact(self.activation_lengths)
        weight_lengths = {k: x.size for k, x in weights.stage.items()}
        self.gradient_lengths = buffers.select_inexact(weight_lengths)
        self.stash_lengths = buffers.find_lengths(self.stashes)
        # 3. Contexts need stashes and cotangents, so they are traced last.
        cotangent = list(buffers.make_shapes(self.cotangent_lengths).values())
        self.contexts = [
            jax.eval_shape(partial(self._backward, i), item, weights, stash, cotangent)[-1]
            for i, stash in enumerate(self.stashes)
        ]
        self.context_lengths = buffers.find_lengths(self.contexts)

    def _unravel_weights(self, i: int, weights: Weights) -> Weights:
        """Return the weights of stage i as the tree that its function takes, and the shared ones
        unchanged."""
        return Weights(buffers.unravel(weights.stage, self.params[i]), weights.shared)

    def forward(
        self, i: int, item: WorkItem, weights: Weights, received: buffers.Buffers
    ) -> tuple[buffers.Buffers, buffers.Buffers]:
        """Run stage i on the received activation, or stage 0 on the model's input, and return its
        output, or zeros for the last stage, and its stash, ravelled."""
        x = item.model_input if i == 0 else buffers.unravel(received, self.inputs[i])
        y, stash = self.stages[i].forward(self._unravel_weights(i, weights), x, item.key)
        # Don't pass on the output of the last stage, which is often the largest of all.
        activation = buffers.ravel(None if i == self.last else y, self.activation_lengths)
        return activation, buffers.ravel(stash, self.stash_lengths)

    def backward(
        self, i: int, item: WorkItem, weights: Weights, stash: buffers.Buffers, received: Leaves
    ) -> BackwardResult:
        """Run the backward of stage i on the received cotangent, or of the last stage on the loss,
        and return it ravelled, with zeros as the cotangent of stage 0."""
        stash = buffers.unravel(stash, self.stashes[i])
        loss, cotangent, context = self._backward(i, item, weights, stash, received)
        # Don't pass on the cotangent of the model's input.
        passed_on = buffers.ravel(cotangent if i else None, self.cotangent_lengths)
        ravelled_context = buffers.ravel(context, self.context_lengths)
        return loss, list(passed_on.values()), ravelled_context

    def _backward(
        self, i: int, item: WorkItem, weights: Weights, stash: Stash, received: Leaves
    ) -> BackwardResult:
        """Run the backward of the last stage on the loss, or of another on the received cotangent
        with a loss of 0, and return trees, which `backward` ravels."""

        def seed(y: PyTree) -> tuple[PyTree, Leaves]:
            if i == self.last:
                return _differentiate_loss(self.loss_fn, y, item.target, weights.shared)
            no_loss = _make_zero_loss(self.loss, weights.shared)
            ravelled = dict(zip(self.cotangent_lengths, received, strict=True))
            return no_loss, buffers.unravel(ravelled, select_inexact_leaves(self.inputs[i + 1]))

        return self.stages[i].backward(self._unravel_weights(i, weights), stash, item.key, seed)

    def weight_gradient(
        self, i: int, item: WorkItem, weights: Weights, context: buffers.Buffers
    ) -> Gradient:
        """Compute the gradient of stage i's weights from its context, and return it in buffers of
        the inexact dtypes, and the gradient of shared weights as leaves."""
        del item
        weights = self._unravel_weights(i, weights)
        leaves = self.stages[i].weight_gradient(weights, buffers.unravel(context, self.contexts[i]))
        stage_gradient, shared_gradient = _split_gradient(weights, leaves)
        ravelled = buffers.ravel(stage_gradient, self.gradient_lengths)
        return Gradient(list(ravelled.values()), shared_gradient)
