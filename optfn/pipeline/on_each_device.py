"""A wrapper for optimizers that exchange gradients themselves, beside a pipeline."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from optfn import core
from optfn import mesh as meshes
from optfn.leaves import leafwise, numerics, tree
from optfn.leaves.traits import traits
from optfn.leaves.types import Leaf, OptState, Params, PyTree, Updates
from optfn.parallel.means import for_optimizer
from optfn.pipeline.stacking import PipelineParams
from optfn.state.per_worker import Exchanged, check_wrappers, nodes_of
from optfn.state.placement import map_state, num_workers
from optfn.workers import Workers


@traits(workers_in_front=True)
class OnEachDeviceState(NamedTuple):
    """State of `on_each_device`: the optimizer's state, of all devices; indexing passes through."""

    inner_state: OptState

    def __getitem__(self, key: Any) -> Any:
        return self.inner_state[key]


@core.named
def on_each_device(
    tx: optax.GradientTransformation,
    mesh: Mesh,
    *,
    spec: P,
    data_axis: str = "data",
) -> optax.GradientTransformationExtraArgs:
    """Run an optimizer on each device of a pipeline, on the device's part of params and gradients.

        f = pipeline_value_and_grad(stage_fn, loss_fn, mesh=mesh, num_microbatches=m,
                                    data_axis="data", grad_reduce=None)
        tx = on_each_device(dgc_momentum(...), mesh, spec=PartitionSpec("stage"))
        step = make_train_step(loss_fn, tx, value_and_grad=f)

    You need it only for steps of your own, with optimizers such as `dgc_momentum` that exchange
    gradients themselves. With a pipeline that has no `data_axis`, `make_train_step(None, tx,
    value_and_grad=f, mesh=mesh, shard={".*": PartitionSpec("stage")})` does the same without it.

    Each device exchanges only with the devices of the same stage of other workers. `tx` sees the
    device's part of each leaf, so sizes, selections and norms are those of a stage. The result is
    that of the whole model on each worker, if the params of each stage were leaves of their own.

    Args:
      tx: an optimizer that works element by element or leaf by leaf, such as `dgc_momentum`. A norm
        over all params would be that of one stage.
      mesh: the mesh of the pipeline.
      spec: the PartitionSpec of every leaf of params: PartitionSpec("stage") for stacked stages,
        PartitionSpec(None, "stage") for folded virtual stages, PartitionSpec() for heterogeneous
        stages, whose params are on every device. The shared params of `PipelineParams` and their
        optimizer state are on every device in any case.
      data_axis: the axis of the workers, which is also the `axis_name` of `tx`.

    State: that of `tx`. Per-worker parts are flat arrays over the data axis and the axes of `spec`;
    arrays like params have their PartitionSpec, and scalars are on every device. Integer leaves are
    frozen: they have no gradient, no update and no state. Leaves that no transform in `tx`
    exchanges (in a partition, behind a mask) are first averaged over the workers.

    If a gradient is not finite in one stage, it is made NaN in all stages, so that all of them skip
    it together.

    Raises:
      ValueError: the mesh does not have the axes, gradients do not have the workers in front, or
        `tx` has a wrapper that must not enclose a transform that exchanges gradients itself.
    """
    inner = optax.with_extra_args_support(core.check_transform("on_each_device: tx", tx))
    stage_axes = tuple(axis for entry in spec for axis in meshes.axes(entry))
    workers = num_workers(mesh, data_axis)
    num_workers(mesh, stage_axes)
    on_devices = _OnEachDevice(inner, mesh, workers, _Placement(spec, data_axis, stage_axes))
    return optax.GradientTransformationExtraArgs(on_devices.init, on_devices.update)


