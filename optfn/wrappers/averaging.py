"""Averages of the parameters over the steps, for evaluation: EMA, and ModelAverage of fluid.

Put them last in a chain, where params + updates are the next parameters. `averaged_params` reads an
average, and changes neither state nor params, so training can continue.
"""

import functools
import operator
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding

from optfn import core
from optfn.core import checks, errors, leafwise, numerics, tree
from optfn.core.checks import Number, Scalar
from optfn.core.traits import traits
from optfn.core.types import Leaf, OptState, Params, PyTree, Stepped, Updates
from optfn.core.updates import apply_updates
from optfn.leaves.nodes import is_packed
from optfn.leaves.packed import repack, unpack
from optfn.mesh.compilers import memories, xla
from optfn.mesh.state.names import iterate_nodes
from optfn.transforms.in_place import run_in_passes


@traits(link="average", passes_rows=True, made_of_params={"average": "weight"})
class ExponentialMovingAverageState(NamedTuple):
    """State of `exponential_moving_average`: 4 bytes per parameter, the step and the weight.

    statistics: the average of the model state, if a step keeps it; else None.
    """

    step: jax.Array
    weight: jax.Array
    average: Params
    statistics: PyTree = None


@traits(
    link="average",
    passes_rows=True,
    made_of_params={"sum_1": "num_accumulates", "sum_2": None, "sum_3": "old_num_accumulates"},
)
class ModelAverageState(NamedTuple):
    """State of `model_average`: 12 bytes per parameter and three counters.

    statistics: the three sums of the model state, if a step keeps them; else None.
    """

    num_updates: jax.Array
    num_accumulates: jax.Array
    old_num_accumulates: jax.Array
    sum_1: Params
    sum_2: Params
    sum_3: Params
    statistics: tuple[PyTree, PyTree, PyTree] | None = None


def _next_params(name: str, updates: Updates, params: Params | None) -> Params:
    """Return the parameters after the update, rounded as `apply_updates` rounds, with integer
    leaves masked, or raise a ValueError without params."""
    core.check_params_given(name, params)
    return leafwise.keep_inexact(apply_updates(params, updates))


def _select_statistics(extra: Mapping[str, Any]) -> PyTree:
    """Return the model state that a step passes, with all but its floating-point arrays masked, or
    raise a ValueError if the step passes none."""
    if "model_state" not in extra:
        raise ValueError(
            "an average of the model state needs the new one: call update(..., model_state=)"
        )
    return leafwise.keep_inexact(extra["model_state"])


def add_statistics(
    opt_state: OptState, model_state: PyTree, place: Callable[[PyTree], PyTree]
) -> OptState:
    """Add zeros to each average of params in a state of step 0, to average the floating-point
    arrays of the model state by the same weights.

    Args:
      opt_state: the state of an optimizer.
      model_state: the model state, for its structure.
      place: places new arrays where those of the model state are.
    """

    def add(x: Any) -> Any:
        def zeros() -> PyTree:
            return place(leafwise.zeros_like(leafwise.keep_inexact(model_state)))

        if isinstance(x, ExponentialMovingAverageState):
            return x._replace(statistics=zeros())
        return x._replace(statistics=(zeros(), zeros(), zeros())) if is_average(x) else x

    return jax.tree.map(add, opt_state, is_leaf=is_average)


def has_statistics(opt_state: OptState) -> bool:
    """Tell whether an average in a state averages the model state too."""
    return any(x.statistics is not None for x in iterate_nodes(is_average, opt_state))


def read_statistics(state: OptState, model_state: PyTree) -> PyTree:
    """Return the model state with the averages of its floating-point arrays, or unchanged if
    `state` has no such averages."""
    if state.statistics is None:
        return model_state
    if isinstance(state, ExponentialMovingAverageState):
        return read_average(state._replace(average=state.statistics), model_state)
    one, two, three = state.statistics
    return read_average(state._replace(sum_1=one, sum_2=two, sum_3=three), model_state)


def _widen_param(p: jax.Array) -> jax.Array:
    """Return p in float32 or wider, where a bfloat16 p is rounded once more, so that XLA keeps its
    rounding."""
    # XLA drops a cast to bfloat16 and back, and would average params that nobody has.
    wide = p.astype(numerics.accumulator_dtype(p.dtype))
    return xla.round_to_bfloat16(wide) if p.dtype == jnp.bfloat16 else wide


