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
from optfn.loss.keys import fold_in
from optfn.loss.mean import check_mean, is_mean
from optfn.pipeline.model import ModelFunctions, Weights
from optfn.pipeline.plan import Plan

# (params, x) -> x; it also gets `shared` and `rng` if it has parameters of these names.
StageFunction: TypeAlias = Callable[..., PyTree]
# inputs -> x; it also gets `shared` and `rng` likewise.
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
        checks.instance("loss_fn", loss_fn, Callable, "a function (outputs, targets) -> loss")
        checks.instance("embed", embed, Callable | None, "a function inputs -> x")
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
        flags = {"shared": has_shared, "rng": has_rng}
        given = {name for name, is_given in flags.items() if is_given}
        # A loss gets no key, also if it has a parameter `rng`.
        functions: list[tuple[str, Callable[..., Any], tuple[str, ...], frozenset[str]]] = [
            *(("stage_fn", fn, ("params", "x"), _find_keywords(fn)) for fn in self.stages),
            ("loss_fn", self.loss, ("outputs", "targets"), _find_keywords(self.loss) - {"rng"}),
        ]
        if self.embed is not None:
            functions.append(("embed", self.embed, ("inputs",), _find_keywords(self.embed)))
        for name in sorted(given.difference(*(keywords for *_, keywords in functions))):
            raise ValueError(f"{name} was passed, but no function has a parameter {name!r}")
        for name, fn, arguments, keywords in functions:
            checks.check_signature(name, fn, arguments, given & keywords, _BY_NAME)

    def bind_keywords(self) -> ModelFunctions:
        """Return the functions with the model's arguments, each passing `shared` and `rng` on only
        if it takes them, and the first stage with `embed` before it."""
        stages = [partial(_call_stage, fn) for fn in self.stages]
        loss = partial(_call_loss, self.loss)
        if self.embed is None:
            return ModelFunctions(stages, loss)
        run = partial(_embed_first, partial(_call_embedding, self.embed), stages[0])
        return ModelFunctions([run], lambda x, targets, shared: loss(x.h, targets, shared))

    def carry_inputs(self, inputs: PyTree, shared: Params, rng: Key) -> PyTree:
        """Return the value before the first stage, which is the inputs, or with `embed` a
        `_Carried` of them, zeros like x, and a count of 0 for each example."""
        if self.embed is None:
            return inputs
        shapes = jax.eval_shape(partial(_call_embedding, self.embed), inputs, shared, rng)
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
    # A cond, so that later stages look nothing up.
    h = lax.cond(
        x.stage[0] == 0,
        lambda inputs, shared, key, h: embed(inputs, shared, key),
        lambda inputs, shared, key, h: h,
        inputs, weights.shared, key, x.h,
    )  # fmt: skip
    return _Carried(inputs, run(weights, h, key), x.stage + 1)


def _call_embedding(embed: Embedding, inputs: PyTree, shared: Params, key: Key) -> PyTree:
    """Call the embedding, with `shared` and a key derived from the key of the first stage, if it
    takes them and they are given."""
    rng = None if key is None else fold_in(key, _EMBEDDING)
    return _call_by_name(embed, inputs, shared=shared, rng=rng)


# The number that is folded into the key of the first stage; a stage numbers its draws from 0.
_EMBEDDING = 2**31 - 1
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


def _call_by_name(fn: Callable[..., Any], *arguments: PyTree, **options: PyTree) -> Any:
    """Call a function with the options that are not None and that it has a parameter for."""
    known = _find_keywords(fn)
    passed = {k: v for k, v in options.items() if k in known and v is not None}
    return fn(*arguments, **passed)


def _call_stage(fn: StageFunction, weights: Weights, x: PyTree, key: Key) -> PyTree:
    """Call a stage with its weights and x, and with `shared` and `rng` if it takes them and they
    are given."""
    return _call_by_name(fn, weights.stage, x, shared=weights.shared, rng=key)


def _call_loss(fn: LossFn, outputs: PyTree, targets: PyTree, shared: Params) -> Any:
    """Call the loss, with `shared` if it takes it and it is given, and return it, checked and as
    arrays if it is a `Mean`."""
    loss = _call_by_name(fn, outputs, targets, shared=shared)
    return check_mean("loss_fn", loss) if is_mean(loss) else loss
