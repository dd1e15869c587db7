"""Params divided by explicit axes, in a step without `mesh=`: as one device, or refused by name."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from compilations import compilations
from grids import suite
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from problems import trained

import optfn

X = np.random.default_rng(0).normal(size=(3, 32, 64)).astype(np.float32)
SPECS = {
    "w": P("data", "model"),
    "v": P("model", "data"),
    "scale": P("data"),
    "bias": P(),
    "deep": P(None, "model", None),
}


def explicit_mesh():
    return jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Explicit,) * 2)


def host_params():
    rng = np.random.default_rng(1)
    shapes = {"w": (64, 512), "v": (512, 64), "scale": (64,), "bias": (64,), "deep": (2, 64, 256)}
    return {k: 0.1 * rng.normal(size=shape).astype(np.float32) for k, shape in shapes.items()}


def put(mesh, x, spec):
    return jax.device_put(x, NamedSharding(mesh, spec))


def placed(mesh):
    return {name: put(mesh, x, SPECS[name]) for name, x in host_params().items()}


def batches(mesh, some=X):
    return [put(mesh, x, P("data", None)) for x in some]


def loss_fn(p, x, whole=lambda x: x):
    p = jax.tree.map(whole, p)
    y = jnp.tanh(x @ p["w"]) @ p["v"]
    return jnp.mean((y * p["scale"] + p["bias"] - 1.0) ** 2) + jnp.mean(p["deep"] ** 2)


def explicit_loss(p, x):
    return loss_fn(p, x, lambda x: jax.sharding.reshard(x, P(*[None] * x.ndim)))


TX = {
    "int8, clip, average, masters": lambda: optfn.master_weights(
        optfn.chain(
            optfn.adamw(1e-3, moment_dtype="int8", grad_clip=optfn.clip_by_global_norm(1.0)),
            optfn.exponential_moving_average(0.9),
        )
    ),
    "bfloat16": lambda: optfn.momentum(1e-3, 0.9, moment_dtype="bfloat16"),
    "optax": lambda: optax.adamw(1e-3),
}


@pytest.mark.parametrize(
    "name, microbatches", suite(itertools.product(TX, [1, 2]), ("int8, clip, average, masters", 2))
)
def test_the_run_is_that_of_one_device(name, microbatches):
    alone = optfn.make_train_step(loss_fn, TX[name](), microbatches=microbatches)
    expected, losses = trained(alone, alone.init(host_params()), X)
    mesh = explicit_mesh()
    with jax.set_mesh(mesh):
        step = optfn.make_train_step(explicit_loss, TX[name](), microbatches=microbatches)
        state, found = trained(step, step.init(placed(mesh)), batches(mesh))
    np.testing.assert_allclose(found, losses, rtol=1e-4)
    for name, x in state.params.items():
        np.testing.assert_allclose(x, expected.params[name], rtol=1e-2, atol=1e-4)
        assert x.sharding.is_equivalent_to(NamedSharding(mesh, SPECS[name]), x.ndim)
    assert compilations(step) == 1


def test_scales_of_rows_are_divided_like_the_rows():
    mesh = explicit_mesh()
    with jax.set_mesh(mesh):
        state = optfn.adam(1e-3, moment_dtype="int8").init(placed(mesh))
    scales = next(x for x in jax.tree.leaves(state, is_leaf=_has_scales) if _has_scales(x)).mu_scale
    assert scales["w"].sharding.shard_shape((64,)) == (16,)
    assert scales["deep"].sharding.shard_shape((2, 64)) == (2, 32)


def _has_scales(x):
    return hasattr(x, "mu_scale")


@pytest.mark.nightly
def test_a_run_resumes_bit_for_bit(tmp_path):
    mesh = explicit_mesh()
    with jax.set_mesh(mesh):

        def minimize(batches, directory=None):
            return optfn.minimize(
                explicit_loss, optfn.adam(1e-3), placed(mesh), batches,
                checkpoint=directory, progress=False,
            )  # fmt: skip

        whole, _ = minimize(batches(mesh))
        minimize(batches(mesh, X[:2]), tmp_path)
        state, _ = minimize(batches(mesh), tmp_path)
    for name, x in state.params.items():
        np.testing.assert_array_equal(x, whole.params[name])
        assert x.sharding.is_equivalent_to(NamedSharding(mesh, SPECS[name]), x.ndim)


def test_what_cannot_be_had_is_refused_by_name():
    mesh = explicit_mesh()
    with jax.set_mesh(mesh):
        step = optfn.make_train_step(explicit_loss, optfn.adam(1e-3), packed=True)
        words = r"pack: leaf 'deep' is divided by .*'model'.* over explicit .*packed=True.* out"
        with pytest.raises(ValueError, match=words):
            step.init(placed(mesh))
        whole = {name: put(mesh, x, P()) for name, x in host_params().items()}
        _, losses = trained(step, step.init(whole), batches(mesh))
        step = optfn.make_train_step(explicit_loss, optfn.adam(1e-3), microbatches=16)
        words = "microbatches=16: the 4 devices along 'data' must divide each of the 16 slices"
        with pytest.raises(ValueError, match=words):
            step(step.init(placed(mesh)), batches(mesh)[0])
    alone = optfn.make_train_step(loss_fn, optfn.adam(1e-3))
    _, expected = trained(alone, alone.init(host_params()), X)
    np.testing.assert_allclose(losses, expected, rtol=1e-4)