@core.record_call
def exponential_moving_average(
    decay: Number = 0.999, *, thres_steps: bool = False
) -> optax.GradientTransformationExtraArgs:
    """Keep an exponential moving average of the parameters after each update in the state, for
    `averaged_params` to read, and return updates unchanged.

        d = decay, or min(decay, (1 + s)/(10 + s)) with thres_steps, s = t − 1
        e = d·e + (1 − d)·p        p after the update
        w = d·w + (1 − d)          the sum of the weights, 1 − ∏d
        the average is e/w

    Put it last in a chain, and read the average by `averaged_params`. Inside `master_weights` it
    averages the masters; inside `accumulate` and `skip_nonfinite` it counts only real steps.

    Args:
      decay: the weight of the old average, in [0, 1).
      thres_steps: whether the decay grows with the number of steps, so that early averages follow
        the parameters closely.

    In float32 the sum d·e + (1 − d)·p no longer moves e where |p − e| is below 2⁻²⁵/(1 − d) to
    2⁻²⁴/(1 − d) of |e|: 0.3 to 0.6 % with decay 0.99999, 0.03 to 0.06 % with 0.9999.

    State: step, weight, average; 4 bytes per parameter. Needs params.

    Source: fluid's ExponentialMovingAverage. Paddle 1.8.5 divides by 1 − dᵗ with the current d,
    which is 1 − ∏d only for a constant decay.
    """
    decay = checks.decay("decay", decay)
    thres_steps = checks.flag("thres_steps", thres_steps)

    def init(params: Params) -> ExponentialMovingAverageState:
        zero = jnp.zeros((), numerics.scalar_dtype())
        average = leafwise.zeros_like(leafwise.keep_inexact(params))
        return ExponentialMovingAverageState(core.first_step(), zero, average)

    def rule(
        p: jax.Array, e: jax.Array, *, d: Scalar, complement: Scalar
    ) -> tuple[jax.Array, jax.Array]:
        p = _widen_param(p)
        return p, numerics.scalar(d, p) * e + numerics.scalar(complement, p) * p

    def update(updates: Updates, state: OptState, params: Params = None, **extra: Any) -> Stepped:
        errors.check_state("exponential_moving_average", state, ExponentialMovingAverageState)
        p = _next_params("exponential_moving_average", updates, params)
        d, complement = decay, 1 - decay
        if thres_steps:
            s = state.step.astype(state.weight.dtype)
            d = jnp.minimum(decay, (1 + s) / (10 + s))
            # This is 1 − d, without the rounding error of d.
            complement = jnp.maximum(1 - decay, 9 / (10 + s))
        _, average = leafwise.apply(rule, p, state.average, d=d, complement=complement)
        statistics = state.statistics
        if statistics is not None:
            new = _select_statistics(extra)
            _, statistics = leafwise.apply(rule, new, statistics, d=d, complement=complement)
        weight = (d * state.weight + complement).astype(state.weight.dtype)
        step = core.next_step(state.step)
        return updates, ExponentialMovingAverageState(step, weight, average, statistics)

    return optax.GradientTransformationExtraArgs(init, update)


# As in fluid, the first sum is moved into the second after this many updates, because a float32 sum
# of fewer terms is more accurate.
_SUM_LENGTH = 16384


# Sums move to the next one, the last first: s1 to s2 where that is `full`, and all to s3 at the end
# of a window, to `close` it.


def _move_to_third(s1: jax.Array, s2: jax.Array, s3: jax.Array, **moves: jax.Array) -> Any:
    """Return the sums with s3 = s1 + s2 where a window ends, `close`."""
    return s1, s2, jnp.where(moves["close"], s1 + s2, s3)


def _move_to_second(s1: jax.Array, s2: jax.Array, s3: jax.Array, **moves: jax.Array) -> Any:
    """Return the sums with s2 = 0 where a window ends, else s2 = s1 + s2 where s1 is `full`."""
    return s1, jnp.where(moves["close"], 0, jnp.where(moves["full"], s1 + s2, s2)), s3


