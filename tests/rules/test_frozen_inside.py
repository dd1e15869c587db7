"""A leaf that an optimizer freezes is frozen for the wrappers and chains around it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from grids import suite

import optfn
from optfn.distributed import data_mesh, exchange, quantize

FROZEN = {"base": optfn.ParamAttr(trainable=False)}
PARAMS = {"base": jnp.linspace(0.5, 1.5, 60).reshape(6, 10), "lora": jnp.ones((6, 2))}
WRAPPERS = {
    "accumulate": lambda tx: optfn.accumulate(tx, 2),
    "masters": lambda tx: optfn.master_weights(tx),
    "average": lambda tx: optfn.chain(tx, optfn.exponential_moving_average(0.9)),
    "window": lambda tx: optfn.chain(tx, optfn.model_average(0.5, min_average_window=1)),
    "guard": optfn.skip_nonfinite,
    "scale": optfn.dynamic_loss_scale,
    "spikes": lambda tx: optfn.skip_spikes(tx, 3.0, window=3),
    "clip": lambda tx: optfn.chain(optfn.clip_by_global_norm(1.0), tx),
    "all": lambda tx: optfn.skip_nonfinite(
        optfn.accumulate(optfn.chain(tx, optfn.exponential_moving_average(0.9)), 2)
    ),
}
GRADIENTS = {"NaN": jnp.nan, "large": 1e30, "none": None}


def optimizer(attrs=None):
    return optfn.adamw(0.1, param_attrs=attrs, grad_clip=optfn.clip_by_global_norm(1.0))


def train(tx, params, **of_base):
    state = tx.init(params)
    for n in range(4):
        grads = of_base | {"lora": jnp.full((6, 2), 1.0 + n, params["lora"].dtype)}
        updates, state = tx.update(grads, state, params)
        params = optfn.apply_updates(params, updates)
    return params, state


@pytest.mark.parametrize("gradient", GRADIENTS)
@pytest.mark.parametrize("dtype", suite(["float32", "bfloat16"], "bfloat16"))
@pytest.mark.parametrize("name", WRAPPERS)
def test_a_frozen_leaf_is_as_good_as_absent(name, dtype, gradient):
    """Bit for bit the run without the leaf, and no array of its shape in the state."""
    params = jax.tree.map(lambda p: p.astype(dtype), PARAMS)
    g = GRADIENTS[gradient]
    g = None if g is None else jnp.full((6, 10), g, dtype)
    found, state = train(WRAPPERS[name](optimizer(FROZEN)), params, base=g)
    alone, _ = train(WRAPPERS[name](optimizer()), {"lora": params["lora"]})
    np.testing.assert_array_equal(found["lora"], alone["lora"])
    np.testing.assert_array_equal(found["base"], params["base"])
    assert all(x.shape != (6, 10) for x in jax.tree.leaves(state))


EXCHANGES = {
    "exchange": lambda attrs: optfn.chain(exchange(quantize(8), min_size=1), optimizer(attrs)),
    "dgc": lambda attrs: optfn.dgc_momentum(
        0.1, 0.9, rampup_begin_step=0, sparsity=(0.99,), min_size=1, param_attrs=attrs
    ),
    "mean": optimizer,
    "accumulate": lambda attrs: optfn.accumulate(optimizer(attrs), 2),
}


@pytest.mark.parametrize("name", suite(EXCHANGES, "exchange", "dgc"))
def test_a_frozen_leaf_is_not_sent(name):
    """The step sends what it sends without the leaf."""

    def loss_fn(p, x):
        return jnp.mean((x @ p.get("base", PARAMS["base"]).T @ p["lora"]) ** 2)

    def run(attrs, params):
        step = optfn.make_train_step(loss_fn, EXCHANGES[name](attrs), mesh=data_mesh())
        state, metrics = step(step.init(params), x)
        return state.params, metrics.get("bytes_sent", 0)

    x = np.ones((8, 10), np.float32)
    found, sent = run(FROZEN, PARAMS)
    alone, sent_alone = run(None, {"lora": PARAMS["lora"]})
    assert sent == sent_alone
    np.testing.assert_allclose(found["lora"], alone["lora"], rtol=1e-6)
    np.testing.assert_array_equal(found["base"], PARAMS["base"])
