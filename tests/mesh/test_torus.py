"""Gathers and scatters in phases: the same arrays as in one collective, on any torus.

CPUs have no torus, so `box` is replaced where phases run: eight of them are then a box of 2 × 4.
"""

import itertools
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import problems
import pytest
from arrays import normal, weights
from grids import nightly, suite
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import optfn
from benchmarks import wire
from benchmarks.schedule import list_mesh_places
from optfn.distributed import data_mesh, exchange, quantize, scan_layers, sharded
from optfn.mesh.collectives import torus
from optfn.mesh.collectives.axes import Axes
from optfn.mesh.collectives.gathers import all_gather
from optfn.mesh.collectives.mesh import shard_map
from optfn.mesh.compilers.options import follow_options
from optfn.plan.links import list_places


@pytest.fixture
def in_phases(monkeypatch):
    """Let the devices of a mesh be a box along each axis of four or eight."""
    sizes = {8: (2, 2, 2), 4: (2, 2)}
    box = lambda devices, axis: sizes.get(devices.shape[axis], ())  # noqa: E731
    torus._phases_along.cache_clear()
    monkeypatch.setattr(torus, "find_box", box)
    yield
    torus._phases_along.cache_clear()


def chips(x, y, z, cores=1):
    """Return the devices of a box of TPUs, those along x next to each other."""
    places = itertools.product(range(z), range(y), range(x), range(cores))
    found = [
        SimpleNamespace(platform="tpu", coords=(*reversed(place),), core_on_chip=core)
        for *place, core in places
    ]
    return np.array(found, object)


@pytest.mark.parametrize(
    ("devices", "expected"),
    [
        (chips(4, 2, 1), (2, 4)),
        (chips(8, 4, 2), (2, 4, 8)),
        (chips(2, 2, 1, cores=2), (2, 2, 2)),
        (chips(8, 1, 1), (8,)),
        (chips(4, 4, 1)[[0, 1, 4, 5, 2, 3, 6, 7]], (2, 4)),  # two hosts of 2 × 2
        (chips(4, 4, 1)[[0, 2, 8, 10]], (2, 2)),
        (chips(4, 4, 1)[:6], ()),
        (np.concatenate([chips(2, 2, 1), chips(2, 2, 1)]), ()),  # two slices
        (np.array([SimpleNamespace(platform="gpu")] * 8, object), ()),
    ],
)
def test_the_box_of_a_line_of_devices(devices, expected):
    assert torus.find_box(devices, 0) == expected


def test_the_boxes_of_several_axes():
    devices = chips(4, 4, 4).reshape(4, 16)
    assert [torus.find_box(devices, axis) for axis in (0, 1)] == [(4,), (4, 4)]
    devices[1, 0], devices[2, 0] = devices[2, 0], devices[1, 0]  # lines that are no boxes
    assert [torus.find_box(devices, axis) for axis in (0, 1)] == [(4,), ()]


def listed(*lengths, cores=1, kind="TPU v4"):
    """Return the chips of a torus as JAX lists them: by hosts of 2 × 2."""
    about = {"platform": "tpu", "device_kind": kind, "slice_index": 0}
    return [
        SimpleNamespace(**about, coords=(*place, 0, 0)[:3], core_on_chip=core)
        for place in list_places(lengths)
        for core in range(cores)
    ]


@pytest.mark.parametrize(
    ("lengths", "cores"),
    [((4, 4), 1), ((16, 16), 1), ((4, 8), 1), ((4, 4, 4), 1), ((2, 2, 1), 2), ((4, 4, 8), 2)],
)
def test_sorted_chips_follow_the_torus(lengths, cores):
    """Each group of a phase is a line of neighbours along one dimension, all of it."""
    chips = listed(*lengths, cores=cores)
    line = torus.sort_chips(np.random.default_rng(0).permutation(np.array(chips, object)))
    assert line == torus.sort_chips(chips)
    mesh = SimpleNamespace(devices=np.array(line, object), axis_names=("a",))
    found = []
    for _, groups in torus._phases_along.__wrapped__("a", mesh, 1):
        for group in groups or [range(len(line))]:
            places = np.array([(*line[i].coords, line[i].core_on_chip) for i in group])
            (dimension,) = np.flatnonzero(np.ptp(places, axis=0))
            np.testing.assert_array_equal(places[:, dimension], range(len(group)))
        found.append(len(group))
    assert found == [size for size in (*reversed(lengths), cores) if size > 1]


def test_the_largest_phase_of_two_dimensions_spans_the_outermost_ones():
    """The first phase of a scatter, and the last of a gather, has most of the bytes."""
    line = torus.sort_chips(listed(4, 4, 8))
    mesh = SimpleNamespace(devices=np.array(line, object), axis_names=("a",))
    found = []
    for _, groups in torus._phases_along.__wrapped__("a", mesh, 2):
        extents = {tuple(np.ptp([line[i].coords for i in group], axis=0) + 1) for group in groups}
        assert len(extents) == 1
        found.append((*map(int, *extents), len(groups[0])))
    assert found == [(1, 4, 8, 32), (4, 1, 1, 4)]