def _clear_first(s1: jax.Array, s2: jax.Array, s3: jax.Array, **moves: jax.Array) -> Any:
    """Return the sums with s1 = 0 where it was moved, because it was `full` or a window ends."""
    return jnp.where(moves["full"] | moves["close"], 0, s1), s2, s3


@core.record_call
def model_average(
    average_window_rate: Number, *, min_average_window: int = 10000, max_average_window: int = 10000
) -> optax.GradientTransformationExtraArgs:
    """Keep sums of the parameters over a window of the last updates in the state, and return
    updates unchanged. `averaged_params` reads the mean.

        updates += 1;  acc += 1;  s1 += p                     p after the update
        if updates mod 16384 = 0:  s2 += s1;  s1 = 0
        if acc ≥ min_window and acc ≥ min(max_window, ⌊updates·rate⌋):
            s3 = s1 + s2;  s1 = s2 = 0;  old = acc;  acc = 0
        the average is (s1 + s2 + s3)/(acc + old)

    Put it last in a chain, and read the average by `averaged_params`. As in fluid, updates·rate is
    computed in float32.

    Args:
      average_window_rate: rate, the length of the window as a fraction of all updates, ≥ 0. Above
        1, with a warning, a window ends only at `max_average_window`.
      min_average_window: the shortest window, in updates, ≥ 1 and ≤ max_average_window.
      max_average_window: the longest window, in updates, ≥ 1.

    State: three sums and three int32 counters; 12 bytes per parameter. On a CPU or TPU, s2 and s3
    are read and written only in steps that move sums. Needs params.

    Source: fluid's ModelAverage.
    """
    rate = checks.nonnegative("average_window_rate", average_window_rate)
    if isinstance(rate, float) and rate > 1:  # an array may be traced
        checks.warn(
            f"model_average: average_window_rate={rate:g} is a fraction of all updates; above 1 no "
            "window ends before max_average_window, so the first params stay in the average"
        )
    shortest = checks.count("min_average_window", min_average_window)
    longest = checks.count("max_average_window", max_average_window)
    if shortest > longest:
        raise ValueError(
            f"min_average_window must be <= max_average_window; got {shortest} and {longest}"
        )

    def init(params: Params) -> ModelAverageState:
        one, two, three = (leafwise.zeros_like(leafwise.keep_inexact(params)) for _ in range(3))
        counts = core.first_step(), core.first_step(), core.first_step()
        return ModelAverageState(*counts, one, two, three)

    def update(updates: Updates, state: OptState, params: Params = None, **extra: Any) -> Stepped:
        errors.check_state("model_average", state, ModelAverageState)
        p = _next_params("model_average", updates, params)
        num_updates = core.next_step(state.num_updates)
        acc = state.num_accumulates + 1
        # In float32 as in fluid: another rounding would end a window a step earlier or later.
        product = jnp.floor(num_updates.astype(jnp.float32) * jnp.asarray(rate, jnp.float32))
        window = jnp.minimum(longest, product)
        close = (acc >= shortest) & (acc.astype(jnp.float32) >= window)
        full = num_updates % _SUM_LENGTH == 0
        add = functools.partial(_add_to_sums, full, close)
        one, two, three = add(p, (state.sum_1, state.sum_2, state.sum_3))
        statistics = state.statistics
        if statistics is not None:
            statistics = tuple(add(_select_statistics(extra), statistics))
        old = jnp.where(close, acc, state.old_num_accumulates)
        acc = jnp.where(close, 0, acc)
        return updates, ModelAverageState(num_updates, acc, old, one, two, three, statistics)

    return optax.GradientTransformationExtraArgs(init, update)


def _add_to_sums(full: jax.Array, close: jax.Array, new: PyTree, sums: Sequence[PyTree]) -> Any:
    """Return three sums with `new` added to the first, which then moves into the second if `full`,
    or both into the third if `close`, the end of a window."""

    def apply_to_sums(rule: Any) -> Any:
        return lambda *sums: leafwise.apply(rule, *sums[:3], full=sums[3], close=sums[4])

    rules = list(map(apply_to_sums, (_move_to_third, _move_to_second, _clear_first)))
    one = leafwise.apply(lambda p, s1: (p, s1 + _widen_param(p)), new, sums[0])[1]
    return run_in_passes(rules, (one, *sums[1:]), full, close, due=full | close)


