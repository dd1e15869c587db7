"""Masters as a bfloat16 parameter and a remainder: every bit pattern, and whole runs."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optfn
from optfn.transforms.codes import join_float32, remainder_beside, split_float32

INFINITY, NAN = 0x7F800000, 0x7FC00000
split32 = jax.jit(lambda x: split_float32(x, 32))
split24 = jax.jit(lambda x, noise: split_float32(x, 24, noise))
joined = jax.jit(join_float32)


def floats(bits):
    return np.asarray(bits, np.uint32).view(np.float32)


def bits_of(x, dtype=np.uint32):
    return np.asarray(x).view(dtype)


def check_32(bits):
    """Compare with the bits themselves, and with NumPy's rounding to bfloat16."""
    p, e = split32(floats(bits))
    assert (p.dtype, e.dtype) == (jnp.bfloat16, jnp.int16)
    is_nan = (bits & 0x7FFFFFFF) > INFINITY
    np.testing.assert_array_equal(bits_of(joined(p, e)), np.where(is_nan, NAN, bits))
    near = (bits.astype(np.int64) + 0x7FFF + (bits >> 16 & 1)) >> 16  # to the nearest, ties to even
    away = (bits.astype(np.int64) + 0x8000) >> 16
    is_tie = (bits & 0xFFFF) == 0x8000
    want = np.where(is_nan, NAN >> 16, np.where(is_tie, away, near))
    np.testing.assert_array_equal(bits_of(p, np.uint16), want)


def check_24(bits, noise):
    """The last 8 bits are gone, upwards where noise carries; finite numbers stay finite."""
    p, e = split24(floats(bits), noise)
    assert (p.dtype, e.dtype) == (jnp.bfloat16, jnp.int8)
    magnitude = (bits & 0x7FFFFFFF).astype(np.int64)
    rounded = (magnitude + (noise & 0xFF)) >> 8 << 8
    rounded = np.where(magnitude < INFINITY, np.minimum(rounded, INFINITY - 256), magnitude)
    want = np.where(magnitude > INFINITY, NAN, rounded | (bits & 0x80000000))
    found = bits_of(joined(p, e))
    np.testing.assert_array_equal(found, want)
    again = joined(*split24(floats(found), noise[::-1]))
    np.testing.assert_array_equal(bits_of(again), found)


def sample(step):
    """Return every `step`-th bit pattern, and those around the ends of all kinds of numbers."""
    ends = np.array([0, 1, 0x7FFF, 0x8000, 0x8001, 0x800000, 0x7F7FFFFF, INFINITY, INFINITY + 1])
    near = np.concatenate([ends + k for k in range(-2, 3)]) & 0x7FFFFFFF
    near = np.concatenate([near, near | 0x80000000, [0x7F7FFF00, 0x7F7FFF7F, 0x7F7FFF80]])
    return np.concatenate([np.arange(0, 2**32, step), near]).astype(np.uint32)


def random_noise(bits, seed):
    return np.random.default_rng(seed).integers(0, 2**32, bits.shape, np.uint32)


def test_a_sample_of_all_numbers_is_split_and_joined():
    bits = sample(2053)
    check_32(bits)
    for noise in (np.zeros_like(bits), np.full_like(bits, 0xFF), random_noise(bits, 0)):
        check_24(bits, noise)


@pytest.mark.nightly
@pytest.mark.parametrize("upper", range(64))
def test_all_numbers_are_split_and_joined(upper):
    """All 2³² bit patterns, in 64 parts."""
    for part in range(4):
        bits = (np.arange(2**24, dtype=np.uint32)) + np.uint32((upper * 4 + part) << 24)
        check_32(bits)
        check_24(bits, random_noise(bits, upper))


@pytest.mark.parametrize("dtype", [np.int16, np.int8])
def test_a_parameter_and_its_remainder_are_those_of_their_number(dtype):
    """(p, e) → float → (p, e), for every p that is finite, and not so small that e passes zero."""
    info = np.iinfo(dtype)
    p = np.arange(2**16, dtype=np.uint16)
    magnitude = p & 0x7FFF
    p = p[(magnitude > 1) & (magnitude < 0x7F7F)].view(jnp.bfloat16)
    for e in (info.min, -5, -1, 0, 1, 77, info.max):
        e = np.full(p.shape, e, dtype)
        x = joined(p, e)
        again, rest = split32(x) if dtype == np.int16 else split24(x, random_noise(e, 1))
        np.testing.assert_array_equal(bits_of(again, np.uint16), bits_of(p, np.uint16))
        np.testing.assert_array_equal(rest, e)


