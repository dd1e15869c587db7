"""Expressions written for XLA: their values, and the programs that its CPU compiler makes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from optfn.mesh.compilers import xla

N = 1 << 18


def normal(shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


def compiled(fn, *arguments):
    return jax.jit(fn).lower(*arguments).compile()


def temporaries(fn, *arguments):
    return compiled(fn, *arguments).memory_analysis().temp_size_in_bytes


@pytest.mark.parametrize("shape", [(3, 5), (3, 256), (2, 8, 64), (4,)])
def test_row_norms_are_those_of_numpy(shape, expressions):
    x = normal(shape)
    expected = np.linalg.norm(x.reshape(len(x), -1).astype(np.float64), axis=1)
    np.testing.assert_allclose(jax.jit(xla.row_norms)(x), expected, rtol=1e-6)


@pytest.mark.optimized
def test_partial_sums_of_long_rows_are_an_array():
    """In one kernel with the sum along the row, XLA does not vectorize them."""
    x = normal((64, N // 64))
    assert x.nbytes / 8 <= temporaries(lambda x: xla.row_norms(2 * x), x) < x.nbytes / 4


@pytest.mark.optimized
def test_a_flag_is_computed_once():
    """Without the square root each of the updates reads all of the numbers."""

    def text_of(kept):
        def update(values, arrays):
            flag = kept(jnp.all(jnp.stack([jnp.isfinite(x) for x in values])))
            return [jnp.where(flag, x, 0) for x in arrays]

        values = [np.float32(i) for i in range(40)]
        return compiled(update, values, [normal(64, i) for i in range(40)]).as_text()

    assert text_of(xla.compute_once).count("is-finite") < text_of(lambda x: x).count("is-finite")


def test_a_hidden_constant_has_its_value():
    assert jax.jit(lambda: xla.hide_constant(3))() == 3


@pytest.mark.optimized
def test_a_branch_behind_a_hidden_constant_stays():
    def text_of(constant):
        def fn(x):
            return jax.lax.cond(constant(False), jnp.sin, jnp.cos, x)

        return compiled(fn, normal(8)).as_text()

    assert " sine(" in text_of(xla.hide_constant)
    assert " sine(" not in text_of(jnp.asarray)


def test_a_barrier_returns_what_comes():
    float0 = np.zeros(3, jax.dtypes.float0)
    values = {"x": normal(3), "i": np.arange(3), "g": float0}
    found = xla.barrier(values)
    assert found["g"] is float0
    np.testing.assert_array_equal(found["x"], values["x"])
    np.testing.assert_array_equal(found["i"], values["i"])


def test_a_barrier_keeps_the_axes_over_which_arrays_vary():
    mesh = Mesh(np.array(jax.devices()[:2]), ("x",))

    def fn(varied, whole):
        return xla.barrier((varied, whole), jnp.float32(1))

    mapped = jax.shard_map(fn, mesh=mesh, in_specs=(P("x"), P()), out_specs=(P("x"), P()))
    found = jax.jit(mapped)(normal(4), normal(3))
    np.testing.assert_array_equal(found[0], normal(4))
    np.testing.assert_array_equal(found[1], normal(3))


@pytest.mark.parametrize("due", [True, False])
def test_loops_run_one_after_the_other_or_not_at_all(due):
    bodies = [lambda x, y: x + y, lambda x, y: x * y]
    loops = jax.jit(lambda due, x, reads: xla.run_in_place(bodies, due, x, reads))
    found = loops(due, np.float32(2), [np.float32(3), np.float32(10)])
    assert found == (50 if due else 2)


@pytest.mark.optimized
def test_a_carry_is_updated_in_place():
    x, y = normal(N), normal(N, 1)

    def fn(x, y):
        return xla.run_in_place([jnp.add, jnp.multiply], xla.hide_constant(True), x, [y, y])

    program = jax.jit(fn, donate_argnums=0).lower(x, y).compile().memory_analysis()
    assert program.temp_size_in_bytes < x.nbytes / 4


@pytest.mark.parametrize("sizes", [[7], [2, 5], [1, 0, 3, 3]])
def test_split_is_that_of_numpy(sizes, expressions):
    for x in (normal(7), normal((3, 7))):
        expected = np.split(x, np.cumsum(sizes)[:-1], axis=-1)
        for found in (xla.split(x, sizes), jax.jit(lambda x: xla.split(x, sizes))(x)):
            for ours, theirs in zip(found, expected, strict=True):
                np.testing.assert_array_equal(ours, theirs)


@pytest.mark.optimized
def test_starts_of_slices_are_known_at_run_time_only():
    """XLA compiles each slice with a start that it knows together with what reads it."""

    def text_of(split):
        return compiled(lambda x: [jnp.exp(y) for y in split(x, [16] * 20)], normal(320)).as_text()

    static = " slice("
    assert static not in text_of(xla.split)
    assert static in text_of(lambda x, sizes: jnp.split(x, len(sizes)))


@pytest.mark.parametrize("shape", [(), (7,), (300, 256), (3, 5, 8, 1), (0, 4)])
def test_a_progression_counts_elements(shape, expressions):
    step, start = 0x9E3779B1, 0xFFFF0003
    want = (np.arange(np.prod(shape, dtype=int), dtype=np.uint64) * step + start) % 2**32
    found = jax.jit(lambda start: xla.progression(shape, start, step))(np.uint32(start))
    np.testing.assert_array_equal(found, want.reshape(shape))


def noisy(x):
    """Return x after three steps that add noise."""

    def step(x, seed):
        k = xla.progression(x.shape, seed, 0x9E3779B1)
        return x + ((k ^ (k >> 16)) * np.uint32(0x21F0AAAD)).astype(jnp.float32), None

    return jax.lax.scan(step, x, jnp.arange(3, dtype=jnp.uint32))[0]


@pytest.mark.optimized
def test_a_loop_keeps_no_array_of_a_progression():
    x = normal((1024, 512))
    assert temporaries(noisy, x) < x.nbytes * 1.1


def test_sums_of_several_arrays():
    x = [np.random.default_rng(i).integers(2**32, size=(5, 7), dtype=np.uint32) for i in range(3)]
    found = jax.jit(xla.sum_arrays)(*x)
    assert [int(a) for a in found] == [int(a.sum(dtype=np.uint32)) for a in x]


@pytest.mark.optimized
def test_sums_keep_none_of_their_arrays():
    def fn(x):
        return xla.sum_arrays(jnp.sin(x), jnp.cos(x))

    x = normal(N)
    assert temporaries(fn, x) < x.nbytes / 4


def test_numbers_are_rounded_to_bfloat16_where_xla_would_not():
    x = normal(64)
    rounded = jax.jit(xla.round_to_bfloat16)(x)
    np.testing.assert_array_equal(rounded, x.astype(jnp.bfloat16).astype(np.float32))


@pytest.mark.optimized
def test_a_quotient_is_rounded_once():
    """XLA would multiply by the reciprocal of a divisor that is broadcast."""
    x = normal(N)
    for divisor in (np.float32(127), np.float32(0.3)):
        found = jax.jit(xla.divide)(x, divisor)
        np.testing.assert_array_equal(found, x / divisor)
    assert np.isnan(xla.divide(jnp.full(3, np.nan), np.float32(2))).all()


@pytest.mark.parametrize("shape", [(3, 5), (4, 64), (2, 3, 128)])
def test_reduced_rows_are_those_of_numpy(shape, expressions):
    x = np.abs(normal(shape))
    largest = jax.jit(lambda x: xla.reduce_rows(x, jnp.max))(x)
    np.testing.assert_array_equal(largest, x.max(axis=-1))
    total = jax.jit(lambda x: xla.reduce_rows(x, jnp.sum))(x)
    np.testing.assert_allclose(total, x.sum(axis=-1, dtype=np.float64), rtol=1e-6)


@pytest.mark.parametrize("shape", [(7,), (64,), (3, 40), (2, 2, 4096), (1, 5000)])
def test_a_packed_mask_has_entry_i_as_bit_i(shape, expressions):
    mask = np.random.default_rng(0).random(shape) < 0.5
    words = np.asarray(jax.jit(xla.pack_mask)(mask))
    padded = np.pad(mask, [(0, 0)] * (len(shape) - 1) + [(0, -shape[-1] % 32)])
    expected = np.packbits(padded, axis=-1, bitorder="little").view("<u4")
    np.testing.assert_array_equal(words, expected)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, None])
def test_a_number_that_is_not_finite_is_found(bad, expressions):
    arrays = [normal((5, 7)), normal(100), np.zeros((0, 3), np.float32)]
    arrays[0][0, 0] = np.finfo(np.float32).max
    arrays[1][33] = bad or 1
    assert jax.jit(xla.any_nonfinite)(arrays) == (bad is not None)
    assert not xla.any_nonfinite([])
