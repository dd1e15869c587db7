"""The dtype in which gradients are reduced: what is sent, and the digits of the mean."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from grids import nightly, suite
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import optfn
from optfn.distributed import data_mesh, plan_memory, quantize, scan_layers, sharded

WIDTH = 512  # (512, 512) is divided, "bias" stays whole on each device
PARAMS = {"w": jnp.zeros((WIDTH, WIDTH), jnp.bfloat16), "bias": jnp.zeros(8, jnp.bfloat16)}
# The gradient of worker i. In bfloat16, 256 + 1 is 256: a sum one after the other has no ones.
OF_WORKER = np.array([256, 1, 1, 1, 1, 1, 1, 1], np.float32)
MEAN = np.float64(OF_WORKER).mean()  # 32.875


def loss_fn(params, batch):
    scale = jnp.mean(batch).astype(jnp.bfloat16)
    return sum(jnp.sum(p * scale).astype(jnp.float32) for p in params.values())


def two_levels():
    return Mesh(np.array(jax.devices()).reshape(2, 4), ("group", "data"))


WAYS = {
    "data parallel": {"mesh": data_mesh},
    "state": {"mesh": data_mesh, "shard": "state"},
    "params": {"mesh": data_mesh, "shard": "params"},
    "gathered once": {"mesh": data_mesh, "shard": sharded("params", gather_once=True)},
    "specs": {"mesh": data_mesh, "shard": {"w": P(None, "data")}},
    "two levels": {
        "mesh": two_levels,
        "data_axis": ("group", "data"),
        "shard": sharded("params", axis="data"),
    },
}


def make(name, **more):
    options = dict(WAYS[name])
    return optfn.make_train_step(
        loss_fn, optfn.sgd(1.0), mesh=options.pop("mesh")(), **options | more
    )


def is_jaxpr(x):
    return hasattr(x, "eqns") or hasattr(x, "jaxpr")


def reductions(jaxpr):
    """Return (dtype, elements) of each float array that a jaxpr adds over devices."""
    found = []
    for equation in jaxpr.eqns:
        if equation.primitive.name in ("psum", "psum_invariant", "reduce_scatter"):
            arrays = [v.aval for v in equation.invars if jnp.issubdtype(v.aval.dtype, jnp.floating)]
            found += [(str(x.dtype), x.size) for x in arrays]
        for inner in jax.tree.leaves(list(equation.params.values()), is_leaf=is_jaxpr):
            if is_jaxpr(inner):
                found += reductions(getattr(inner, "jaxpr", inner))
    return found


@pytest.mark.parametrize("name", suite(WAYS, "gathered once", "two levels"))
def test_the_mean_is_the_float64_mean_rounded_once(name):
    step = make(name, reduce_dtype="float32")
    state, _ = step(step.init(PARAMS), OF_WORKER)
    for key, p in state.params.items():
        assert p.dtype == jnp.bfloat16
        expected = np.full(PARAMS[key].shape, -MEAN).astype(jnp.bfloat16)
        np.testing.assert_array_equal(np.asarray(p), expected)


@pytest.mark.parametrize("name", WAYS)
def test_gradients_are_added_in_this_dtype(name):
    """All arrays but the loss, in each of the collectives; None leaves them in their own dtype."""

    def dtypes(**more):
        step = make(name, **more)
        program = jax.make_jaxpr(step.compiled)(*step.shapes(PARAMS, OF_WORKER))
        return {dtype for dtype, size in reductions(program.jaxpr) if size > 16}

    assert dtypes(reduce_dtype="float32") == {"float32"}
    if name in ("data parallel", "state", "params"):  # no axis is left to the CPU's compiler
        assert dtypes() == {"bfloat16"}


def test_sharded_has_a_dtype_of_its_own_for_the_shards():
    """Between the groups of two levels the dtype is the step's."""
    way = sharded("params", axis="data", reduce_dtype="float32")
    options = {"data_axis": ("group", "data"), "shard": way}
    step = optfn.make_train_step(
        loss_fn, optfn.sgd(1.0), mesh=two_levels(), reduce_dtype="float64", **options
    )
    assert step.layout.reduce_dtype == jnp.float32 and step.options.reduce_dtype == jnp.float64
    step = optfn.make_train_step(
        loss_fn, optfn.sgd(1.0), mesh=data_mesh(), shard=sharded("state", reduce_dtype="float32")
    )
    state, _ = step(step.init(PARAMS), OF_WORKER)
    assert np.asarray(state.params["w"])[0, 0] == np.array(-MEAN).astype(jnp.bfloat16)


