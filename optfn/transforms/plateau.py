"""A learning rate that falls when a metric stops improving."""

from typing import Any, NamedTuple, TypeGuard

import jax
import jax.numpy as jnp
import optax

from optfn import core
from optfn.core import checks, leafwise
from optfn.core.checks import Number, Scalar
from optfn.core.traits import traits
from optfn.core.types import OptState, Params, PyTree, Stepped, Updates
from optfn.mesh.state import names as state_names
from optfn.transforms import learning_rate as rates


@traits(link="plateau")
class ReduceOnPlateauState(NamedTuple):
    """State of `reduce_on_plateau`: seven scalars, 25 bytes."""

    rate: rates.LearningRateState
    best: jax.Array
    value: jax.Array
    observed: jax.Array
    bad_values: jax.Array
    cooldown: jax.Array


class EvaluationPlateauState(ReduceOnPlateauState):
    """The state of a plateau that watches evaluations instead of the metric of each update.

    sign: see `_Plateau`; in the type, because `record_evaluation` gets the state alone.
    """

    __slots__ = ()
    sign = 1.0


class RisingEvaluationPlateauState(EvaluationPlateauState):
    """The state of a plateau that watches evaluations, where a larger one is better."""

    __slots__ = ()
    sign = -1.0


_KINDS = {
    ("evaluation", "min"): EvaluationPlateauState,
    ("evaluation", "max"): RisingEvaluationPlateauState,
}


@core.transform(complex_leaves=True)
def reduce_on_plateau(
    learning_rate: Number,
    *,
    monitor: str = "value",
    mode: str = "min",
    decay_rate: float = 0.1,
    patience: int = 10,
    threshold: float = 1e-4,
    threshold_mode: str = "rel",
    cooldown: int = 0,
    min_lr: float = 0.0,
) -> core.Unchecked:
    """Multiply updates by a rate that is reduced, but not below `min_lr`, when more than `patience`
    metrics in a row have not improved, each judged one update late.

    Put it after an optimizer with rate 1, and before an average:

        tx = optfn.chain(optfn.adam(1.0), optfn.schedules.reduce_on_plateau(1e-3))
        updates, state = tx.update(grads, state, params, value=loss)

    In `make_train_step` and `minimize` the metric is the loss of every step. To watch the
    evaluation of `minimize`, so that `patience` counts evaluations:

        tx = optfn.chain(
            optfn.adam(1.0), optfn.schedules.reduce_on_plateau(1e-3, monitor="evaluation")
        )
        optfn.minimize(loss_fn, tx, params, batches, evaluate=evaluate, evaluate_every=100)

    A metric that you pass to an update takes effect in the next update, and so does an evaluation.
    A NaN is a bad value, also as the first one. An update that does not count is not seen, and
    inside `accumulate` the metric is the mean of the calls' values.
    With v the metric passed to the previous update:

        if cooling down: count down; otherwise
            better = v < best − gap (v > best + gap)     gap = threshold·best ("rel") or threshold
            best, bad = (v, 0) if better else (best, bad + 1)
            if bad > patience: rate = max(rate·decay_rate, min_lr), bad = 0, cooling down begins
        u = rate·u

    Args:
      learning_rate: the initial rate, a number ≥ 0.
      monitor: "value": the `value` of each update. "evaluation": the number that `evaluate` of
        `minimize` or `fit` returns, or the one of them that `fit`'s `monitor` names. In a loop that
        you write, `record_evaluation` sets it; updates then need no `value`.
      mode: "min" or "max": whether a smaller or a larger metric is better.
      decay_rate: the factor of a reduction, in (0, 1).
      patience: after how many more values without improvement the rate is reduced, ≥ 0.
      threshold: the smallest change that counts as an improvement, ≥ 0.
      threshold_mode: "rel" or "abs".
      cooldown: how many values are ignored after a reduction, ≥ 0.
      min_lr: the smallest rate, ≥ 0.

    `update` takes `value`, a scalar, or None in a step without a new metric, such as a step within
    an epoch. `get_learning_rate` and `set_learning_rate` refer to this rate.

    State: the rate and its step, the best and the last value, two counters and a flag; 25 bytes.

    Source: fluid.dygraph.ReduceLROnPlateau.
    """
    lr = checks.nonnegative("learning_rate", learning_rate)
    checks.choice("monitor", monitor, ("value", "evaluation"))
    kind = _KINDS.get((monitor, mode), ReduceOnPlateauState)
    watches_evaluation = monitor == "evaluation"
    checks.choice("mode", mode, ("min", "max"))
    checks.choice("threshold_mode", threshold_mode, ("rel", "abs"))
    plateau = _Plateau(
        sign=1.0 if mode == "min" else -1.0,
        factor=checks.number("decay_rate", decay_rate, checks.INSIDE_UNIT),
        patience=checks.count("patience", patience, low=0),
        threshold=checks.nonnegative("threshold", threshold),
        is_relative=threshold_mode == "rel",
        cooldown=checks.count("cooldown", cooldown, low=0),
        min_lr=checks.nonnegative("min_lr", min_lr),
    )

    def init(params: Params) -> ReduceOnPlateauState:
        return kind(
            rate=rates.init_plateau(lr),
            best=jnp.asarray(jnp.inf, jnp.float32),
            value=jnp.zeros((), jnp.float32),
            observed=jnp.zeros((), jnp.bool_),
            bad_values=jnp.zeros((), jnp.int32),
            cooldown=jnp.zeros((), jnp.int32),
        )

    def update(updates: Updates, state: OptState, params: Params = None, **extra: Any) -> Stepped:
        value = None if watches_evaluation else extra.get("value")
        if "value" not in extra and not watches_evaluation:
            raise ValueError(
                "reduce_on_plateau needs the metric: call update(updates, state, params, "
                "value=metric), or pass value=None in a step without a metric"
            )
        # Judged one update late: the loss of a step is only known after its gradient.
        state = plateau.judge_value(state)
        updates = leafwise.scale(updates, state.rate.learning_rate)
        return updates, plateau.record_value(state, value)

    return core.Unchecked(init, update)