def is_average(x: object) -> bool:
    """Tell whether `x` is the state of an average of the parameters."""
    return isinstance(x, ExponentialMovingAverageState | ModelAverageState)


def read_average(state: OptState, params: Params) -> Params:
    """Return the average in `state` as a tree like `params`, in its dtypes, or copies of the params
    before the first update and where a leaf has no average.

    The result shares no buffer with its arguments. Wrappers around leaves are kept. It raises a
    ValueError if the average was made for different params.
    """
    if any(map(is_packed, jax.tree.leaves(params, is_leaf=is_packed))):
        # The buffers of an average lack the leaves that are frozen.
        state = jax.tree.map(memories.to_device, state)
        return repack(params, read_average(unpack(state), unpack(params)))
    if isinstance(state, ExponentialMovingAverageState):
        # A state of several workers has each scalar in a wrapper.
        step, weight = (jax.tree.leaves(x)[0] for x in (state.step, state.weight))
        sums, count = [state.average], weight
    else:
        sums = [state.sum_1, state.sum_2, state.sum_3]
        step, acc, old = (jax.tree.leaves(x)[0] for x in state[:3])
        count = (acc + old).astype(jnp.float32)

    def read(place: tree.Place, p: Leaf, *terms: Leaf) -> Leaf:
        if tree.is_masked(p):
            return p
        if tree.is_masked(terms[0]):
            return jnp.array(p, copy=True)
        if jnp.shape(p) != terms[0].shape:
            raise ValueError(
                f"averaged_params: leaf {place!r} has shape {jnp.shape(p)}, but its average has "
                f"{terms[0].shape}: the average was made for other params"
            )
        total = functools.reduce(operator.add, map(memories.to_device, terms))
        average = total / numerics.scalar(jnp.where(step > 0, count, 1), total)
        return jnp.where(step > 0, average.astype(p.dtype), p)

    if len(tree.leaves(sums[0])) != len(tree.leaves(params)):
        raise ValueError("averaged_params: the average was made for other params")
    return tree.map_named(read, params, *sums)


_COUNTERS = {"exponential_moving_average": "step", "model_average": "num_updates"}


def find_averages(names: Collection[str]) -> list[str]:
    """Return the sorted names of the states of averages, those whose counter is among the names of
    a checkpoint's arrays. The second of a kind has a number, "exponential_moving_average_2"."""
    ends = "|".join(f"{label}(_\\d+)?/{counter}" for label, counter in _COUNTERS.items())
    counters = re.compile(rf"(.*/)?({ends})")
    return sorted(name.rpartition("/")[0] for name in names if counters.fullmatch(name))


def make_average_template(
    kind: str, arrays: Collection[str], params: Params, model_state: PyTree
) -> OptState:
    """Return the state of an average at step 0, with zeros for the arrays that a checkpoint has of
    it, and the rest masked.

    Args:
      kind: the word of its type, "exponential_moving_average" or "model_average".
      arrays: the names of its arrays, without the name in front.
      params: the params, masked where no average is wanted.
      model_state: the model state; None if it is not wanted.
    """

    def zeros(field: str, of: PyTree) -> PyTree:
        def zero(place: tree.Place, x: Leaf) -> Leaf:
            if tree.is_masked(x) or f"{field}/{place}".rstrip("/") not in arrays:
                return optax.MaskedNode()
            wide = jnp.zeros(jnp.shape(x), numerics.accumulator_dtype(x.dtype))
            on_mesh = isinstance(getattr(x, "sharding", None), NamedSharding)
            return jax.device_put(wide, x.sharding) if on_mesh else wide

        return tree.map_named(zero, of)

    def fields(first: str) -> PyTree:
        has_any = any(f"{x}/".startswith(f"{first}/") for x in arrays)
        return zeros(first, model_state) if has_any and model_state is not None else None

    count = core.first_step()
    if kind == "exponential_moving_average":
        weight = jnp.zeros((), numerics.scalar_dtype())
        average = zeros("average", params)
        return ExponentialMovingAverageState(count, weight, average, fields("statistics"))
    one, two, three = (zeros(f"sum_{i}", params) for i in (1, 2, 3))
    sums = fields("statistics/0"), fields("statistics/1"), fields("statistics/2")
    statistics = sums if sums[0] is not None else None
    return ModelAverageState(count, count, count, one, two, three, statistics)
