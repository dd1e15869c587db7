"""Accumulation of gradients over several calls."""

import jax
import jax.numpy as jnp
import numpy as np
from problems import tree

import optfn


def test_the_inner_update_stands_inside_a_loop():
    tx = optfn.accumulate(optfn.chain(optfn.sgd(0.1), optfn.exponential_moving_average(0.9)), 2)
    jaxpr = str(jax.make_jaxpr(tx.update)(tree(1), tx.init(tree(0)), tree(0)))
    assert jaxpr.count("while[") == 1


def test_accumulate_writes_the_update_over_the_sum():
    """What is there at micro-step 0 is not added to the next gradient, whatever it is."""
    tx, p = optfn.accumulate(optfn.sgd(0.5), 2), jnp.float32(3.0)
    state = tx.init(p)
    for g in (1.0, 3.0):
        u, state = tx.update(jnp.float32(g), state, p)
    assert u == state.total == -1.0
    _, state = tx.update(jnp.float32(5.0), state._replace(total=jnp.float32(np.nan)), p)
    assert state.total == 5.0
