"""Stages that are modules of flax linen, nnx and equinox, their weights divided over 2 × 2 × 2."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from grids import nightly
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from problems import mean_square

import optfn
from optfn.distributed import copy_to, pipeline_value_and_grad, stack_stages, sum_over

eqx = pytest.importorskip("equinox")
linen, nnx = pytest.importorskip("flax.linen"), pytest.importorskip("flax.nnx")

RNG = np.random.default_rng(0)
WIDTH, HIDDEN, STAGES, MODEL = 8, 16, 2, 2
X, Y = (RNG.normal(size=(16, WIDTH)).astype(np.float32) for _ in range(2))
IN = 0.3 * RNG.normal(size=(STAGES, WIDTH, HIDDEN)).astype(np.float32)
OUT = 0.3 * RNG.normal(size=(STAGES, HIDDEN, WIDTH)).astype(np.float32)
IN_SPEC, OUT_SPEC = P("data", "model"), P("model", "data")
FLIPPED = P("model", "data"), P("data", "model")  # equinox keeps (outputs, inputs)


class Linen(linen.Module):
    hidden: int

    @linen.compact
    def __call__(self, x):
        h = jnp.tanh(linen.Dense(self.hidden, use_bias=False)(copy_to(x, "model")))
        return x + sum_over(linen.Dense(WIDTH, use_bias=False)(h), "model")


class Nnx(nnx.Module):
    def __init__(self):
        self.first = nnx.Linear(WIDTH, HIDDEN, use_bias=False, rngs=nnx.Rngs(0))
        self.second = nnx.Linear(HIDDEN, WIDTH, use_bias=False, rngs=nnx.Rngs(1))

    def __call__(self, x):
        return x + sum_over(self.second(jnp.tanh(self.first(copy_to(x, "model")))), "model")


class Equinox(eqx.Module):
    first: eqx.nn.Linear
    second: eqx.nn.Linear

    def __init__(self):
        keys = jax.random.split(jax.random.key(0))
        self.first = eqx.nn.Linear(WIDTH, HIDDEN, use_bias=False, key=keys[0])
        self.second = eqx.nn.Linear(HIDDEN, WIDTH, use_bias=False, key=keys[1])

    def __call__(self, x):
        h = jnp.tanh(jax.vmap(self.first)(copy_to(x, "model")))
        return x + sum_over(jax.vmap(self.second)(h), "model")


class Stages(NamedTuple):
    """A module as stages: `params` has the leaves of the first and the second layer, in order."""

    params: Any
    stage_fn: Any
    specs: tuple = (IN_SPEC, OUT_SPEC)
    transposed: bool = False


def of_linen():
    init = jax.vmap(Linen(HIDDEN).init, (None, 0), axis_name="model")
    params = jax.eval_shape(init, jax.random.key(0), X[None])["params"]
    # Linen compares the shapes of params with the module's: that of a device's part.
    part = Linen(HIDDEN // MODEL)
    return Stages(params, lambda params, x: part.apply({"params": params}, x))


def of_nnx():
    graph, params = nnx.split(Nnx(), nnx.Param)
    return Stages(params, lambda params, x: nnx.merge(graph, params)(x))


def of_equinox():
    params, static = eqx.partition(Equinox(), eqx.is_array)
    return Stages(params, lambda params, x: eqx.combine(params, static)(x), FLIPPED, True)


def plain_loss(params, batch):
    x, target = batch
    for w_in, w_out in zip(*params, strict=True):
        x = x + jnp.tanh(x @ w_in) @ w_out
    return mean_square(x, target)


@pytest.mark.parametrize("make", [nightly(of_linen), of_nnx, nightly(of_equinox)])
def test_it_trains_as_one_device_with_an_eighth_of_the_bytes(make):
    stages = make()
    structure = jax.tree.structure(stages.params)
    matrices = [x.swapaxes(1, 2) if stages.transposed else x for x in (IN, OUT)]
    params = stack_stages([structure.unflatten(x[s] for x in matrices) for s in range(STAGES)])
    mesh = Mesh(np.array(jax.devices()[:8]).reshape(2, 2, 2), ("stage", "data", "model"))
    shardings = [NamedSharding(mesh, P("stage", *spec)) for spec in stages.specs]
    params = jax.device_put(params, jax.tree.structure(params).unflatten(shardings))
    value_and_grad = pipeline_value_and_grad(
        stages.stage_fn, mean_square, mesh=mesh, num_microbatches=2, data_axis="data",
        param_specs=structure.unflatten(stages.specs),
    )  # fmt: skip
    tx = optfn.adam(0.01, grad_clip=optfn.clip_by_global_norm(0.5))
    step = optfn.make_train_step(None, tx, value_and_grad=value_and_grad)
    alone = optfn.make_train_step(plain_loss, tx)
    state, want = step.init(params), alone.init((IN, OUT))
    for _ in range(5):
        state, metrics = step(state, (X, Y))
        want, expected = alone(want, (X, Y))
        np.testing.assert_allclose(metrics["loss"], expected["loss"], rtol=3e-6)
    for found, right in zip(jax.tree.leaves(state.params), want.params, strict=True):
        found_here = found.addressable_shards[0].data
        assert found_here.size == found.size // 8
        found = found.swapaxes(1, 2) if stages.transposed else found
        np.testing.assert_allclose(found, right, rtol=1e-4, atol=1e-6)
    assert type(state.params.layers) is type(stages.params)