@pytest.mark.parametrize(
    ("kind", "lengths", "is_sorted"),
    [
        ("TPU v5 lite", (4, 4), False), ("TPU v6 lite", (8, 8), False),
        ("TPU v5 lite", (16, 16), True), ("TPU v6 lite", (8, 16), True),
        ("TPU v5", (6, 2, 2), False), ("TPU v5", (4, 2, 2), True), ("TPU v5", (4, 4, 4), True),
    ],
)  # fmt: skip
def test_chips_on_open_lines_stay_by_hosts(kind, lengths, is_sorted):
    chips = listed(*lengths, kind=kind)
    by_torus = sorted(chips, key=lambda chip: chip.coords[::-1])
    assert chips != by_torus
    line = torus.sort_chips(chips)
    assert line == (by_torus if is_sorted else chips)
    # So texts of programs, which have no places, are read.
    ring = {"TPU v5": 4}.get(kind, 16)
    places = [chip.coords[: len(lengths)] for chip in line]
    assert list_mesh_places(lengths, ring) == places


def test_slices_stay_apart_and_other_devices_keep_their_order():
    slices = [listed(4, 4), listed(4, 4)]
    for device in slices[0]:
        device.slice_index = 1
    line = torus.sort_chips([*slices[0], *slices[1]])
    assert line == torus.sort_chips(slices[1]) + torus.sort_chips(slices[0])
    cpus = jax.devices()[:4][::-1]
    assert torus.sort_chips(cpus) == cpus
    assert [*data_mesh(devices=cpus).devices] == cpus


def test_a_mesh_takes_the_first_devices_in_the_order_of_the_torus(monkeypatch):
    monkeypatch.setattr(torus, "sort_chips", lambda devices: devices[::-1])
    assert [*data_mesh(3).devices] == jax.devices()[2::-1]


@pytest.mark.parametrize("small", [0, nightly(1 << 24)])
@pytest.mark.parametrize(
    ("shape", "explicit", "gathers"),
    [((8,), False, 2), nightly((2, 4), False, 2), ((4, 2), True, 2), nightly((2, 2, 2), False, 3)],
)
def test_phases_give_what_one_collective_gives(
    in_phases, monkeypatch, shape, explicit, gathers, small
):
    """A scatter has three phases, of one dimension each; one of a large gather may have two."""
    monkeypatch.setattr(torus, "_SMALL_GATHER", small)
    names = ("a", "b", "c")[: len(shape)]
    kinds = (AxisType.Explicit if explicit else AxisType.Auto,) * len(shape)
    mesh = Mesh(np.array(jax.devices()[:8]).reshape(shape), names, axis_types=kinds)
    x = np.random.default_rng(0).normal(size=(8, 3, 16)).astype(np.float32)

    def run(x):
        scattered = torus.reduce_scatter_along(x[0], names, 1)
        gathered = all_gather(x[0], Axes(names))
        counts = [sum(len(torus.phases(a, most)) for a in names) for most in (1, 2)]
        back = torus.all_gather_along(scattered, names, 1)
        return scattered, gathered[None], back[None], jnp.array([counts])

    specs = P(None, names), P(names), P(names), P(names)
    placed = jax.device_put(x, NamedSharding(mesh, P(names)))
    scattered, gathered, back, counts = shard_map(run, mesh, names, P(names), specs)(placed)
    np.testing.assert_allclose(scattered, x.sum(0), rtol=1e-5, atol=1e-5)
    for rows, whole in zip(gathered, back, strict=True):
        np.testing.assert_array_equal(rows, x)
        np.testing.assert_array_equal(whole, scattered)
    assert set(map(tuple, np.asarray(counts))) == {(3, gathers)}


PLANES = {"xla_tpu_enable_sparse_core_collective_offload_nd_reduce_scatter": "true"}


@pytest.mark.parametrize(
    ("mesh_shape", "shape", "dimension", "counts"),
    [
        nightly((8,), (64, 6), 0, (3, 2)), ((2, 4), (64, 6), 0, (3, 2)),
        nightly((8,), (16, 9, 6), 0, (3, 2)), ((8,), (32, 6), 0, (3, 3)),
        ((8,), (64, 64), 1, (3, 3)), nightly((8,), (64,), 0, (3, 3)),
    ],
)  # fmt: skip
def test_scatters_over_planes_give_what_scatters_over_lines_give(
    in_phases, mesh_shape, shape, dimension, counts
):
    """They take a phase less, if slices have 8 rows. The sums of integers are exact."""
    names = ("a", "b")[: len(mesh_shape)]
    mesh = Mesh(np.array(jax.devices()[:8]).reshape(mesh_shape), names)
    x = np.random.default_rng(0).integers(-9, 9, (8, *shape)).astype(np.float32)

    def run(x):
        return torus.reduce_scatter_along(x[0], names, dimension)

    spec = P(*[None] * dimension, names)
    found = []
    for options in ({}, PLANES):
        with follow_options(options):
            scatter = shard_map(lambda x: run(x), mesh, names, P(names), spec)
            program = jax.jit(scatter).trace(jax.device_put(x, NamedSharding(mesh, P(names))))
        found.append(str(program.jaxpr).count("reduce_scatter["))
        np.testing.assert_array_equal(program.lower().compile()(x), x.sum(0))
    assert tuple(found) == counts


