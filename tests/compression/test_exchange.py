"""The exchange of gradients against its equations, for all kinds of leaves."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import reference_exchange as reference
from arrays import normal
from exchanges import COMPRESSORS, EPS, PARAMS, first, gradients, zeros
from grids import nightly
from jax.sharding import PartitionSpec as P
from simulation import N, stacked
from simulation import simulated_update as simulated

from optfn.compression.exchange import ExchangeState
from optfn.distributed import data_mesh, exchange, power_sgd, quantize, top_k
from optfn.sparse import Rows

FOLLOWED = [(name, 1.0) for name in COMPRESSORS if name != "top_k_one_entry"]
FOLLOWED += [(name, beta) for name in ("top_k", "quantize_1") for beta in (0.5, 0.0)]


@pytest.mark.nightly
@pytest.mark.parametrize(("name", "beta"), FOLLOWED)
def test_follows_the_equations(name, beta):
    """Residual and direction of each step, from the residuals before; and nothing is lost."""
    compressor, send = COMPRESSORS[name]
    tx = exchange(compressor, error_feedback=beta, min_size=100)
    state, update = stacked(tx.init(zeros())), simulated(tx)
    for t in range(4):
        g, before = gradients(t), jax.device_get(state.residual.value)
        direction, state = jax.device_get(update(g, state))
        for k in ("w", "v"):
            total = np.float32(beta) * before[k] + g[k]
            sent = np.stack([send(x) for x in total])
            kept = state.residual.value[k]
            atol = 8 * EPS * np.abs(total).max()
            np.testing.assert_allclose(kept, total - sent, rtol=0, atol=atol)
            mean = sent.mean(axis=0, dtype=np.float64)
            for worker in range(N):
                own = direction[k][worker]
                np.testing.assert_allclose(own, mean, rtol=0, atol=atol)
                np.testing.assert_array_equal(own, direction[k][0])
            conserved = direction[k][0] + kept.mean(axis=0, dtype=np.float64)
            came = total.mean(axis=0, dtype=np.float64)
            np.testing.assert_allclose(conserved, came, rtol=0, atol=atol)
            assert sent.any() and kept.any()
        np.testing.assert_allclose(direction["b"][1], g["b"].mean(axis=0), atol=1e-6)
    assert isinstance(state.residual.value["b"], optax.MaskedNode)
    assert state.num_workers.tolist() == [N] * N and state.step.tolist() == [4] * N


def test_a_mapping_of_patterns():
    """The first match counts; None and no match are dense; wide leaves are too."""
    choice = {"table": None, r".*e": quantize(1), "w|x": top_k(0.1)}
    params = {k: np.zeros((30, 50), np.float32) for k in ("table", "we", "w", "rest", "x")}
    tx = exchange(choice)
    state = tx.init(params)
    kept = {k for k, x in state.residual.value.items() if hasattr(x, "shape")}
    assert kept == {"we", "w", "x"}
    g = {k: normal(i, N, 30, 50) for i, k in enumerate(params)}
    direction, _ = simulated(tx)(g, stacked(state))
    for k in ("table", "rest"):
        np.testing.assert_allclose(direction[k][0], g[k].mean(axis=0), atol=1e-6)
    signs = functools.partial(reference.quantize, bits=1)
    for k, send in (("we", signs), ("w", functools.partial(reference.top_k, density=0.1))):
        want = np.mean([send(x) for x in g[k]], axis=0)
        np.testing.assert_allclose(direction[k][0], want, atol=1e-6)
    with pytest.raises(ValueError, match=r"compressor: the pattern 'q' matches no leaf.*'rest'"):
        exchange({"q": top_k(0.1)}).init(params)
    with jax.enable_x64(True):
        state = exchange(top_k(0.1), min_size=1).init({"wide": jnp.zeros(9, jnp.float64)})
    assert not jax.tree.leaves(state.residual)


def test_rows_are_exchanged_as_rows():
    tx = exchange(quantize(1), min_size=1)
    params = {"t": np.zeros((8, 3), np.float32), "w": np.zeros(40, np.float32)}
    state, g = tx.init(params), normal(0, 2, 40)

    def update(index, values, g, state):
        return tx.update({"t": Rows(index, values, 8), "w": g}, state, params)

    index, values = np.array([[1, 5], [5, 8]], np.int32), normal(1, 2, 2, 3)
    values[1, 1] = 0
    run = jax.jit(jax.vmap(update, axis_name="data"))
    direction, state = run(index, values, g, stacked(state, 2))
    rows = first(direction)["t"]
    assert isinstance(rows, Rows) and rows.values.shape == (4, 3)
    want = np.zeros((8, 3), np.float32)
    want[1], want[5] = values[0, 0] / 2, (values[0, 1] + values[1, 0]) / 2
    np.testing.assert_allclose(rows.dense(), want, atol=1e-6)
    assert not state.residual.value["t"].any() and state.residual.value["w"].any()
    values[0, 0, 0] = np.inf
    direction, after = run(index, values, g, state)
    assert not direction["t"].values.any() and not direction["w"].any()
    chex.assert_trees_all_equal(after.residual, state.residual)


@pytest.mark.parametrize(
    "compressor", [nightly(top_k(0.1)), nightly(quantize(1)), power_sgd(2)], ids=repr
)
@pytest.mark.parametrize(("bad", "leaf"), [nightly(np.nan, "w"), (np.inf, "b")])
def test_an_update_that_is_not_finite(compressor, bad, leaf):
    """Of one worker: zeros on all, residuals and compressors' states stay, the next one goes on."""
    tx = exchange(compressor)
    update, state = simulated(tx), stacked(tx.init(zeros()))
    _, state = update(gradients(0), state)
    g = gradients(1)
    g[leaf][2].flat[3] = bad
    direction, after = update(g, state)
    assert all((x == 0).all() for x in jax.tree.leaves(direction))
    chex.assert_trees_all_equal(after, state)
    direction, _ = update(gradients(2), after)
    assert all(x.any() for x in jax.tree.leaves(direction))


