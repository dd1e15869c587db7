"""The paths of params by library, as docs/attributes.md has them and `optfn.summary` shows them."""

import pathlib
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import optfn
from optfn.distributed import data_mesh

PAGE = pathlib.Path(__file__).parents[2] / "docs" / "attributes.md"
X = np.random.default_rng(0).normal(size=(2, 16, 4)).astype(np.float32)


def of_linen(boxes):
    nn = pytest.importorskip("flax.linen")
    kernel = nn.initializers.lecun_normal()

    class Net(nn.Module):
        @nn.compact
        def __call__(self, x):
            init = nn.with_partitioning(kernel, (None, "model")) if boxes else kernel
            return nn.Dense(4, kernel_init=init)(x)

    return Net().init(jax.random.key(0), X[0])["params"]


def of_nnx():
    nnx = pytest.importorskip("flax.nnx")

    class Net(nnx.Module):
        def __init__(self):
            self.layers = nnx.List([nnx.Linear(4, 4, rngs=nnx.Rngs(0))])

    return nnx.split(Net(), nnx.Param)[1]


def of_equinox():
    eqx = pytest.importorskip("equinox")
    net = eqx.nn.MLP(4, 4, width_size=4, depth=1, key=jax.random.key(0))
    return eqx.filter(net, eqx.is_inexact_array)


def of_haiku():
    hk = pytest.importorskip("haiku")
    return hk.transform(lambda x: hk.nets.MLP([4])(x)).init(jax.random.key(0), X[0])


class Layer(NamedTuple):
    w: jax.Array


LIBRARIES = {
    "flax linen": (lambda: of_linen(False), "Dense_0/kernel"),
    "… in boxes": (lambda: of_linen(True), "Dense_0/kernel/value"),
    "flax nnx": (of_nnx, "layers/0/kernel"),
    "equinox": (of_equinox, "layers/0/weight"),
    "haiku": (of_haiku, "mlp/~/linear_0/w"),
    "keras": (lambda: [jnp.ones((4, 4)), jnp.ones(4)], "1"),
    "plain JAX": (lambda: {"layers": [Layer(jnp.ones((4, 4)))]}, "layers/0/w"),
}


@pytest.mark.parametrize("library", LIBRARIES)
def test_the_page_and_the_summary_have_the_path(library):
    make, path = LIBRARIES[library]
    row = next(x for x in PAGE.read_text().splitlines() if x.startswith(f"| {library}"))
    assert f"`{path}`" in row
    tx = optfn.adam(1e-3, param_attrs={path: optfn.ParamAttr(trainable=False)})
    lines = optfn.summary(tx, make()).splitlines()
    (frozen,) = [line for line in lines if "frozen: not trainable" in line]
    assert frozen.split()[0] == path


def test_batch_norm_of_equinox_trains_on_a_mesh_in_the_mode_that_the_page_names():
    eqx = pytest.importorskip("equinox")

    class Net(eqx.Module):
        linear: eqx.nn.Linear
        norm: eqx.nn.BatchNorm

        def __call__(self, x, state):
            return self.norm(self.linear(x), state)

    def make(key):
        return Net(
            eqx.nn.Linear(4, 3, key=key), eqx.nn.BatchNorm(3, axis_name="batch", mode="batch")
        )

    net, state = eqx.nn.make_with_state(make)(jax.random.key(0))
    params, static = eqx.partition(net, eqx.is_inexact_array)

    def loss_fn(params, state, x):
        net = eqx.combine(params, static)
        y, state = jax.vmap(net, axis_name="batch", in_axes=(0, None), out_axes=(0, None))(x, state)
        return jnp.mean((y - 1.0) ** 2), state

    options = {"model_state": True, "mesh": data_mesh(4), "shard": "params"}
    step = optfn.make_train_step(loss_fn, optfn.adam(1e-2), **options)
    trained = step.init(params, state)
    for x in X:
        trained, metrics = step(trained, x)
    assert np.isfinite(float(metrics["loss"]))
