"""The paths of params by library, as docs/attributes.md has them and `optfn.summary` shows them."""

import pathlib
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import optfn

PAGE = pathlib.Path(__file__).parents[2] / "docs" / "attributes.md"
X = np.ones((1, 4), np.float32)


def of_linen(boxes):
    nn = pytest.importorskip("flax.linen")
    kernel = nn.initializers.lecun_normal()

    class Net(nn.Module):
        @nn.compact
        def __call__(self, x):
            init = nn.with_partitioning(kernel, (None, "model")) if boxes else kernel
            return nn.Dense(4, kernel_init=init)(x)

    return Net().init(jax.random.key(0), X)["params"]


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
    return hk.transform(lambda x: hk.nets.MLP([4])(x)).init(jax.random.key(0), X)


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
