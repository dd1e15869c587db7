"""An optimizer that communicates by itself, on the gradients that a pipeline leaves each worker."""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from optfn import numerics
from optfn.leaves import packed as packing
from optfn.leaves import tree
from optfn.parallel import mesh as meshes
from optfn.parallel.placement import map_state, num_workers
from optfn.pipeline.stacking import PipelineParams
from optfn.wrappers.nonfinite import all_finite


def on_each_device(
    tx: optax.GradientTransformation,
    mesh: Mesh,
    *,
    spec: P,
    data_axis: str = "data",
) -> optax.GradientTransformationExtraArgs:
    """Run an optimizer on each device, on what it holds of params and on its worker's gradients.

        f = pipeline_value_and_grad(stage_fn, loss_fn, mesh=mesh, num_microbatches=m,
                                    data_axis="data", grad_reduce=None)
        tx = on_each_device(dgc_momentum(...), mesh, spec=PartitionSpec("stage"))
        step = make_train_step(loss_fn, tx, value_and_grad=f)

    Each device of a stage exchanges with the same stage of the other workers only. A leaf is to
    `tx` what the device holds of it, so that sizes, selections and norms are those of a stage: as
    for the whole model on each worker, with the stages' params as leaves of their own.

    Args:
      tx: such as `dgc_momentum`, element by element or leaf by leaf: a norm over all params would
        be that of one stage.
      mesh: as the pipeline's.
      spec: how every leaf of params lies: PartitionSpec("stage") for stacked stages,
        PartitionSpec(None, "stage") for folded virtual ones, PartitionSpec() for unlike ones, which
        lie on every device. What `PipelineParams` says is shared lies on every device in any case,
        and so does what is kept for it.
      data_axis: the axis of the workers, `axis_name` of `tx`.

    State: that of `tx`; arrays that are a worker's own lie along their first axis over the data
    axis and those of `spec`, arrays like params as these do, scalars everywhere. Integer leaves are
    held: no gradient, no update, no state.

    Where a gradient is not finite in one stage, all stages of all workers see it.

    Raises:
      ValueError: the mesh has not the axes, or gradients come without the workers in front.
    """
    extra_tx = optax.with_extra_args_support(tx)
    stage_axes = tuple(axis for entry in spec for axis in meshes.axes(entry))
    workers = num_workers(mesh, data_axis)
    num_workers(mesh, stage_axes)

    def first(params: Any) -> Any:
        state = extra_tx.init(params)
        return map_state(lambda x: x, lambda x: x, state, lambda x: jnp.full_like(x, workers))

    def specs(state: Any) -> Any:
        def of(spec: P, axes: tuple[str, ...]) -> Any:
            own = P((data_axis, *axes))
            return map_state(lambda x: own, lambda x: spec if jnp.ndim(x) else P(), state)

        return _shared_by(of(P(), ()), of(spec, stage_axes))

    def of_params(params: Any, *lead: str) -> Any:
        shared, stages = P(*lead), P(*lead, *spec)
        trees = (jax.tree.map(lambda _, at=at: at, params) for at in (shared, stages))
        return _shared_by(*trees)

    def init(params: Any) -> Any:
        def part(x: Any, spec: P) -> jax.ShapeDtypeStruct:
            held = NamedSharding(mesh, spec).shard_shape(jnp.shape(x))
            return jax.ShapeDtypeStruct(held, jnp.result_type(x))

        # What is compressed depends on the size of a device's part.
        lie = of_params(params)
        out = specs(jax.eval_shape(first, jax.tree.map(part, params, lie)))
        run = jax.shard_map(first, mesh=mesh, in_specs=(lie,), out_specs=out, check_vma=False)
        return jax.jit(run)(params)

    def update(updates: Any, state: Any, params: Any = None, **extra: Any) -> tuple[Any, Any]:
        extra.pop("row_updates", None)  # updates leave the devices laid out like params, as arrays
        _check_workers(updates, workers, data_axis)
        gradients, structure = tree.flatten(updates)
        flags = [_has_gradient(g) for g in gradients]
        like = [None] * len(flags) if params is None else tree.flatten(params)[0]
        rest = structure.unflatten(map(_held_update, gradients, like))
        given, kept = packing.keep(updates, flags), specs(state)
        held = None if params is None else packing.keep(params, flags)

        def local(given: Any, state: Any, params: Any, extra: Any) -> tuple[Any, Any]:
            own = _agreeing(jax.tree.map(lambda g: g[0], given), stage_axes)
            return extra_tx.update(own, state, params, **extra)

        run = jax.shard_map(
            local,
            mesh=mesh,
            in_specs=(of_params(given, data_axis), kept, of_params(held), P()),
            out_specs=(of_params(given), kept),
            check_vma=False,
        )
        new, state = run(given, state, held, extra)
        return packing.fill(new, flags, rest), state

    return optax.GradientTransformationExtraArgs(init, update)


def _shared_by(shared: Any, stages: Any) -> Any:
    """Return `stages`, but `shared` in the place of what PipelineParams share, also in a state."""

    def is_tied(x: Any) -> bool:
        return isinstance(x, PipelineParams)

    def choose(own: Any, other: Any) -> Any:
        return own._replace(shared=other.shared) if is_tied(own) else own

    return jax.tree.map(choose, stages, shared, is_leaf=is_tied)


def _has_gradient(g: Any) -> bool:
    # No device takes a float0.
    return not tree.is_hole(g) and g.dtype != jax.dtypes.float0


def _held_update(g: Any, p: Any) -> Any:
    """Return the update of a leaf without a gradient: an integer zero, or the hole that came."""
    if tree.is_hole(g) or _has_gradient(g):
        return g
    return g[0] if tree.is_hole(p) else numerics.integer_zeros(p.shape, p.dtype)


def _agreeing(updates: Any, stage_axes: tuple[str, ...]) -> Any:
    """Return the gradients, or NaN in all stages where those of one are not finite."""
    if not stage_axes:
        return updates
    bad = lax.pmax((~all_finite(updates)).astype(jnp.int32), stage_axes) > 0
    return jax.tree.map(lambda g: jnp.where(bad, jnp.nan, g), updates)


def _check_workers(updates: Any, workers: int, data_axis: str) -> None:
    for name, g in zip(tree.paths(updates), tree.flatten(updates)[0], strict=True):
        if not tree.is_hole(g) and jnp.shape(g)[:1] != (workers,):
            raise ValueError(
                f"on_each_device: the gradient of {name!r} of shape {jnp.shape(g)} must have the "
                f"{workers} workers of {data_axis!r} in front; grad_reduce=None leaves them"
            )
