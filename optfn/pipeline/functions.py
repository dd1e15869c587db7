"""The functions that a user passes for the stages of a pipeline and for its loss."""

import inspect
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jax import lax

from optfn.core import checks
from optfn.core.types import LossFn, Params, PyTree
from optfn.loss.jaxprs.pullback import Key
from optfn.loss.mean import check_mean, is_mean
from optfn.pipeline.model import ModelFunctions, Weights
from optfn.pipeline.plan import Plan

# (params, x) -> x; it also gets `shared` and `rng` if it has parameters of these names.
StageFunction: TypeAlias = Callable[..., PyTree]
# inputs -> x; it also gets `shared` if it has a parameter of this name.
Embedding: TypeAlias = Callable[..., PyTree]


class UserFunctions(NamedTuple):
    """The arguments `stage_fn` and `loss_fn` of `pipeline_value_and_grad`.

    stages: the functions of the stages; one if they are homogeneous.
    loss: (outputs, targets) -> loss; it also gets `shared` if it has a parameter of this name.
    embed: (inputs) -> x, which the first stage runs; it also gets `shared` likewise. None: inputs
      are x.
    """

    stages: tuple[StageFunction, ...]
    loss: LossFn
    homogeneous: bool
    embed: Embedding | None = None

    @classmethod
    def from_arguments(
        cls,
        stage_fn: StageFunction | Sequence[StageFunction],
        loss_fn: LossFn,
        embed: Embedding | None,
    ) -> "UserFunctions":
        """Return the user's functions, the stages' as a tuple. Raise a TypeError for an object that
        is no function, and a ValueError for `embed` beside a list."""
        stages = (stage_fn,) if callable(stage_fn) else stage_fn
        if not (isinstance(stages, list | tuple) and stages and all(map(callable, stages))):
            raise TypeError(
                f"stage_fn must be a function (params, x) -> x or a list of them; got {stage_fn!r}"
            )
        if not callable(loss_fn):
            raise TypeError(
                f"loss_fn must be a function (outputs, targets) -> loss; got {loss_fn!r}"
            )
        if embed is not None and not callable(embed):
            raise TypeError(f"embed must be a function inputs -> x; got {embed!r}")
        if embed is not None and not callable(stage_fn):
            raise ValueError(
                "embed belongs to equal stages; in a list of stage functions the first one embeds"
            )
        return cls(tuple(stages), loss_fn, callable(stage_fn), embed)

    def check_number(self, plan: Plan, axis_name: str) -> None:
        """Raise a ValueError unless a list of stages has one function for each chunk of the plan,
        and accept a single function for every plan."""
        needed = plan.num_stages * plan.virtual_stages
        if not self.homogeneous and len(self.stages) != needed:
            raise ValueError(
                f"stage_fn must be a list of {needed} functions, for {plan.num_stages} devices "
                f"along {axis_name!r} with virtual_stages={plan.virtual_stages}; got "
                f"{len(self.stages)}"
            )

    def check_keywords(self, has_shared: bool, has_rng: bool) -> None:
        """Raise a ValueError if no function takes a given `shared` or `rng`, and a TypeError if a
        function requires further arguments."""
        given = {"shared"} if has_shared else set()
        if has_rng:
            given.add("rng")
        # A loss gets no key, also if it has a parameter `rng`.
        loss_keywords = _find_keywords(self.loss) - {"rng"}
        others = map(_find_keywords, (*self.stages, *([self.embed] if self.embed else [])))
        for name in sorted(given.difference(loss_keywords, *others)):
            raise ValueError(f"{name} was passed, but no function has a parameter {name!r}")
        for fn in self.stages:
            checks.check_signature(
                "stage_fn", fn, ("params", "x"), given & _find_keywords(fn), _BY_NAME
            )
        checks.check_signature(
            "loss_fn", self.loss, ("outputs", "targets"), given & loss_keywords, _BY_NAME
        )

    def bind_keywords(self) -> ModelFunctions:
        """Return the functions with the model's arguments, each passing `shared` and `rng` on only
        if it takes them, and the first stage with `embed` before it."""
        stages = [partial(_call_stage, fn, _find_keywords(fn)) for fn in self.stages]
        loss = partial(_call_loss, self.loss, _find_keywords(self.loss))
        if self.embed is None:
            return ModelFunctions(stages, loss)
        run = partial(_embed_first, partial(_call_embedding, self.embed), stages[0])
        return ModelFunctions([run], lambda x, targets, shared: loss(x.h, targets, shared))

    def carry_inputs(self, inputs: PyTree, shared: Params) -> PyTree:
        """Return the value before the first stage, which is the inputs, or with `embed` a
        `_Carried` of them, zeros like x, and a count of 0 for each example."""
        if self.embed is None:
            return inputs
        shapes = jax.eval_shape(partial(_call_embedding, self.embed), inputs, shared)
        h = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
        size = jnp.shape(jax.tree.leaves(inputs)[0])[0]
        return _Carried(inputs, h, jnp.zeros(size, jnp.int32))