class _Plateau(NamedTuple):
    """The rule of falling rates, with the options of `reduce_on_plateau`.

    sign: 1 where a smaller metric is better, else −1; `best` and `value` are multiplied by it.
    """

    sign: float
    factor: Scalar
    patience: int
    threshold: Scalar
    is_relative: bool
    cooldown: int
    min_lr: Scalar

    def record_value(
        self, state: ReduceOnPlateauState, value: jax.Array | None
    ) -> ReduceOnPlateauState:
        """Return the state with the rate's step counted and `value`, a scalar, noted for the next
        update, or noted as missing if it is None."""
        rate = state.rate._replace(step=core.next_step(state.rate.step))
        state = state._replace(rate=rate, observed=jnp.asarray(value is not None))
        if value is None:
            return state
        return state._replace(value=self.sign * _check_scalar(value).astype(jnp.float32))

    def judge_value(self, state: ReduceOnPlateauState) -> ReduceOnPlateauState:
        """Return the state with the noted metric judged, which reduces the rate after more than
        `patience` bad ones and is ignored in a cooldown, or unchanged if none is noted."""
        gap = self.sign * self.threshold * state.best if self.is_relative else self.threshold
        # best is ∞ at first: ∞ − threshold·∞ is NaN, and no value would be better. A value that is
        # NaN never is.
        better = state.value < jnp.where(jnp.isinf(state.best), state.best, state.best - gap)
        bad = jnp.where(better, 0, state.bad_values + 1)
        reduce = bad > self.patience
        rate = state.rate.learning_rate
        # Not above the rate, which may be below min_lr from the start.
        lower = jnp.minimum(rate, jnp.maximum(rate * self.factor, self.min_lr))
        counted = state._replace(
            rate=state.rate._replace(learning_rate=jnp.where(reduce, lower, rate)),
            best=jnp.where(better, state.value, state.best),
            bad_values=jnp.where(reduce, 0, bad),
            cooldown=jnp.where(reduce, self.cooldown, 0),
        )
        cooled = state._replace(cooldown=state.cooldown - 1)
        # Selections in each field, which compute both.
        observed = optax.tree.where(state.cooldown > 0, cooled, counted)
        return optax.tree.where(state.observed, observed, state)


def is_evaluation_plateau(x: object) -> TypeGuard[EvaluationPlateauState]:
    """Tell whether `x` is the state of a plateau that watches evaluations instead of the metric of
    each update."""
    return isinstance(x, EvaluationPlateauState)


def record_evaluation(state: OptState, value: Number) -> OptState:
    """Return a state with this evaluation in each `reduce_on_plateau(monitor="evaluation")`, or
    raise a ValueError if there is none or `value` is not a scalar.

    `minimize` and `fit` call it after each evaluation; you call it in a loop that you write. It
    takes effect in the next update. Nothing is recompiled.

    Args:
      state: the state of an optimizer, however wrapped, or a whole TrainState.
      value: the evaluation, a number or a 0-d array.

    Raises:
      ValueError: no plateau of the state watches evaluations, or `value` is not a scalar.
    """
    number = _check_scalar(value).astype(jnp.float32)
    if not any(True for _ in state_names.iterate_nodes(is_evaluation_plateau, state)):
        raise ValueError(
            'record_evaluation: the state has no reduce_on_plateau with monitor="evaluation"'
        )

    def fill(node: PyTree, x: Any) -> PyTree:
        # jax.tree.map keeps a wrapper around the array, such as one per worker.
        return jax.tree.map(lambda old: jnp.full_like(old, x), node)

    def record(node: PyTree) -> PyTree:
        if not is_evaluation_plateau(node):
            return node
        signed = node.sign * number
        return node._replace(value=fill(node.value, signed), observed=fill(node.observed, True))

    return jax.tree.map(record, state, is_leaf=is_evaluation_plateau)


def _check_scalar(value: Number) -> jax.Array:
    """Return a metric as an array, or raise a ValueError unless it is a scalar."""
    array = jnp.asarray(value)
    if array.shape != ():
        raise ValueError(f"value must be a scalar; got an array of shape {array.shape}")
    return array