class _OnEachDevice(NamedTuple):
    """The functions of `on_each_device`.

    inner: the optimizer that runs on each device.
    mesh: the devices.
    workers: the number of workers.
    placement: the PartitionSpecs of params and state.
    """

    inner: optax.GradientTransformationExtraArgs
    mesh: Mesh
    workers: int
    placement: "_Placement"

    def init(self, params: Params) -> OnEachDeviceState:
        """Return the states of all devices."""

        def part(x: Leaf, spec: P) -> jax.ShapeDtypeStruct:
            shape = NamedSharding(self.mesh, spec).shard_shape(jnp.shape(x))
            return jax.ShapeDtypeStruct(shape, jnp.result_type(x))

        # The choice of leaves to compress depends on the size of a device's part.
        specs = self.placement.of_params(params)
        shapes = jax.eval_shape(self._init_on_device, jax.tree.map(part, params, specs))
        check_wrappers("on_each_device", shapes)
        _check_axes_of_exchange(shapes, self.placement.data_axis)
        run = self._mapped(self._init_on_device, (specs,), self.placement.of_state(shapes))
        return OnEachDeviceState(jax.jit(run)(params))

    def update(
        self, updates: Updates, state: OptState, params: Params | None = None, **extra: Any
    ) -> tuple[Updates, OptState]:
        """Return the updates, with the sharding of params, and the states of all devices."""
        # Of the extra arguments of a training step, only numbers are the same on all devices.
        extra = {k: v for k, v in extra.items() if k not in ("row_updates", "grad", "value_fn")}
        _check_workers(updates, self.workers, self.placement.data_axis)
        given = tree.map(_with_gradient, updates, updates)
        kept = None if params is None else tree.map(_with_gradient, params, updates)
        of_params, of_state = self.placement.of_params, self.placement.of_state(state.inner_state)
        run = self._mapped(
            self._update_on_device,
            (of_params(given, self.placement.data_axis), of_state, of_params(kept), P()),
            (of_params(given), of_state),
        )
        new, inner_state = run(given, state.inner_state, kept, extra)
        whole = tree.map(_with_frozen, new, updates, updates if params is None else params)
        return whole, OnEachDeviceState(inner_state)

    def _init_on_device(self, params: Params) -> OptState:
        state = self.inner.init(params)
        return map_state(
            lambda x, own: x, lambda x: x, state, lambda x, own: jnp.full_like(x, self.workers)
        )

    def _update_on_device(
        self, given: Updates, state: OptState, params: Params | None, extra: dict[str, Any]
    ) -> tuple[Updates, OptState]:
        local = _nan_in_all_stages(jax.tree.map(lambda g: g[0], given), self.placement.stage_axes)
        local, _, known = for_optimizer(
            local, state, Workers(meshes.axes(self.placement.data_axis))
        )
        return self.inner.update(local, state, params, **known, **extra)

    def _mapped(self, fn: Callable[..., Any], in_specs: PyTree, out_specs: PyTree) -> Any:
        return jax.shard_map(
            fn, mesh=self.mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False
        )


class _Placement(NamedTuple):
    """The PartitionSpecs of params and state.

    spec: that of every leaf of the stages' params.
    data_axis: the axis of the workers.
    stage_axes: the axes in `spec`.
    """

    spec: P
    data_axis: str
    stage_axes: tuple[str, ...]

    def of_state(self, state: OptState) -> PyTree:
        """Return the PartitionSpecs of the inner optimizer's state."""

        def of(spec: P, axes: tuple[str, ...]) -> PyTree:
            per_worker = P((self.data_axis, *axes))
            return map_state(
                lambda x, own: per_worker, lambda x: spec if jnp.ndim(x) else P(), state
            )

        return _with_shared(of(P(), ()), of(self.spec, self.stage_axes))

    def of_params(self, params: Params, *leading_axes: str) -> PyTree:
        """Return the PartitionSpecs of params, or of gradients with further leading axes."""
        shared, stages = P(*leading_axes), P(*leading_axes, *self.spec)
        trees = (jax.tree.map(lambda _, at=at: at, params) for at in (shared, stages))
        return _with_shared(*trees)


def _with_shared(shared: PyTree, stages: PyTree) -> PyTree:
    """Return `stages`, with the shared part of each PipelineParams in it from `shared`."""

    def is_tied(x: Any) -> bool:
        return isinstance(x, PipelineParams)

    def choose(stage_part: Any, shared_part: Any) -> Any:
        return stage_part._replace(shared=shared_part.shared) if is_tied(stage_part) else stage_part

    return jax.tree.map(choose, stages, shared, is_leaf=is_tied)


def _has_gradient(g: Leaf) -> bool:
    # shard_map takes no float0.
    return not tree.is_masked(g) and g.dtype != jax.dtypes.float0


def _with_gradient(x: Leaf, g: Leaf) -> Leaf:
    return x if _has_gradient(g) else optax.MaskedNode()


def _with_frozen(u: Leaf, g: Leaf, p: Leaf) -> Leaf:
    """Return an update; for a leaf without a gradient an integer zero, masked if `g` is."""
    if tree.is_masked(g):
        return g
    if _has_gradient(g):
        return u
    return g[0] if p is g or tree.is_masked(p) else numerics.integer_zeros(p.shape, p.dtype)


def _nan_in_all_stages(updates: Updates, stage_axes: tuple[str, ...]) -> Updates:
    """Return the gradients, or NaN in all stages if those of one stage are not finite."""
    if not stage_axes:
        return updates
    bad = lax.pmax((~leafwise.all_finite(updates)).astype(jnp.int32), stage_axes) > 0
    return jax.tree.map(lambda g: jnp.where(bad, jnp.nan, g), updates)


def _check_axes_of_exchange(state: OptState, data_axis: str) -> None:
    """Raise a ValueError if a transform exchanges over another axis than that of the workers."""
    for node in nodes_of(Exchanged, state):
        if node.axes != meshes.axes(data_axis):
            raise ValueError(
                f"on_each_device: tx must exchange over the axis of the workers, {data_axis!r}; it "
                f"exchanges over {tuple(node.axes)}, along which devices have other stages"
            )


def _check_workers(updates: Updates, workers: int, data_axis: str) -> None:
    for name, g in tree.items(updates):
        if not tree.is_masked(g) and jnp.shape(g)[:1] != (workers,):
            raise ValueError(
                f"on_each_device: the gradient of {name!r} must have the {workers} workers of "
                f"{data_axis!r} as its leading axis; got shape {jnp.shape(g)}. Make the pipeline "
                "with grad_reduce=None"
            )
