"""A leaf that an optimizer freezes is frozen for the wrappers and chains around it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import optfn
from optfn.distributed import data_mesh, exchange, quantize

FROZEN = {"base.*": optfn.ParamAttr(trainable=False)}
BASE = np.linspace(0.5, 1.5, 60, dtype=np.float32).reshape(6, 10)
LORA = np.ones((6, 2), np.float32)
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


def optimizer(attrs=None):
    return optfn.adamw(0.1, param_attrs=attrs, grad_clip=optfn.clip_by_global_norm(1.0))


def train(tx, params, of_frozen):
    state, lora = tx.init(params), LORA.astype(jnp.bfloat16)
    for n in range(1, 5):
        updates, state = tx.update(of_frozen | {"lora": n * lora}, state, params)
        params = optfn.apply_updates(params, updates)
    return params, state


@pytest.mark.parametrize("name", WRAPPERS)
def test_a_frozen_leaf_is_as_good_as_absent(name):
    """Bit for bit the run without it, whatever its gradient; no array of its shape in the state."""
    base, lora = BASE.astype(jnp.bfloat16), {"lora": LORA.astype(jnp.bfloat16)}
    gradients = {"base of NaN": np.nan * base, "base of 1e30": 1e30 * base, "base of None": None}
    frozen = dict.fromkeys(gradients, base)
    found, state = train(WRAPPERS[name](optimizer(FROZEN)), frozen | lora, gradients)
    alone, _ = train(WRAPPERS[name](optimizer()), lora, {})
    np.testing.assert_array_equal(found.pop("lora"), alone["lora"])
    jax.tree.map(np.testing.assert_array_equal, found, frozen)
    assert all(x.shape != BASE.shape for x in jax.tree.leaves(state))


EXCHANGES = {
    "exchange": lambda attrs: optfn.chain(exchange(quantize(8), min_size=1), optimizer(attrs)),
    "dgc": lambda attrs: optfn.dgc_momentum(
        0.1, 0.9, rampup_begin_step=0, sparsity=(0.99,), min_size=1, param_attrs=attrs
    ),
}


@pytest.mark.parametrize("name", EXCHANGES)
def test_a_frozen_leaf_is_not_sent(name):
    """The step sends what it sends without the leaf."""

    def loss_fn(p, x):
        return jnp.mean((x @ p.get("base", BASE).T @ p["lora"]) ** 2)

    def run(attrs, params):
        step = optfn.make_train_step(loss_fn, EXCHANGES[name](attrs), mesh=data_mesh(2))
        state, metrics = step(step.init(params), np.ones((2, 10), np.float32))
        return state.params, metrics["bytes_sent"]

    found, sent = run(FROZEN, {"base": BASE, "lora": LORA})
    alone, sent_alone = run(None, {"lora": LORA})
    assert sent == sent_alone
    np.testing.assert_allclose(found["lora"], alone["lora"], rtol=1e-6)
    np.testing.assert_array_equal(found["base"], BASE)
