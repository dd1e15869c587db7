"""Masters see that something besides the update changed their params, in every kind of loop."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from grids import suite
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import optfn
from optfn.wrappers.moved_params import is_rounded, sample

PARAMS = {
    "a": jnp.ones((16, 32), jnp.bfloat16),
    "w": jnp.linspace(1, 4, 16 * 200).reshape(16, 200).astype(jnp.bfloat16),
    "wide": jnp.ones(3),
}
RIGHT = optfn.adam(1e-2, multi_precision=True)
# A link of optax without a state, of which `init` knows nothing.
SCALED = optax.chain(optfn.adam(1e-2, multi_precision=True), optax.scale(0.1))


def loss(p, x):
    return sum(jnp.sum((leaf.astype(jnp.float32) - jnp.mean(x)) ** 2) for leaf in p.values())


def step(tx):
    def run(p, state):
        updates, state = tx.update(jax.grad(loss)(p, 0.5), state, p)
        return optax.apply_updates(p, updates), state

    return run


def eager(tx, p, state):
    for _ in range(10):
        p, state = step(tx)(p, state)


def jitted(tx, p, state):
    compiled = jax.jit(step(tx))
    for _ in range(10):
        p, state = compiled(p, state)
    jax.block_until_ready(p)


def on_a_mesh_of_ones_own(tx, p, state):
    mesh = Mesh(np.array(jax.devices()[:4]), ("data",))
    run = jax.jit(
        jax.shard_map(
            step(tx), mesh=mesh, in_specs=(P(), P()), out_specs=(P(), P()), check_vma=False
        )
    )
    for _ in range(10):
        p, state = run(p, state)
    jax.block_until_ready(p)


def trained(**options):
    def run(tx, p, state):
        if options:
            options["mesh"] = Mesh(np.array(jax.devices()[:4]), ("data",))
        train_step = optfn.make_train_step(loss, tx, donate=False, **options)
        opt_state = train_step.init(PARAMS).opt_state if state is None else state
        state = train_step.init(p)._replace(opt_state=opt_state)
        for _ in range(10):
            state, _ = train_step(state, np.full(4, 0.5, np.float32))

    return run


LOOPS = {
    "eager": eager,
    "jitted": jitted,
    "on a mesh of one's own": on_a_mesh_of_ones_own,
    "a step": trained(),
    "a step with divided params": trained(mesh=None, shard="params"),
    "a step with packed params": trained(packed=True, mesh=None),
}


@pytest.mark.parametrize(
    "loop", suite(LOOPS, "jitted", "on a mesh of one's own", "a step", "a step with packed params")
)
def test_a_link_of_another_library_behind_masters_ends_the_run(loop):
    state = None if loop.startswith("a step") else SCALED.init(PARAMS)
    with pytest.raises((ValueError, jax.errors.JaxRuntimeError), match="not its master, rounded"):
        LOOPS[loop](SCALED, PARAMS, state)


@pytest.mark.parametrize(
    "fault", [optax.clip(5e-3), optax.add_decayed_weights(-1e-4)], ids=["a clip", "a small decay"]
)
def test_a_small_change_of_the_update_is_found_within_three_steps(fault):
    tx = optax.chain(RIGHT, fault)
    p = {"w": np.random.default_rng(0).normal(size=1024), "v": np.linspace(-0.02, 0.02, 1024)}
    p = jax.tree.map(lambda x: jnp.asarray(x, jnp.bfloat16), p)
    state = tx.init(p)
    run = jax.jit(lambda p, state: tx.update(jax.grad(loss)(p, 0.5), state, p, value_fn=None))
    for _ in range(10):
        updates, state = run(p, state)
        p = optax.apply_updates(p, updates)
    assert state[0].moved > 0


def test_params_set_by_hand_are_an_error_that_names_the_leaf():
    edited = PARAMS | {"w": PARAMS["w"] * 1.1}
    with pytest.raises((ValueError, jax.errors.JaxRuntimeError), match="'w' is not its master"):
        trained()(RIGHT, edited, RIGHT.init(PARAMS))


def test_what_was_found_waits_in_the_state_and_changes_no_update():
    """For programs of a TPU or a GPU, where no error of the host stops a loop of one's own."""
    tx = optfn.record_metrics(RIGHT)
    grads, state = jax.grad(loss)(PARAMS, 0.5), tx.init(PARAMS)
    masters = state.inner_state
    found = state._replace(inner_state=masters._replace(moved=jnp.asarray(2, jnp.int32)))
    right, _ = tx.update(grads, state, PARAMS, value_fn=None)
    updates, after = tx.update(grads, found, PARAMS, value_fn=None)
    jax.tree.map(np.testing.assert_array_equal, updates, right)
    with pytest.raises(ValueError, match="'w' is not its master, rounded"):
        optfn.metrics(after)
    train_step = optfn.make_train_step(loss, tx, donate=False)
    with pytest.raises(ValueError, match="'w' is not its master, rounded"):
        train_step.check(train_step.init(PARAMS)._replace(opt_state=after))
    moved = RIGHT.update(grads, masters, PARAMS | {"w": PARAMS["w"] * 2}, value_fn=None)[1].moved
    assert moved == 2


