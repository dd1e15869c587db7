"""A record of norms, clip factor and learning rate of each step, in the state."""

import functools
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from optfn import core
from optfn.core import checks, errors, leafwise, numerics, tree
from optfn.core.traits import Report, traits
from optfn.core.types import OptState, Params, PyTree, Stepped, Updates
from optfn.leaves.patterns import check_pattern, match_names
from optfn.leaves.selection import Selection
from optfn.mesh.collectives.axes import AxisName, check_axis_names
from optfn.mesh.compilers import xla
from optfn.mesh.compilers.groups import map_groups, varying_axes
from optfn.mesh.state import names as state_names
from optfn.mesh.state.per_worker import find_nodes, join_agreeing_workers
from optfn.mesh.state.reports import collect_reports, iterate_nodes, raise_lasting_flags
from optfn.transforms import rates
from optfn.transforms.clipping import ClipState


@traits(
    passes_own_gradients=True,
    passes_rows=True,
    reports={
        "grad_norm": Report("grad_norm"),
        "update_norm": Report("update_norm"),
        "param_norm": Report("param_norm"),
        "clip_factor": Report("clip_factor"),
        "learning_rate": None,  # a step has it anyway
        "groups": Report(""),
        "ratios": Report("update_ratio"),
    },
    link="reader",
)
class RecordMetricsState(NamedTuple):
    """State of `record_metrics`: five float32 scalars, and the inner state.

    groups: with `per`, three norms by name, each with a scalar for each pattern.
    """

    grad_norm: jax.Array
    update_norm: jax.Array
    param_norm: jax.Array
    clip_factor: jax.Array
    learning_rate: jax.Array
    inner_state: OptState
    groups: dict[str, dict[str, jax.Array]] | tuple[()] = ()

    @property
    def ratios(self) -> PyTree:
        """The ratio update_norm/param_norm of each pattern of `per`, {} without patterns."""
        norms = dict(self.groups).get
        return jax.tree.map(jnp.divide, norms("update_norm", {}), norms("param_norm", {}))


_NUMBERS = RecordMetricsState._fields[:5]
MEASURED = _NUMBERS[:3]


@core.record_call
def record_metrics(
    tx: optax.GradientTransformation,
    *,
    per: str | Sequence[str] | None = None,
    axis_name: AxisName = None,
) -> optax.GradientTransformationExtraArgs:
    """Wrap an optimizer so that its state records the norms of gradient, update and parameters, the
    clip factor and the learning rate, with unchanged updates.

    You find them in the metrics of a training step, in the history and in the log; in a loop that
    you write, `metrics(opt_state)` reads them. The structure is fixed, so it works in `lax.scan`.

    Args:
      tx: an optimizer of optfn or optax.
      per: patterns of paths, such as ("embed/.*", "layers/.*"). For each of these regular
        expressions the norms are also recorded over the leaves whose whole path it matches. Frozen
        leaves count in param_norm, but not inside a wrapper, which leaves them out; a training step
        has no gradient of them.
      axis_name: if workers have different gradients, the mesh axes of the workers, to average the
        squares of the norms; they must be bound by shard_map, pmap or vmap. `make_train_step` adds
        the axes of its workers, and an exchange in `tx` adds its `axis_name`.

    State: grad_norm, the norm of the gradient that is passed in; update_norm; param_norm, before
    the update; clip_factor, the smallest factor of the clips by norm in `tx`, or 1 without one;
    learning_rate, or NaN if `tx` has none or several; 20 bytes, 12 more for each pattern, and the
    state of `tx`. Needs params.

    Raises:
      ValueError: at init and update, a pattern matches no path.
    """
    patterns = _check_patterns(per)
    check_axis_names("record_metrics: axis_name", axis_name, optional=True)
    inner = core.check_transform("record_metrics: tx", tx)

    def init(params: Params) -> RecordMetricsState:
        inner_state = inner.init(params)
        # The structure that update returns, because a scan carries the state.
        norms = [jnp.zeros((), jnp.float32) for _ in MEASURED]
        for pattern in patterns:
            match_names(pattern, params, "per")
        groups = {name: {p: jnp.zeros((), jnp.float32) for p in patterns} for name in MEASURED}
        return _record(norms, inner_state, groups if patterns else ())

    def update(updates: Updates, state: OptState, params: Params = None, **extra: Any) -> Stepped:
        core.check_params_given("record_metrics", params)
        errors.check_state("record_metrics", state, RecordMetricsState)
        updated, inner_state = inner.update(updates, state.inner_state, params, **extra)
        among = join_agreeing_workers("record_metrics", axis_name, state, extra)
        # Integer leaves have no gradient, and would count in param_norm alone.
        trees = [leafwise.keep_inexact(x) for x in (updates, updated, params)]

        def norms(trees: Sequence[Updates]) -> list[jax.Array]:
            return list(map(among.root_mean_square, _norms(trees)))

        groups: dict[str, dict[str, jax.Array]] = {name: {} for name in MEASURED}
        for pattern in patterns:
            chosen = Selection(match_names(pattern, params, "per"))
            for name, norm in zip(MEASURED, norms([chosen.keep(x) for x in trees]), strict=True):
                groups[name][pattern] = norm
        return updated, _record(norms(trees), inner_state, groups if patterns else ())

    return optax.GradientTransformationExtraArgs(init, update)