@pytest.mark.filterwarnings("ignore:.*all workers have the same gradient")
def test_what_has_accumulated_beyond_float32():
    """A residual is never infinite, so that it does not become NaN."""
    tx = exchange(top_k(0.5), min_size=1)
    state, update = stacked(tx.init(np.zeros(2)), 2), simulated(tx)
    for g in (3e38, 3e38, 3e38, 1.0, 1.0):
        _, state = update(jnp.full((2, 2), g), state)
        chex.assert_tree_all_finite(state)


def test_warm_up():
    """Dense at first, without residual; then as if it were the first step."""
    warm, cold = (exchange(quantize(1), warmup_steps=k) for k in (2, 0))
    state = stacked(warm.init(zeros()))
    for t in range(2):
        g = gradients(t)
        direction, state = simulated(warm)(g, state)
        for k in PARAMS:
            np.testing.assert_allclose(direction[k][1], g[k].mean(axis=0), atol=1e-6)
    assert not any(x.any() for x in jax.tree.leaves(state.residual))
    got = simulated(warm)(gradients(2), state)
    want = simulated(cold)(gradients(2), stacked(cold.init(zeros())))
    chex.assert_trees_all_equal(got[0], want[0])
    chex.assert_trees_all_equal(got[1].residual, want[1].residual)


def test_averaged_updates_and_axes_that_are_not_bound():
    tx, g = exchange(quantize(1)), {"w": jnp.ones(2000)}
    for made in (tx, exchange()):
        with pytest.raises(ValueError, match=r"exchange: the axis 'data' is not bound"):
            made.update(g, made.init(g))

    def body(x):
        return tx.update({"w": jax.lax.psum(x, "data")}, tx.init(g))[0]

    words = "exchange: the gradient of 'w' is already summed or averaged"
    with pytest.raises(ValueError, match=words):
        jax.shard_map(body, mesh=data_mesh(N), in_specs=P("data"), out_specs=P())(jnp.ones(8000))


def test_the_residual_of_other_params():
    tx = exchange(quantize(1))
    state = stacked(tx.init({"w": jnp.zeros(2000)}))
    words = r"exchange: .*'w' must have shape \(2001,\); got \(2000,\)"
    with pytest.raises(ValueError, match=words):
        simulated(tx)({"w": jnp.zeros((N, 2001))}, state)


def test_the_state_has_no_step_for_a_dense_mean():
    state = exchange({".*": None}).init(zeros())
    assert isinstance(state, ExchangeState) and not jax.tree.leaves(state.residual)