@pytest.mark.parametrize(
    ("shape", "dimension", "count"),
    [
        *(((128, 6), 0, 0), ((64, 6), 0, 0), ((32, 6), 0, 0)),
        *(((48, 6), 0, 1), ((144, 6), 0, 2), ((64,), 0, 2)),
    ],
)
def test_later_phases_stack_slices_of_over_eight_ragged_rows(in_phases, shape, dimension, count):
    mesh = Mesh(np.array(jax.devices()[:8]), ("a",))
    run = lambda x: torus.reduce_scatter_along(x[0], ("a",), dimension)  # noqa: E731
    scatter = shard_map(run, mesh, ("a",), P("a"), P("a"))
    found = str(jax.make_jaxpr(scatter)(jnp.zeros((8, *shape))))
    assert found.count("tiled=False") == count and found.count("tiled=True") == 3 - count


def test_where_no_step_is_traced_an_axis_is_one_phase(in_phases):
    assert torus.phases("a", 1) == [("a", None)]
    out = jax.pmap(lambda x: all_gather(x, Axes(("i",))), "i")(jnp.arange(8.0))
    np.testing.assert_array_equal(out, np.tile(np.arange(8.0), (8, 1)))


@pytest.mark.parametrize("shape", [nightly((2, 4)), nightly((4, 2)), (2, 2, 2)])
def test_the_outer_axes_are_sent_what_the_inner_ones_have_divided(shape):
    """In rings, of M bytes: M(n - 1)/n along the last axis, of n, and from it outwards of M/n."""
    names = ("a", "b", "c")[: len(shape)]
    mesh = Mesh(np.array(jax.devices()[:8]).reshape(shape), names)

    def run(x):
        scattered = torus.reduce_scatter_along(x[0], names, 1)
        return torus.all_gather_along(2 * scattered, names, 1)[None]

    x = jax.ShapeDtypeStruct((8, 4, 64), jnp.float32, sharding=NamedSharding(mesh, P(names)))
    program = jax.jit(shard_map(run, mesh, names, P(names), P(names))).lower(x).compile()
    expected, size = {}, 4 * 64 * 4
    for name, n in zip(reversed(names), reversed(shape), strict=True):
        expected[name,] = 2 * size * (n - 1) / n
        size /= n
    assert wire.bytes_by_axes(program, mesh) == expected


def loss(params, batch):
    x = params["table"][batch[0]]
    x = scan_layers(lambda w, x: x + jnp.tanh(x @ w["in"]) @ w["out"], params["layers"], x)
    return jnp.mean((jnp.mean(x, -1) * params["scale"].sum() - batch[1]) ** 2)


PARAMS = {
    "table": weights(0, 64, 32),
    "layers": optfn.Stacked({"in": weights(1, 3, 32, 64), "out": weights(2, 3, 64, 32)}),
    "scale": np.ones(5, np.float32),
}
PACKETS = exchange(quantize(8, chunk=32), min_size=64)
TWO = {"mesh": (2, 4), "shard": sharded("params", axis="fast")}
WAYS = {
    "state": {"shard": "state"},
    "params": {"shard": "params"},
    "packets": {"shard": sharded("params", gather=quantize(8), reduce=quantize(8))},
    "two levels": TWO,
    "params over two axes": {"mesh": (2, 4), "shard": "params"},
    "rounds": {"mesh": (2, 4), "shard": sharded("state", axis="fast"), "local_steps": 2},
    "exchange": {"tx": optfn.chain(PACKETS, optfn.sgd(0.1))},
    "rows": {"tables": "table"},
    "rows divided": {"tables": "table", "shard_tables": True},
}


def trained(mesh=(8,), tx=None, **options):
    names = ("data", "fast")[: len(mesh)]
    mesh = Mesh(np.array(jax.devices()[:8]).reshape(mesh), names)
    lazy = {"lazy": True} if "tables" in options else {}
    step = optfn.make_train_step(
        loss, tx or optfn.adam(1e-2, **lazy), mesh=mesh, data_axis=names, **options
    )
    rng = np.random.default_rng(3)
    batches = [(rng.integers(0, 64, 32), normal(k, 32)) for k in range(3)]
    state, losses = problems.trained(step, step.init(PARAMS), batches)
    found = optfn.state_dict(state)
    return {k: v for k, v in found.items() if v.dtype.kind == "f"}, losses


@pytest.mark.parametrize("way", suite(WAYS, "params over two axes"))
def test_steps_in_phases_train_alike(request, way):
    expected = trained(**WAYS[way])
    request.getfixturevalue("in_phases")
    found = trained(**WAYS[way])
    # Sums in another order; Adam's first steps are signs.
    for x, y in zip(jax.tree.leaves(expected), jax.tree.leaves(found), strict=True):
        np.testing.assert_allclose(y, x, rtol=2e-4, atol=2e-4)
