"""Sharded parameters, shard_map and pmap: the same numbers as on one device."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import registry
from grids import suite
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import optfn
from optfn.distributed import data_mesh, quantize, sharded


def mesh(kind):
    if kind == "explicit":
        return jax.make_mesh((4,), ("data",), axis_types=(AxisType.Explicit,))
    return Mesh(np.array(jax.devices()[:4]), ("data",))


def arrays(seed):
    rng = np.random.default_rng(seed)
    return {"w": rng.normal(size=(8, 3)).astype(np.float32), "b": np.float32(rng.normal(size=4))}


def steps(entry, tx, params, state, gradients):
    for grads in gradients:
        updates, state = tx.update(grads, state, params, **dict(entry.extra))
        params = optax.apply_updates(params, updates)
    return params, state


@functools.cache
def expected(entry):
    tx, params = entry.make(), arrays(0)
    run = jax.jit(functools.partial(steps, entry, tx))
    return run(params, tx.init(params), [arrays(k) for k in (1, 2)])


# Exchanges have axes and states of their own, which tests/compression/test_exchange.py is about.
PROGRAMS = {k: v for k, v in registry.PROGRAMS.items() if k in registry.EVERYTHING}


AXES = registry.in_turn("auto", "auto", "explicit", "explicit", entries=PROGRAMS)
CHECKED = registry.in_turn(True, True, False, False, entries=PROGRAMS)


SUITE = (
    "sgd", "decayed_adagrad", "adam_clip_l2", "adamw_int8", "ftrl_dense_rows",
    "scale_by_trust_ratio", "skip_spikes",
)  # fmt: skip


@pytest.mark.parametrize(("entry", "kind"), suite(AXES, *SUITE))
def test_sharded_parameters(entry, kind):
    """jit over sharded arrays: state is sharded as its parameters, results as on one device."""
    on = mesh(kind)

    def place(tree):
        return jax.tree.map(lambda x: jax.device_put(x, NamedSharding(on, P("data"))), tree)

    tx, params = entry.make(), place(arrays(0))
    state = tx.init(params)
    for leaf in jax.tree.leaves(state):
        if leaf.shape in ((8, 3), (4,)):
            assert leaf.sharding.spec == P("data")
    with jax.set_mesh(on):
        new, _ = jax.jit(functools.partial(steps, entry, tx))(
            params, state, [place(arrays(k)) for k in (1, 2)]
        )
    chex.assert_trees_all_close(jax.device_get(new), expected(entry)[0], rtol=1e-5, atol=1e-6)


SUITE_IN_SHARD_MAP = (
    "sgd_clip_l1", "adadelta", "adamw", "lamb", "reduce_on_plateau", "dynamic_loss_scale",
)  # fmt: skip


@pytest.mark.parametrize(("entry", "check_vma"), suite(CHECKED, *SUITE_IN_SHARD_MAP))
def test_replicated_in_shard_map(entry, check_vma):
    """Parameters, state and (averaged) gradients are replicated; so is what comes out."""
    tx, params = entry.make(), jax.tree.map(jnp.asarray, arrays(0))
    parts = np.array([0.5, 1.5, 1.0, 1.0], np.float32)
    own = [jax.tree.map(lambda x: np.multiply.outer(parts, x), arrays(s)) for s in (1, 2)]

    def body(params, state, gradients):
        mine = jax.tree.map(lambda x: jax.lax.pmean(x[0], "data"), gradients)
        return steps(entry, tx, params, state, mine)

    run = jax.shard_map(
        body, mesh=mesh("auto"), in_specs=(P(), P(), P("data")), out_specs=P(), check_vma=check_vma
    )
    new, state = jax.jit(run)(params, tx.init(params), own)
    want = expected(entry)
    chex.assert_trees_all_close(jax.device_get(new), want[0], rtol=1e-5, atol=1e-6)
    chex.assert_trees_all_close(jax.device_get(state), want[1], rtol=1e-4, atol=1e-5)


def test_each_worker_with_its_own_state():
    """Varying gradients and state under check_vma: also through accumulate's loop."""
    tx = optfn.accumulate(optfn.adam(0.1), 2)
    params = jnp.stack([jnp.full(3, k) for k in range(4)]).astype(jnp.float32)

    def body(p):
        p = p[0]
        state = tx.init(p)
        for _ in range(2):
            updates, state = tx.update(p - 10.0, state, p)
            p = p + updates
        return p[None]

    run = jax.shard_map(body, mesh=mesh("auto"), in_specs=P("data"), out_specs=P("data"))
    np.testing.assert_allclose(jax.jit(run)(params), params + 0.1, rtol=1e-5)


def test_packets_leave_out_complex_leaves():
    loss = lambda p, x: jnp.mean(jnp.abs(p - 1j) ** 2) + 0 * x.sum()  # noqa: E731
    for way in ({"reduce": quantize(8)}, {"gather": quantize(8)}):
        step = optfn.make_train_step(
            loss, optfn.sgd(10.0), mesh=data_mesh(2), shard=sharded("params", **way)
        )
        state, _ = step(step.init(jnp.zeros((128, 128), jnp.complex64)), np.ones((2, 3), "f4"))
        np.testing.assert_allclose(state.params, np.full((128, 128), 20j / 128**2), rtol=1e-5)


@pytest.mark.parametrize("workers", [2, 3])
def test_a_constant_model_state_stays_on_a_mesh(workers):
    """Up to rounding, also the largest number there is, as in a mask."""
    kept = np.random.default_rng(0).normal(size=1000).astype(np.float32)
    kept[0] = 0.999 * np.finfo(np.float32).min
    step = optfn.make_train_step(
        lambda p, m, x: (jnp.mean(x * p), m), optfn.sgd(0.1), mesh=data_mesh(workers),
        model_state=True,
    )  # fmt: skip
    state, _ = step(step.init(jnp.ones(3), kept), np.ones((6, 3), np.float32))
    np.testing.assert_allclose(state.model_state, kept, rtol=1e-6)