def test_layers_of_a_scan_are_reduced_in_this_dtype():
    params = {"layers": {"w": jnp.zeros((4, WIDTH, WIDTH), jnp.bfloat16)}}

    def layered(params, batch):
        scale = jnp.mean(batch).astype(jnp.bfloat16)
        total = scan_layers(
            lambda layer, total: total + jnp.sum(layer["w"] * scale).astype(jnp.float32),
            params["layers"],
            jnp.float32(0),
        )
        return total

    step = optfn.make_train_step(
        layered, optfn.sgd(1.0), mesh=data_mesh(), shard="params", reduce_dtype="float32"
    )
    state, _ = step(step.init(params), OF_WORKER)
    found = np.asarray(state.params["layers"]["w"])
    np.testing.assert_array_equal(found, np.full(found.shape, -MEAN).astype(jnp.bfloat16))


def test_float32_gradients_can_be_reduced_in_bfloat16():
    params = {"w": jnp.zeros((8, 8))}
    step = optfn.make_train_step(
        lambda p, x: jnp.sum(p["w"] * jnp.mean(x)),
        optfn.sgd(1.0),
        mesh=data_mesh(),
        reduce_dtype=jnp.bfloat16,
    )
    program = jax.make_jaxpr(step.compiled)(*step.shapes(params, OF_WORKER))
    assert ("bfloat16", 64) in reductions(program.jaxpr)


@pytest.mark.parametrize(
    ("name", "gradients"),
    [("data parallel", 2.0), ("state", 1.0), ("params", 1.0), ("two levels", None)],
)
def test_the_plan_counts_these_bytes(name, gradients):
    """Only gradients are sent in float32; params are gathered in bfloat16."""
    options = dict(WAYS[name])
    mesh = options.pop("mesh")()
    params = {"w": PARAMS["w"]}
    narrow, wide = (
        plan_memory(optfn.sgd(1.0), params, mesh, **options, reduce_dtype=x)
        for x in (None, "float32")
    )
    size = WIDTH * WIDTH * 2
    if gradients is None:  # scattered over 4 devices, averaged over 2 groups
        assert wide.sent - narrow.sent == 3 / 4 * size + size / 4
    else:
        assert wide.sent - narrow.sent == 7 / 8 * gradients * size
    assert wide._replace(sent=0) == narrow._replace(sent=0)


def test_packets_are_sent_as_they_are():
    way = sharded("params", reduce=quantize(8))
    plans = [
        plan_memory(optfn.sgd(1.0), {"w": PARAMS["w"]}, data_mesh(), shard=way, reduce_dtype=x)
        for x in (None, "float32")
    ]
    assert plans[0] == plans[1]


@pytest.mark.parametrize("dtype", ["int32", "complex64", "half-ish", 3])
def test_it_must_be_a_real_floating_point_dtype(dtype):
    message = "must be None or a real floating-point dtype"
    with pytest.raises(TypeError, match=f"^reduce_dtype {message}"):
        make("params", reduce_dtype=dtype)
    with pytest.raises(TypeError, match=f"^sharded: reduce_dtype {message}"):
        sharded("params", reduce_dtype=dtype)


def test_it_needs_a_mesh():
    with pytest.raises(ValueError, match="reduce_dtype needs mesh"):
        optfn.make_train_step(loss_fn, optfn.sgd(1.0), reduce_dtype="float32")


@pytest.mark.parametrize("way", [nightly("data parallel"), "params", "two levels"])
def test_means_of_float16_are_finite_where_every_number_is(way):
    """Gradients, the loss, aux and the model state of eight workers, each of 20,000."""
    options = {k: x() if k == "mesh" else x for k, x in WAYS[way].items()}
    half = jnp.float16

    def loss(p, variance, x):
        mean = jnp.mean(x).astype(half)
        new = (0.5 * variance + 0.5 * mean).astype(half)
        return jnp.sum(p * x.astype(half).mean()) + mean, (new, {"a": mean})

    step = optfn.make_train_step(loss, optfn.sgd(1e-4), has_aux=True, model_state=True, **options)
    state = step.init(jnp.zeros(256, half), half(2e4))
    state, metrics = step(state, np.full(8, 2e4, np.float32))
    found = state.params[0], metrics["loss"], metrics["aux"]["a"], state.model_state
    np.testing.assert_allclose(np.float64(found), [-2, 2e4, 2e4, 2e4], rtol=1e-3)
