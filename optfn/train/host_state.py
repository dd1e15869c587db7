"""The update of a training step whose optimizer's state lies in the memory of the host."""

import math
from collections.abc import Callable

import jax
from jax.sharding import Mesh, SingleDeviceSharding

from optfn.core.types import OptState, Params, PyTree
from optfn.loss.jaxprs.row_loops import run_by_rows
from optfn.mesh.collectives.axes import restrict_spec, to_axes
from optfn.mesh.collectives.mesh import count_devices
from optfn.mesh.compilers import memories
from optfn.mesh.layout.mesh_layout import Layout
from optfn.mesh.state.placement import place_on_host
from optfn.train.state import TrainState

# The names of platforms in `jax.lax.platform_dependent`, where they differ from a device's.
_PLATFORMS = {"gpu": "cuda"}


def run_on_host(
    update: Callable[[TrainState, TrainState], TrainState],
    layout: Layout | None,
    before: TrainState,
    state: TrainState,
) -> TrainState:
    """Return update(before, state), which reads and writes large arrays of the optimizer's state in
    chunks."""

    def of_arrays(params: Params, opt_state: OptState) -> PyTree:
        old = before._replace(opt_state=opt_state)
        new = update(old, state._replace(params=params, opt_state=opt_state))
        return new.params, new.opt_state, new.step, new.model_state

    platform = jax.default_backend()
    if layout is not None:
        is_plan = not isinstance(layout.mesh, Mesh)  # without devices: as a TPU runs it
        platform = "tpu" if is_plan else layout.mesh.devices.flat[0].platform
    arrays = state.params, before.opt_state
    params, opt_state, step, model_state = run_by_rows(
        of_arrays, arrays, _make_divide(layout, state.params), _PLATFORMS.get(platform, platform)
    )
    return TrainState(step, params, opt_state, model_state)


def init_on_host(init: Callable[[Params], OptState], params: Params) -> OptState:
    """Return init(params), whose large arrays a program writes to the host, so that the device need
    not have room for all of them at once.

    From JAX 0.10 to 0.12 the type of an array with a SingleDeviceSharding as `out_shardings`
    forgets the memory, so the program moves it.
    """

    def run(params: Params) -> OptState:
        return jax.tree.map(
            lambda x: memories.to_host(x) if memories.is_large(x) else x, init(params)
        )

    # Params on several devices: `place_state` moves one leaf at a time.
    is_on_one = len({device for x in jax.tree.leaves(params) for device in x.devices()}) == 1
    return jax.jit(run)(params) if is_on_one else init(params)


def place_state(state: TrainState) -> TrainState:
    """Move the large arrays of the optimizer's state to the host, and commit all arrays to the
    devices where they lie."""
    placements = jax.tree.map(lambda x: x.sharding, state)
    of_state = place_on_host(placements.opt_state, state.opt_state)
    return jax.device_put(state, placements._replace(opt_state=of_state))


def describe_state(state: TrainState) -> TrainState:
    """Return the shapes of a state with the placement that `place_state` gives its arrays."""
    one = SingleDeviceSharding(jax.devices()[0])
    placements = jax.tree.map(lambda x: x.sharding or one, state.opt_state)
    described = jax.tree.map(
        lambda x, placement: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=placement),
        state.opt_state, place_on_host(placements, state.opt_state),
    )  # fmt: skip
    return state._replace(opt_state=described)


def _make_divide(
    layout: Layout | None, params: Params
) -> Callable[[tuple[int, ...]], tuple[int, int]]:
    """Return the function from the shape of an array to how many devices of a worker divide its
    first axis, and its remaining axes, as they divide a gradient of this shape."""
    specs = {}
    if layout is not None:
        for entry in jax.tree.leaves(layout.describe(params)):
            specs[entry.shape] = restrict_spec(entry.gradient_spec, layout.inner_axes)

    def divide(shape: tuple[int, ...]) -> tuple[int, int]:
        if layout is None or not specs.get(shape):
            return 1, 1
        first, *others = (count_devices(layout.mesh, to_axes(x)) for x in specs[shape])
        return first, math.prod(others)

    return divide
