"""An optimizer that communicates by itself, on the gradients that a pipeline leaves each worker."""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from optfn import tree
from optfn.distributed import mesh as meshes
from optfn.distributed.placement import map_state, num_workers
from optfn.wrappers.guard import all_finite


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
        lie on every device.
      data_axis: the axis of the workers, `axis_name` of `tx`.

    State: that of `tx`; what Deep Gradient Compression keeps for each worker lies flat over the
    data axis and those of `spec`, arrays like params as these do, scalars everywhere.

    Where a gradient is not finite in one stage, all stages of all workers see it.

    Raises:
      ValueError: the mesh has not the axes, or gradients come without the workers in front.
    """
    extra_tx = optax.with_extra_args_support(tx)
    stage_axes = tuple(axis for entry in spec for axis in meshes.axes(entry))
    workers = num_workers(mesh, data_axis)
    num_workers(mesh, stage_axes)
    own = P((data_axis, *stage_axes))

    def first(params: Any) -> Any:
        state = extra_tx.init(params)
        return map_state(lambda x: x, lambda x: x, state, lambda x: jnp.full_like(x, workers))

    def specs(state: Any) -> Any:
        return map_state(lambda x: own, lambda x: spec if jnp.ndim(x) else P(), state)

    def init(params: Any) -> Any:
        held = NamedSharding(mesh, spec)

        def part(x: Any) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(held.shard_shape(jnp.shape(x)), jnp.result_type(x))

        # What is compressed depends on the size of a device's part.
        out = specs(jax.eval_shape(first, jax.tree.map(part, params)))
        run = jax.shard_map(first, mesh=mesh, in_specs=(spec,), out_specs=out, check_vma=False)
        return jax.jit(run)(params)

    def update(updates: Any, state: Any, params: Any = None, **extra: Any) -> tuple[Any, Any]:
        _check_workers(updates, workers, data_axis)
        kept = specs(state)

        def local(updates: Any, state: Any, params: Any, extra: Any) -> tuple[Any, Any]:
            updates = _agreeing(jax.tree.map(lambda g: g[0], updates), stage_axes)
            return extra_tx.update(updates, state, params, **extra)

        run = jax.shard_map(
            local,
            mesh=mesh,
            in_specs=(P(data_axis, *spec), kept, spec, P()),
            out_specs=(spec, kept),
            check_vma=False,
        )
        return run(updates, state, params, extra)

    return optax.GradientTransformationExtraArgs(init, update)


def _agreeing(updates: Any, stage_axes: tuple[str, ...]) -> Any:
    """Return the gradients, or NaN in all stages where those of one are not finite."""
    if not stage_axes:
        return updates
    bad = lax.pmax((~all_finite(updates)).astype(jnp.int32), stage_axes) > 0
    return jax.tree.map(lambda g: jnp.where(bad, jnp.nan, g), updates)


def _check_workers(updates: Any, workers: int, data_axis: str) -> None:
    for name, g in zip(tree.paths(updates), jax.tree.leaves(updates), strict=False):
        if jnp.shape(g)[:1] != (workers,):
            raise ValueError(
                f"on_each_device: the gradient of {name!r} of shape {jnp.shape(g)} must have the "
                f"{workers} workers of {data_axis!r} in front; grad_reduce=None leaves them"
            )
