"""Averages of params: their names, buffers and rounding."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from problems import tree

import optfn


def test_averages_share_no_buffer_and_choose_by_name():
    tx = optfn.chain(
        optfn.sgd(0.1), optfn.exponential_moving_average(0.9), optfn.model_average(0.5)
    )
    params = tree(0) | {"ids": jnp.arange(3)}
    state = tx.init(params)
    with pytest.raises(ValueError, match="_average', 'model_average'; choose one of them"):
        optfn.averaged_params(state, params)
    for name in ("exponential_moving_average", "model_average"):
        averaged = optfn.averaged_params(state, params, name=name)
        chex.assert_trees_all_equal(averaged, params)
        theirs = {x.unsafe_buffer_pointer() for x in jax.tree.leaves(params)}
        assert theirs.isdisjoint(x.unsafe_buffer_pointer() for x in jax.tree.leaves(averaged))
    with pytest.raises(ValueError, match="has no average"):
        optfn.averaged_params(optfn.sgd(0.1).init(params), params)
    with pytest.raises(ValueError, match="min_average_window must be <= max"):
        optfn.model_average(0.5, min_average_window=5, max_average_window=4)


@pytest.mark.parametrize(
    ("average", "field"),
    [
        (lambda: optfn.model_average(1.0), "sum_1"),
        (lambda: optfn.exponential_moving_average(0.0), "average"),
    ],
)
def test_a_compiled_average_is_of_the_rounded_params(average, field):
    tx = optfn.chain(optfn.sgd(0.1), average())
    params = jnp.asarray(np.linspace(0.1, 1.0, 7), jnp.bfloat16)

    @jax.jit
    def step(params, state):
        updates, state = tx.update(jnp.cos(params), state, params)
        return optfn.apply_updates(params, updates), state

    params, state = step(params, tx.init(params))
    np.testing.assert_array_equal(getattr(state[-1], field), params.astype(jnp.float32))