class _Carried(NamedTuple):
    """The value that stages pass on if the first embeds the inputs. Its arrays have the examples as
    their leading axis.

    inputs: the inputs of the model.
    h: x, the hidden values.
    stage: the count of stages before, for each example.
    """

    inputs: PyTree
    h: PyTree
    stage: jax.Array


def _embed_first(
    embed: Callable[..., PyTree],
    run: Callable[..., PyTree],
    weights: Weights,
    x: _Carried,
    key: Key,
) -> _Carried:
    """Embed the inputs if no stage ran before, else take the hidden values, run the stage on them,
    and return the result with the count raised by 1."""
    inputs = lax.stop_gradient(x.inputs)
    # A cond, so that other stages look nothing up.
    h = lax.cond(
        x.stage[0] == 0,
        lambda inputs, shared, h: embed(inputs, shared),
        lambda inputs, shared, h: h,
        inputs, weights.shared, x.h,
    )  # fmt: skip
    return _Carried(inputs, run(weights, h, key), x.stage + 1)


def _call_embedding(embed: Embedding, inputs: PyTree, shared: Params) -> PyTree:
    """Call the embedding, with `shared` if it takes it and it is given."""
    passed = "shared" in _find_keywords(embed) and shared is not None
    return embed(inputs, shared=shared) if passed else embed(inputs)


_BY_NAME = (
    ". The shared params of PipelineParams are passed by the name of a parameter `shared`, and "
    "keys by `rng`"
)


def _find_keywords(fn: Callable[..., Any]) -> frozenset[str]:
    """Return which of `shared` and `rng` are parameters of a function, none if it has no
    signature."""
    try:
        parameters = inspect.signature(fn).parameters
    except (TypeError, ValueError):  # a callable without a signature
        return frozenset()
    return frozenset({"shared", "rng"} & set(parameters))


def _call_stage(
    fn: StageFunction, keywords: frozenset[str], weights: Weights, x: PyTree, key: Key
) -> PyTree:
    """Call a stage with its weights and x, and with `shared` and `rng` if it takes them and they
    are given."""
    options = {"shared": weights.shared, "rng": key}
    passed = {k: v for k, v in options.items() if k in keywords and v is not None}
    return fn(weights.stage, x, **passed)


def _call_loss(
    fn: LossFn, keywords: frozenset[str], outputs: PyTree, targets: PyTree, shared: Params
) -> Any:
    """Call the loss, with `shared` if it takes it and it is given, and return it, checked and as
    arrays if it is a `Mean`."""
    passed = {"shared": shared} if "shared" in keywords and shared is not None else {}
    loss: Any = fn(outputs, targets, **passed)
    return check_mean("loss_fn", loss) if is_mean(loss) else loss
