"""Whatever judges a run while it trains says nothing about ordinary programs, however long.

CONTRIBUTING lists the judges. Cheap steps, in which a gradient is noise that does not depend on the
params, so that entries cross zero again and again: some hundreds in CI, 21,000 in `make nightly`.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from grids import nightly
from jax.sharding import Mesh

import optfn

SHORT, LONG = 1_000, 21_000  # whole sums of three
SHAPE = (1, 1024)
SCALES = [1.0, 1e-1, 1e-2, 1e-3, 1e-4]
RATES = [1.0, 1e-2, 1e-3, 1e-4, 1e-6]
OPTIMIZERS = {
    "adam": optfn.adam,
    "adamw": optfn.adamw,
    "sgd": optfn.sgd,
    "momentum": functools.partial(optfn.momentum, momentum=0.9),
    "lamb": optfn.lamb,
    "muon": optfn.muon,
}
# Rates are those of the leaves, so one run has them all.
ATTRS = {f".*r{j}": optfn.ParamAttr(learning_rate=rate) for j, rate in enumerate(RATES)}


def make_params(dtype, copies=1):
    """Return leaves of all scales and rates."""
    rng = np.random.default_rng(0)
    return {
        f"{n}s{i}r{j}": jnp.asarray(scale * rng.normal(size=SHAPE), dtype)
        for n in range(copies)
        for i, scale in enumerate(SCALES)
        for j in range(len(RATES))
    }


def noisy_loss(p, seeds):
    """Return a loss whose gradient is the mean of normal numbers that follow from the seeds."""

    noise = jnp.mean(
        jax.vmap(lambda seed: jax.random.normal(jax.random.key(seed), SHAPE))(seeds), 0
    )
    return sum(jnp.vdot(x, noise) for x in p.values())


def seeds_of(step):
    return np.arange(4, dtype=np.uint32) + 4 * step


def scan(tx, params, steps):
    """Return the params and the state after a jitted scan, as a program of one's own has it."""

    def step(carry, n):
        p, state = carry
        grads = jax.grad(noisy_loss)(p, jnp.arange(4) + 4 * n)
        updates, state = tx.update(grads, state, p)
        return (optfn.apply_updates(p, updates), state), None

    run = jax.jit(lambda carry: jax.lax.scan(step, carry, jnp.arange(steps))[0])
    return run((params, tx.init(params)))


def train(tx, params, steps, **options):
    train_step = optfn.make_train_step(noisy_loss, tx, **options)
    state = train_step.init(params)
    for n in range(steps):
        state, _ = train_step(state, seeds_of(n))
    train_step.check(state)
    return state.params, state.opt_state


def train_divided(tx, params, steps):
    mesh = Mesh(np.array(jax.devices()[:4]), ("data",))
    return train(tx, params, steps, mesh=mesh, shard="params")


def accumulated(tx, params, steps):
    return scan(optfn.accumulate(tx, 3), params, steps)


LOOPS = {"scan": scan, "step": train, "divided": train_divided, "accumulate": accumulated}


FORMS = [("bfloat16", None), ("float16", None), ("bfloat16", 32), ("bfloat16", 24)]
CASES = [("adam", *FORMS[0], "scan", 1, SHORT)]
CASES += [nightly(n, *f, "scan", 1, LONG) for n in OPTIMIZERS for f in FORMS]
CASES += [nightly(n, *FORMS[0], loop, 1, LONG) for n in ("adam", "sgd") for loop in LOOPS]
CASES += [nightly(n, *FORMS[0], "scan", 10, LONG) for n in ("adam", "momentum")]


# Without XLA's optimizations the old check was silent, too.
@pytest.mark.optimized
@pytest.mark.parametrize(("name", "dtype", "bits", "loop", "copies", "steps"), CASES)
def test_masters_never_end_an_ordinary_run(name, dtype, bits, loop, copies, steps):
    """25 leaves, whose scales and rates lie in six decades; a moved leaf would be an error."""
    tx = optfn.master_weights(OPTIMIZERS[name](1.0, param_attrs=ATTRS), bits=bits)
    params, state = LOOPS[loop](tx, make_params(dtype, copies), steps)
    assert all(jnp.isfinite(x).all() for x in params.values())
    if bits is None:
        [found] = [s for s in jax.tree.leaves(state, is_leaf=is_copies) if is_copies(s)]
        assert found.moved == 0
        for path, p in params.items():
            np.testing.assert_array_equal(p, found.master[path].astype(p.dtype), path)


def is_copies(x):
    return hasattr(x, "moved")


def is_guard(x):
    return hasattr(x, "skipped")


