"""Models that say themselves how their arrays lie on a mesh with the axes "data" and "model".

Each function returns (apply, params, specs_of): apply(params, x) is the output for examples, and
specs_of(params) the PartitionSpecs of params.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

WIDTH = 16
EXAMPLE = np.ones((1, WIDTH), np.float32)


def constrain(x, *spec):
    """Constrain an array of a model over all axes; without a mesh, as on one device, nothing."""
    if jax.sharding.get_abstract_mesh().empty:
        return x
    return jax.lax.with_sharding_constraint(x, P(*spec))


def linen_boxes():
    """A scanned model of flax linen with boxes as params, and constraints on activations."""

    linen = pytest.importorskip("flax.linen")

    class Layer(linen.Module):
        @linen.compact
        def __call__(self, x, _):
            init = linen.with_partitioning(linen.initializers.lecun_normal(), ("data", "model"))
            return constrain(jnp.tanh(linen.Dense(WIDTH, kernel_init=init)(x)), "data", None), None

    class Net(linen.Module):
        @linen.compact
        def __call__(self, x):
            layers = linen.scan(
                Layer,
                variable_axes={"params": 0},
                split_rngs={"params": True},
                length=2,
                metadata_params={linen.PARTITION_NAME: None},
            )
            return layers(name="layers")(x, None)[0]

    net = Net()
    params = net.init(jax.random.key(0), EXAMPLE)["params"]
    return lambda params, x: net.apply({"params": params}, x), params, linen.get_partition_spec


def linen_logical():
    """A model of flax linen with logical names, which rules map to axes."""

    linen = pytest.importorskip("flax.linen")

    class Net(linen.Module):
        @linen.compact
        def __call__(self, x):
            init = linen.with_logical_partitioning(
                linen.initializers.lecun_normal(), ("embed", "mlp")
            )
            x = linen.Dense(4 * WIDTH, kernel_init=init)(x)
            return linen.with_logical_constraint(jnp.tanh(x), ("batch", "mlp"))

    rules = [("batch", "data"), ("embed", "data"), ("mlp", "model")]
    net = Net()
    params = net.init(jax.random.key(0), EXAMPLE)["params"]

    def apply(params, x):
        with linen.logical_axis_rules(rules):
            return net.apply({"params": params}, x)

    return apply, params, lambda x: linen.logical_to_mesh(linen.get_partition_spec(x), rules)


def nnx_metadata():
    """A model of flax nnx with shardings in the metadata of its params."""

    nnx = pytest.importorskip("flax.nnx")

    class Net(nnx.Module):
        def __init__(self, rngs):
            init = nnx.with_partitioning(nnx.initializers.lecun_normal(), ("data", "model"))
            self.up = nnx.Linear(WIDTH, 4 * WIDTH, kernel_init=init, rngs=rngs)

        def __call__(self, x):
            return constrain(jnp.tanh(self.up(x)), "data", "model")

    mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ("data", "model"))
    with jax.set_mesh(mesh):
        made, params = nnx.split(Net(nnx.Rngs(0)), nnx.Param)
    return lambda params, x: nnx.merge(made, params)(x), params, nnx.get_partition_spec


def plain_scan():
    """A model of plain JAX: layers in a scan that recomputes them, and a constraint on each."""

    def layer(x, w):
        x = constrain(x, "data", None)
        return constrain(jnp.tanh(x @ w), "data", "model"), None

    def apply(params, x):
        return jax.lax.scan(jax.checkpoint(layer), x, params["w"])[0]

    w = np.random.default_rng(0).normal(size=(2, WIDTH, WIDTH)).astype(np.float32)
    return apply, {"w": w / 4}, lambda params: {"w": P(None, "data", "model")}


@jax.custom_vjp
def double_gradient(x):
    """Return x, with twice the gradient."""
    return x


double_gradient.defvjp(lambda x: (constrain(x, "data", None), None), lambda _, g: (2 * g,))


def custom_derivatives():
    """A model of functions that have derivatives of their own, inside and outside of a scan."""

    def layer(x, w):
        x = constrain(jax.nn.gelu(x @ w), "data", "model")
        x = double_gradient(jax.nn.softmax(jax.nn.relu(x)))
        return jax.nn.silu(constrain(x, "data", None)), None

    def apply(params, x):
        x = jax.nn.relu(constrain(x @ params["first"], "data", "model"))
        x = jax.lax.scan(jax.checkpoint(layer), x, params["w"])[0]
        return jax.nn.logsumexp(double_gradient(x), 1) + jax.nn.relu6(jnp.mean(x, 1))

    w = np.random.default_rng(0).normal(size=(3, WIDTH, WIDTH)).astype(np.float32) / 4
    spec = P("data", "model")
    return apply, {"first": w[0], "w": w[1:]}, lambda p: {"first": spec, "w": P(None, *spec)}
