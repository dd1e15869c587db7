"""Guards and gauges of an optimizer: skip what is not finite, record norms."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from optfn import checks, core
from optfn.leaves import leafwise, tree
from optfn.leaves.rows import Rows
from optfn.transforms import learning_rate as rates
from optfn.transforms.clipping import ClipState, global_norm


class SkipNonfiniteState(NamedTuple):
    """State of `skip_nonfinite`: two counters, a flag, and the inner state."""

    consecutive: jax.Array
    skipped: jax.Array
    gave_up: jax.Array
    inner_state: Any


def skip_nonfinite(
    tx: optax.GradientTransformation,
    *,
    max_consecutive: int = 10,
    axis_name: Any = None,
) -> optax.GradientTransformationExtraArgs:
    """Leave parameters and state as they are where a gradient is not finite.

        bad = any gradient is NaN or infinite, on any worker
        consecutive = consecutive + 1 if bad else 0
        skip = bad and consecutive ≤ max_consecutive
        u, state = (−0.0, state) if skip else tx(g, state)

    A run of bad gradients longer than `max_consecutive` is let through, as in
    `optax.apply_if_finite`; `make_train_step` and `minimize` then raise a FloatingPointError.

    Args:
      tx: an optimizer of optfn or optax.
      max_consecutive: how many bad gradients in a row are skipped, ≥ 0.
      axis_name: the mesh axes over which workers must agree, where each has its own gradient;
        inside shard_map, pmap or vmap. `make_train_step` supplies it.

    State: consecutive and skipped (int32), gave_up (bool), and the state of `tx`.
    """
    most = checks.count("max_consecutive", max_consecutive, low=0)
    inner = optax.with_extra_args_support(tx)

    def init(params: Any) -> SkipNonfiniteState:
        zero = core.first_step
        return SkipNonfiniteState(zero(), zero(), jnp.zeros((), jnp.bool_), inner.init(params))

    def update(updates: Any, state: Any, params: Any = None, **extra: Any) -> tuple[Any, Any]:
        bad = ~all_finite(updates)
        over = _axis(axis_name, extra)
        if over is not None:
            core.check_axis("skip_nonfinite", over)
            bad = jax.lax.pmax(bad.astype(jnp.int32), over) > 0
        consecutive = jnp.where(bad, core.next_step(state.consecutive), 0)
        skip = bad & (consecutive <= most)
        new, inner_state = inner.update(updates, state.inner_state, params, **extra)

        def still(u: Any) -> Any:
            if isinstance(u, Rows):
                return u.map(still)
            return jnp.where(skip, -0.0, u) if jnp.issubdtype(u.dtype, jnp.inexact) else u

        def keep(after: Any, before: Any) -> Any:
            return jnp.where(skip, before, after)

        return tree.map_arrays(still, new), SkipNonfiniteState(
            consecutive,
            jnp.where(skip, core.next_step(state.skipped), state.skipped),
            bad & ~skip,
            jax.tree.map(keep, inner_state, state.inner_state),
        )

    return optax.GradientTransformationExtraArgs(init, update)


def _axis(axis_name: Any, extra: dict[str, Any]) -> Any:
    """Return the wrapper's own axis, else the one over which the training step goes."""
    return extra.get("axis_name") if axis_name is None else axis_name


def all_finite(updates: Any) -> jax.Array:
    """Tell whether all floating-point leaves are finite, a bool scalar."""
    finite = jnp.asarray(True)
    leaves = leafwise.per_leaf(lambda g: jnp.all(jnp.isfinite(g)), leafwise.inexact(updates))
    for ok in leaves.every():
        finite = finite & jnp.all(ok)
    return finite


class RecordMetricsState(NamedTuple):
    """State of `record_metrics`: five float32 scalars, and the inner state."""

    grad_norm: jax.Array
    update_norm: jax.Array
    param_norm: jax.Array
    clip_factor: jax.Array
    learning_rate: jax.Array
    inner_state: Any


def record_metrics(
    tx: optax.GradientTransformation, *, axis_name: Any = None
) -> optax.GradientTransformationExtraArgs:
    """Record norms of gradient, update and parameters, the clip's factor and the rate.

    Read them by `metrics(opt_state)`. The structure is fixed, so that it works inside `lax.scan`.

    Args:
      tx: an optimizer of optfn or optax.
      axis_name: mesh axes over which the squares of the norms are averaged, where each worker has
        its own gradient; inside shard_map, pmap or vmap. `make_train_step` supplies it.

    State: grad_norm, of the gradient as it came; update_norm; param_norm, before the update;
    clip_factor, the smallest of the clips by norm in `tx`, 1 without one; learning_rate, NaN where
    `tx` keeps none or several; 20 bytes, and the state of `tx`. Needs params.
    """
    inner = optax.with_extra_args_support(tx)

    def init(params: Any) -> RecordMetricsState:
        inner_state = inner.init(params)
        norms = (jnp.zeros((), jnp.float32) for _ in range(3))
        return RecordMetricsState(*norms, *_gauges(inner_state), inner_state)  # type: ignore[call-arg]

    def update(updates: Any, state: Any, params: Any = None, **extra: Any) -> tuple[Any, Any]:
        if params is None:
            raise ValueError(
                "record_metrics needs the parameters: call update(updates, state, params)"
            )
        new, inner_state = inner.update(updates, state.inner_state, params, **extra)
        norms = [_norm(x, _axis(axis_name, extra)) for x in (updates, new, params)]
        return new, RecordMetricsState(*norms, *_gauges(inner_state), inner_state)  # type: ignore[call-arg]

    return optax.GradientTransformationExtraArgs(init, update)


def _norm(x: Any, axis_name: Any) -> jax.Array:
    norm = global_norm(leafwise.inexact(x)).astype(jnp.float32)
    if axis_name is None:
        return norm
    core.check_axis("record_metrics", axis_name)
    return jnp.sqrt(jax.lax.pmean(jnp.square(norm), axis_name))


def _gauges(inner_state: Any) -> tuple[jax.Array, jax.Array]:
    """Return the smallest clip factor and the rate in a state."""

    def is_clip(x: Any) -> bool:
        return isinstance(x, ClipState)

    factor = jnp.ones((), jnp.float32)
    for node in jax.tree.leaves(inner_state, is_leaf=is_clip):
        if is_clip(node):
            factor = jnp.minimum(factor, node.factor)
    try:
        rate = rates.get_learning_rate(inner_state)
    except ValueError:  # none, or several
        rate = jnp.asarray(jnp.nan, jnp.float32)
    return factor, jnp.array(rate, copy=True)


def metrics(opt_state: Any) -> dict[str, jax.Array]:
    """Return what `record_metrics` has recorded, float32 scalars by name.

    Args:
      opt_state: the state of an optimizer with a `record_metrics` in it.

    Raises:
      ValueError: the state has no `record_metrics` in it, or several.
    """

    def recorded(x: Any) -> bool:
        return isinstance(x, RecordMetricsState)

    nodes = [x for x in jax.tree.leaves(opt_state, is_leaf=recorded) if recorded(x)]
    if len(nodes) != 1:
        raise ValueError(f"the state must hold one record_metrics; it holds {len(nodes)}")
    fields = zip(RecordMetricsState._fields[:-1], nodes[0], strict=False)
    return {name: jax.tree.leaves(value)[0] for name, value in fields}