def test_a_remainder_beside_another_parameter_comes_as_near_as_it_can():
    """Within a unit of the parameter's last place it is exact; beyond, at the end of its range."""
    x = jnp.asarray([1.001, 1.001, -1e-3, jnp.nan, 2.0], jnp.float32)
    p = jnp.asarray([1.0, 2.0, 1e-3, 1.0, jnp.nan], jnp.bfloat16)
    e = remainder_beside(p, x, 32)
    assert e.tolist()[1:4] == [-(2**15), -(2**15), 0]
    back = join_float32(p, e)
    assert back[0] == x[0] and jnp.isnan(back[4])
    edges = join_float32(jnp.asarray([0.0, jnp.inf], jnp.bfloat16), jnp.asarray([-9, 9], jnp.int16))
    assert edges.tolist() == [0.0, float("inf")]  # not wrapped round to another number


PARAMS = {
    "w": jnp.asarray(np.random.default_rng(0).normal(size=(16, 8)), jnp.bfloat16),
    "b": jnp.zeros(8, jnp.bfloat16),
    "wide": jnp.ones(3),
    "n": jnp.arange(2),
}


def gradients(seed):
    rng = np.random.default_rng(seed)
    zero = np.zeros(2, jax.dtypes.float0)
    return {k: jnp.asarray(rng.normal(size=PARAMS[k].shape), PARAMS[k].dtype) for k in "wb"} | {
        "wide": jnp.ones(3),
        "n": zero,
    }


def run(tx, steps):
    """Return the params and the states of each step."""
    params, state, found = PARAMS, tx.init(PARAMS), []
    for k in range(steps):
        updates, state = tx.update(gradients(k), state, params)
        params = optax.apply_updates(params, updates)
        found.append((params, state))
    return found


def test_masters_of_32_bits_are_those_of_copies():
    """At each step bit for bit; the parameters too, save at exact ties."""
    steps = (run(optfn.adamw(3e-3, multi_precision=bits), 4) for bits in (32, True))
    for (p, state), (want, copies) in zip(*steps, strict=True):
        for k in "wb":
            master = join_float32(p[k], state.remainder[k])
            np.testing.assert_array_equal(master, copies.master[k])
            is_tie = (bits_of(master) & 0xFFFF) == 0x8000
            np.testing.assert_array_equal(
                np.where(is_tie, 0, p[k]), np.where(is_tie, 0, np.asarray(want[k]))
            )
        np.testing.assert_array_equal(p["wide"], want["wide"])
        assert isinstance(state.remainder["n"], optax.MaskedNode)


def test_a_parameter_that_falls_far_in_one_step_takes_its_master_along():
    """p + u is rounded there: the master is off by half a unit of the old one, as any sum is."""
    params = {"w": jnp.asarray([1.0, 1.0, -3.0], jnp.bfloat16)}
    tx = optfn.master_weights(optfn.sgd(1.0), bits=32)
    target = jnp.asarray([1e-6, 1e-12, 3e-7], jnp.float32)
    wide = params["w"].astype(jnp.float32)
    updates, state = tx.update({"w": wide - target}, tx.init(params), params)
    new = optax.apply_updates(params, updates)
    master = join_float32(new["w"], state.remainder["w"])
    np.testing.assert_allclose(master, target, rtol=0, atol=3 * 2.0**-24)


def test_edited_parameters_are_moved_by_their_remainder():
    """Copies undo the edit, remainders take it, up to half a unit of its last place."""
    tx = optfn.master_weights(optfn.sgd(1.0), bits=32)
    params, state = run(tx, 3)[-1]
    edited = params | {"w": jnp.full((16, 8), 5.0, jnp.bfloat16)}
    zero = jax.tree.map(lambda g: g * 0 if g.dtype != jax.dtypes.float0 else g, gradients(0))
    updates, after = tx.update(zero, state, edited)
    new = optax.apply_updates(edited, updates)
    np.testing.assert_array_equal(new["w"], edited["w"])
    master = join_float32(new["w"], after.remainder["w"])
    assert np.all(np.abs(master - 5.0) <= 2.0**-8 * 4) and np.any(master != 5.0)


def test_remainders_are_in_checkpoints_by_names_of_their_own():
    """tests/checkpoint/test_forms_of_masters.py loads each form as another."""
    names = {True: "master_weights", 32: "master_weights32", 24: "master_weights24"}
    for bits, name in names.items():
        mapping = optfn.state_dict(optfn.sgd(0.1, multi_precision=bits).init(PARAMS))
        assert {k.split("/")[0] for k in mapping if "master" in k} == {name}


def test_remainders_are_divided_as_the_parameters_are():
    tx, mesh = optfn.adamw(1e-3, multi_precision=32), optfn.distributed.data_mesh(8)
    step = optfn.make_train_step(lambda p, x: jnp.sum(x @ p["w"]), tx, mesh=mesh, shard="params")
    state = step.init({k: PARAMS[k] for k in "wb"})
    part = state.opt_state.remainder["w"].addressable_shards[0].data
    assert part.size * 8 == PARAMS["w"].size