DTYPES = {"bfloat16": np.float32, "float16": np.float32, "float32": np.float64}


@pytest.mark.parametrize("narrow", DTYPES)
def test_every_rounding_is_one_and_a_far_neighbour_is_none(narrow):
    """Of random bits, subnormal numbers too."""
    with jax.enable_x64(True):
        dtype, wide = jnp.dtype(narrow), DTYPES[narrow]
        rng = np.random.default_rng(0)
        bits = rng.integers(0, 2**16 if dtype.itemsize == 2 else 2**32, 20_000)
        p = jnp.asarray(bits.astype(f"uint{8 * dtype.itemsize}").view(dtype))
        p = p[jnp.isfinite(p)]
        near = p.astype(wide)
        up = jnp.nextafter(p, jnp.asarray(jnp.inf, dtype)).astype(wide)
        masters = near + (up - near) * rng.uniform(0, 1, p.shape).astype(wide)
        rounded = masters.astype(dtype)
        assert is_rounded(rounded, masters).all()
        is_finite = jnp.isfinite(up)
        far = near + 2 * (up - near)
        is_far = is_finite & jnp.isfinite(far) & (jnp.abs(near) > 2e-36)
        is_far &= jnp.abs(near) >= float(jnp.finfo(dtype).smallest_normal)
        assert is_far.sum() > 10_000 and not is_rounded(p, far)[is_far].any()
        assert is_rounded(jnp.asarray(jnp.nan, dtype), jnp.asarray(1.0, wide))


@pytest.mark.parametrize("shape", [(), (0,), (3, 5000), (50257, 2)])
def test_a_sample_is_small(shape):
    x = jnp.arange(np.prod(shape, dtype=int)).reshape(shape)
    assert sample(x).size == min(sample(x).size, 1024) and (sample(x).size > 0) == (x.size > 0)


@pytest.mark.parametrize("name", ["bfloat16", "float16"])
def test_a_parameter_that_no_update_takes_to_its_master_takes_the_master_along(name):
    """p is 1, its master is below 1, and falls just below zero: p + u has a bit less than that."""
    rng = np.random.default_rng(0)
    unit, scale = 2.0**-24, 2.0 ** rng.integers(-9, 9, 4096)
    masters, want = 1 - unit * rng.integers(64, 2048, 4096), -unit * rng.integers(1, 64, 4096)
    p = {"w": jnp.asarray(scale, name)}
    tx = optfn.master_weights(optfn.sgd(1.0))
    state = tx.init(p)._replace(master={"w": jnp.asarray(scale * masters, jnp.float32)})
    grads = {"w": jnp.asarray(scale * (masters - want), jnp.float32)}
    updates, state = jax.jit(tx.update)(grads, state, p)
    after = optfn.apply_updates(p, updates)["w"]
    np.testing.assert_array_equal(after, state.master["w"].astype(name))
    assert np.all(np.abs(state.master["w"] / scale - want) <= unit)