def _check_patterns(per: str | Sequence[str] | None) -> list[str]:
    """Return the patterns as a list without repeats, [] for None, or raise a TypeError unless `per`
    is a string, a sequence of strings or None."""
    patterns = [per] if isinstance(per, str) else [] if per is None else per
    if not isinstance(patterns, Sequence) or not all(isinstance(p, str) for p in patterns):
        raise TypeError(
            "record_metrics: per must be a regular expression of paths, or a sequence of them; "
            f"got {checks.show(per)}"
        )
    for pattern in patterns:
        check_pattern("record_metrics: per", pattern)
    return list(dict.fromkeys(patterns))


def _record(norms: Sequence[jax.Array], inner_state: OptState, groups: Any) -> RecordMetricsState:
    """Return the state with these norms, and the clip factor and rate that the inner state
    shows."""
    grad_norm, update_norm, param_norm = norms
    factor, rate = _read_inner(inner_state)
    return RecordMetricsState(grad_norm, update_norm, param_norm, factor, rate, inner_state, groups)


def _norms(trees: Sequence[Updates]) -> list[jax.Array]:
    """Return for each tree the float32 norm over all its unmasked leaves, with the repeated rows of
    a leaf merged first, since they would count separately."""
    squares: list[list[jax.Array]] = [[] for _ in trees]
    for row in zip(*(tree.leaves(leafwise.merge_rows(x)) for x in trees), strict=True):
        present = [i for i, x in enumerate(row) if not tree.is_masked(x)]
        arrays = [jnp.asarray(leafwise.numbers_of(row[i])) for i in present]
        sums = leafwise.jit_if_traced(_sum_squares, checks.has_tracer(arrays))
        # One reduction for the arrays that share their shape and varying mesh axes.
        found = map_groups(sums, arrays, lambda x: (x.shape, varying_axes(x)))
        for i, square in zip(present, found, strict=True):
            squares[i].append(square)
    return [leafwise.root_of_sum(found).astype(jnp.float32) for found in squares]


def _sum_squares(arrays: Sequence[jax.Array]) -> tuple[jax.Array, ...]:
    """Return the sum of squares of each of some arrays of one shape, in float32 or wider."""
    wide = (leafwise.cast(x, numerics.accumulator_dtype(x.dtype)) for x in arrays)
    return xla.sum_each(*map(numerics.abs_squared, wide))


def _read_inner(inner_state: OptState) -> tuple[jax.Array, jax.Array]:
    """Return the smallest clip factor in a state, 1 if it has no clip, and its learning rate, NaN
    if it has none or several."""
    factors = [node.factor for node in find_nodes(ClipState, inner_state)]
    factor = functools.reduce(jnp.minimum, factors, jnp.ones((), jnp.float32))
    try:
        rate = rates.get_learning_rate(inner_state)
    except ValueError:  # none, or several
        rate = jnp.asarray(jnp.nan, jnp.float32)
    # A copy: one buffer twice in a state cannot be donated.
    return factor, jnp.array(rate, jnp.float32, copy=True)


def metrics(opt_state: OptState, path: str | None = None) -> dict[str, jax.Array]:
    """Return by name the float32 scalars that the one `record_metrics` in a state has recorded, and
    raise a ValueError if the state has none or several.

    The names are "grad_norm", "update_norm", "param_norm", "clip_factor" and "learning_rate". With
    `per` there are also "grad_norm/<pattern>", "update_norm/<pattern>", "param_norm/<pattern>" and
    "update_ratio/<pattern>", which is update_norm/param_norm.

    Args:
      opt_state: the state of an optimizer with a `record_metrics` in it.
      path: if there are several, words of the name of one's state, such as the label of a
        partition. With local steps, None is the inner optimizer and "outer" the outer one; the
        norms of the inner one are root mean squares over the workers.

    Raises:
      ValueError: the state has no `record_metrics`, or several, even if one is inside another; or
        `master_weights` found that something besides the update changed a parameter.
    """
    raise_lasting_flags(opt_state)
    state = state_names.find_main_state(opt_state) if path is None else opt_state
    found: list[RecordMetricsState] = []
    for name, node in state_names.states_with_names(_is_recorder, state):
        if path is None or f"/{path}/" in f"/{name}/":
            found += iterate_nodes(_is_recorder, node)
    if len(found) != 1:
        where = "" if path is None else f" at path {path!r}"
        raise ValueError(f"the state must have one record_metrics{where}; it has {len(found)}")
    (recorder,) = found
    fields = {name: _combine_workers(name, getattr(recorder, name)) for name in _NUMBERS}
    groups = jax.tree.map(partial(_combine_workers, "norm"), recorder.groups)
    return fields | collect_reports(RecordMetricsState(**fields, inner_state=(), groups=groups))


def _is_recorder(x: object) -> bool:
    """Tell whether `x` is the state of a `record_metrics`."""
    return isinstance(x, RecordMetricsState)


def _combine_workers(name: str, node: object) -> jax.Array:
    """Return a recorded scalar unchanged, or of one for each worker the root mean square if it is a
    norm, else the smallest value.

    The factors of clips are at most 1, so the least is the strongest clip.
    """
    value: jax.Array = jax.tree.leaves(node)[0]
    if not value.ndim:
        return value
    return jnp.sqrt(jnp.mean(jnp.square(value))) if name.endswith("norm") else jnp.min(value)