FEATURES = 8
SOLUTION = np.random.default_rng(0).normal(size=FEATURES)
RATE = optfn.schedules.linear_warmup(
    optfn.schedules.polynomial(2e-2, 200, 1e-5, cycle=True), 50, start_lr=0.0, end_lr=2e-2
)


def squared_error(p, batch):
    x, y = batch
    return jnp.mean((x.astype(p["w"].dtype) @ p["w"] + p["b"] - y).astype(jnp.float32) ** 2)


def batches(steps):
    """Yield batches of a linear model with noise."""
    rng = np.random.default_rng(1)
    for _ in range(steps):
        x = rng.normal(size=(16, FEATURES)).astype(np.float32)
        y = (x @ SOLUTION + 0.1 * rng.normal(size=16)).astype(np.float32)
        yield x, y


def guarded(tx):
    return optfn.record_metrics(optfn.skip_nonfinite(optfn.skip_spikes(tx)))


def averaged(tx):
    return optfn.chain(tx, optfn.exponential_moving_average(0.99), optfn.model_average(0.15))


MESH = {"mesh": Mesh(np.array(jax.devices()[:2]), ("data",))}
COMPRESSED = optfn.dgc_momentum(
    RATE, 0.9, rampup_begin_step=20, sparsity=(0.75,), min_size=1, momentum_masking=False
)
# What is trained, the dtype of its params, and options of the run.
RUNS = {
    "guards": (guarded(averaged(optfn.adamw(RATE))), "float32", {}),
    "guards around momentum": (guarded(optfn.momentum(RATE, 0.9)), "float32", {}),
    "masters": (guarded(optfn.lamb(RATE, multi_precision=True)), "bfloat16", {}),
    "scaled loss": (
        optfn.dynamic_loss_scale(optfn.adam(RATE, multi_precision=True)), "float16", {},
    ),
    "plateau": (
        optfn.chain(optfn.adam(1.0), optfn.schedules.reduce_on_plateau(1e-2)), "float32", {},
    ),
    "accumulate": (guarded(optfn.accumulate(averaged(optfn.adam(RATE)), 3)), "float32", {}),
    "compression": (optfn.record_metrics(COMPRESSED), "float32", MESH),
    "packed": (guarded(optfn.adam(RATE)), "float32", {"packed": True}),
    "packed rule of optax": (optax.adamw(1e-2), "float32", {"packed": True}),
}  # fmt: skip


@pytest.mark.parametrize(
    "name, steps", [("guards", 300), ("scaled loss", 300), *(nightly(name, LONG) for name in RUNS)]
)
def test_no_judge_of_the_loop_speaks_of_an_ordinary_run(name, steps):
    """Warnings of optfn are errors in tests; a spike or a gradient left out would be counted."""
    tx, dtype, options = RUNS[name]
    params = {"w": jnp.zeros(FEATURES, dtype), "b": jnp.zeros((), dtype)}
    state, history = optfn.minimize(
        squared_error,
        tx,
        params,
        batches(steps),
        evaluate=lambda p: float(np.abs(p["w"].astype(np.float32) - SOLUTION).max()),
        evaluate_every=max(100, steps // 20),
        keep_best=True,
        on_nonfinite="stop",
        progress=False,
        **options,
    )
    counted = [x for x in jax.tree.leaves(state.opt_state, is_leaf=is_guard) if is_guard(x)]
    # A scale of the loss is found by steps that overflow: some at first, one for each growth.
    allowed = 20 + steps // 2000 if name == "scaled loss" else 0
    assert all(x.skipped <= allowed for x in counted)
    assert np.mean(history["loss"][-50:]) < np.mean(history["loss"][:50])


@pytest.mark.parametrize("steps", [2_000, nightly(LONG)])
def test_one_bad_batch_in_a_hundred_leaves_a_scale_at_which_the_others_train(steps):
    tx = optfn.dynamic_loss_scale(optfn.sgd(1e-3, multi_precision=True))
    params = {"w": jnp.ones(8, jnp.float16)}

    def step(carry, n):
        p, state = carry
        factor = optfn.loss_scale(state) * jnp.where(n % 100 == 99, jnp.nan, 1e-3)
        grads = jax.grad(lambda p: factor * jnp.sum(p["w"].astype(jnp.float32)))(p)
        before = state.inner_state.inner_state.master["w"]
        updates, state = tx.update(grads, state, p)
        moved = jnp.all(state.inner_state.inner_state.master["w"] < before)
        return (optfn.apply_updates(p, updates), state), moved

    (_, state), moved = jax.jit(lambda carry: jax.lax.scan(step, carry, jnp.arange(steps)))(
        (params, tx.init(params))
    )
    assert optfn.loss_scale(state) >= 1.0
    np.testing.assert_array_equal(moved, np.arange(steps) % 100 != 99)
    assert state.skipped == steps // 100 and not state.inner_state.gave_up
