"""Numbers in few bits: exact on average, never stuck, and what they cost."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from grids import by_name, suite

import optfn
from optfn.transforms import codes as quantization

SCALE = jnp.array([2.5], jnp.float32)
CODES = {
    "signed": (
        quantization.encode_signed,
        quantization.decode_signed,
        np.arange(-127, 128, dtype=np.int8),
    ),
    "unsigned": (
        quantization.encode_unsigned,
        quantization.decode_unsigned,
        np.arange(256, dtype=np.uint8),
    ),
}


@pytest.mark.parametrize("kind", CODES)
def test_a_number_that_has_a_code_keeps_it(kind):
    """Whatever the noise; and the codes are in order, from zero to the scale."""
    encode, decode, codes = CODES[kind]
    x = decode(jnp.asarray(codes), SCALE)
    assert np.all(np.diff(x) > 0)
    assert float(x[-1]) == pytest.approx(2.5, rel=1e-6)
    assert float(x[codes.tolist().index(0)]) == 0.0
    positive = codes > 0
    spacing = np.diff(np.asarray(x, np.float64)[positive])
    relative = spacing / np.asarray(x, np.float64)[positive][:-1]
    assert np.all(relative[8:] < 0.26) and np.all(relative[64:] < 0.1255)  # three bits of mantissa
    for noise in (2**4, 2**15, 2**16 - 2**4):
        # The product may be a last bit off, which only a noise at the very ends would show.
        np.testing.assert_array_equal(encode(x, SCALE, jnp.full(x.shape, noise, jnp.uint32)), codes)


@pytest.mark.parametrize("kind", [*CODES, "bfloat16"])
def test_rounding_is_right_on_average(kind):
    """The mean over all noises is the number; each result is one of its two neighbours."""
    x = np.concatenate([np.geomspace(1e-4, 2.4, 40), [2.5e-5, 1.0, 0.0]]).astype(np.float32)
    noise = jnp.arange(0, 2**16, 16, dtype=jnp.uint32)[:, None]
    if kind == "bfloat16":
        x = np.concatenate([x, -x])
        found = jax.vmap(lambda r: quantization.to_bfloat16(x, jnp.broadcast_to(r, x.shape)))(noise)
    else:
        encode, decode, _ = CODES[kind]
        if kind == "signed":
            x = np.concatenate([x, -x])
        found = jax.vmap(
            lambda r: decode(encode(jnp.asarray(x), SCALE, jnp.broadcast_to(r, x.shape)), SCALE)
        )(noise)
    found = np.asarray(found, np.float64)
    np.testing.assert_allclose(found.mean(axis=0), x, rtol=2e-4, atol=1e-9)
    for column, value in zip(found.T, x, strict=True):
        levels = np.unique(column)
        assert len(levels) <= 2
        assert levels[0] - 1e-6 * abs(value) <= value <= levels[-1] + 1e-6 * abs(value)


def test_only_zero_is_stored_as_zero():
    x = jnp.array([0.0, 1e-30, 1e-12, 1.0])
    codes = quantization.encode_unsigned(x, SCALE, jnp.zeros(4, jnp.uint32))
    assert np.array_equal(np.asarray(codes) > 0, [False, True, True, True])
    assert np.all(np.asarray(quantization.decode_unsigned(codes, SCALE))[1:] > 0)


@pytest.mark.parametrize("shape", [(), (300, 256), (3, 5, 8, 1)])
def test_the_hash_is_that_of_the_number_of_the_element(shape):
    for seed in (0, 0x85EBCA6B, 2**32 - 1):
        x = np.arange(math.prod(shape), dtype=np.uint64).reshape(shape) * 0x9E3779B1 + seed
        for shift, factor in ((16, 0x21F0AAAD), (15, 0x735A2D97)):
            x = x % 2**32
            x = (x ^ (x >> shift)) * factor
        x = x % 2**32
        found = quantization.random_bits(shape, jnp.uint32(seed))
        np.testing.assert_array_equal(found, x ^ (x >> 15))


ROWS = {  # shape: that of the scales
    (3, 256): (3,),
    (3, 300, 100): (3,),
    (2, 3, 512): (2, 3),
    (3, 3, 16, 32): (3, 3),
    (3, 255): (),
    (4, 3): (),
    (70_000,): (),
    (): (),
    (0, 300): (0,),
    (300, 0): (),
}


@pytest.mark.parametrize("shape", ROWS)
def test_each_row_has_its_maximum(shape):
    """A row is made of as few trailing axes as have 256 elements together."""
    x = np.abs(np.random.default_rng(0).normal(size=shape)).astype(np.float32)
    want = x.reshape(*ROWS[shape], -1).max(-1, initial=0) if x.size else np.zeros(ROWS[shape])
    found = quantization.row_max(jnp.asarray(x))
    assert found.shape == quantization.scale_shape(shape) == ROWS[shape]
    np.testing.assert_array_equal(found, want)


@pytest.mark.parametrize("kind", CODES)
@pytest.mark.parametrize("shape", [(2, 3, 512), ()])
def test_each_element_has_the_scale_of_its_row(kind, shape):
    """Scaled by a power of two, a row is its numbers, scaled; the codes are the same."""
    encode, decode, _ = CODES[kind]
    x = np.abs(np.random.default_rng(0).normal(size=shape)).astype(np.float32)
    noise = quantization.random_bits(shape, jnp.uint32(1)) & 0xFFFF
    scale = quantization.row_max(jnp.asarray(x))
    factors = np.float32(2.0) ** np.arange(scale.size).reshape(scale.shape)
    each = np.repeat(factors.reshape(-1), x.size // scale.size).reshape(shape)
    found = encode(jnp.asarray(x * each), scale * factors, noise)
    np.testing.assert_array_equal(found, encode(jnp.asarray(x), scale, noise))
    np.testing.assert_array_equal(
        decode(found, scale * factors), each * np.asarray(decode(found, scale))
    )


@pytest.mark.parametrize("moment_dtype", ["bfloat16", "int8"])
def test_moments_do_not_freeze(moment_dtype):
    """From far above, ν of gradients of 1 comes down to 1, a thousandth of the way at a step."""
    tx = optfn.scale_by_quantized_adam(0.9, 0.999, dtype=moment_dtype)
    params = jnp.zeros(2048)

    def many(g, state, steps):
        return jax.lax.scan(lambda s, _: (tx.update(g, s)[1], None), state, None, length=steps)[0]

    signs = jnp.where(jnp.arange(2048) % 2, 1.0, -1.0)
    state = jax.jit(many, static_argnums=2)(2 * signs, tx.init(params), 2000)
    state = jax.jit(many, static_argnums=2)(signs, state, 2000)
    nu = state.nu.astype(jnp.float32)
    if moment_dtype == "int8":
        nu = quantization.decode_unsigned(state.nu, state.nu_scale)
    expected = 4 * (1 - 0.999**2000) * 0.999**2000 + (1 - 0.999**2000)
    assert float(nu.mean()) == pytest.approx(expected, rel=0.02)


def matrix_of(tx):
    """Return the transform of a vector as a matrix of 20 rows."""

    def init(p):
        return tx.init(p.reshape(20, -1))

    def update(g, state, p):
        u, state = tx.update(g.reshape(20, -1), state, p.reshape(20, -1))
        return u.reshape(g.shape), state

    return optax.GradientTransformation(init, update)


# Every rule that keeps moments of the gradient, at a rate with which it comes near the target.
RULES = {
    "adam": lambda dtype: optfn.adam(0.02, moment_dtype=dtype),
    "momentum": lambda dtype: optfn.momentum(0.02, 0.9, moment_dtype=dtype),
    "lamb": lambda dtype: optfn.lamb(0.01, moment_dtype=dtype),
    "muon": lambda dtype: matrix_of(optfn.muon(0.02, moment_dtype=dtype)),
    "rmsprop": lambda dtype: optfn.rmsprop(0.01, momentum=0.5, moment_dtype=dtype),
    "adamax": lambda dtype: optfn.adamax(0.02, moment_dtype=dtype),
    "lars": lambda dtype: optfn.lars(1.0, 0.9, lars_coeff=0.02, moment_dtype=dtype),
    "adamw": lambda dtype: optfn.adamw(0.02, moment_dtype=dtype),
    "nesterov": lambda dtype: optfn.momentum(0.02, 0.9, nesterov=True, moment_dtype=dtype),
    "lamb_corrected": lambda dtype: optfn.lamb(0.01, bias_correction=True, moment_dtype=dtype),
}


@functools.cache
def noisy_least_squares(make, moment_dtype):
    """Return the parameters after 300 steps, from 0.1."""
    tx, n = make(moment_dtype), 700
    rng = np.random.default_rng(3)
    target = rng.normal(size=n).astype(np.float32)
    sizes = np.geomspace(1e-3, 1.0, n, dtype=np.float32)  # gradients of unlike size
    noise = (0.3 * rng.normal(size=(300, n))).astype(np.float32)

    def step(carry, eta):
        p, state = carry
        updates, state = tx.update(sizes * (p - target + eta), state, p)
        return (optax.apply_updates(p, updates), state), None

    @jax.jit
    def trained(start, noise):
        return jax.lax.scan(step, (start, tx.init(start)), noise)[0][0]

    return np.asarray(trained(np.full(n, 0.1, np.float32), noise))


@pytest.mark.parametrize("make", by_name(RULES, "adam", "lamb"))
@pytest.mark.parametrize(("moment_dtype", "bound"), [("bfloat16", 0.02), ("int8", 0.1)])
def test_small_moments_follow_float32(make, moment_dtype, bound):
    """The parameters stay near those of float32 moments."""
    wide, small = (noisy_least_squares(make, dtype) for dtype in (None, moment_dtype))
    assert 0 < np.linalg.norm(small - wide) < bound * np.linalg.norm(wide - 0.1)


TREE = {"w": (512, 300), "odd": (333, 77), "bias": (300,), "scalar": ()}


@pytest.mark.parametrize("name", RULES)
def test_bytes_of_each_rule(name):
    """A moment is 2 bytes, or 1 and a scale for each row; steps and rates are a few more."""
    moments = 2 if name in ("adam", "adamw", "adamax", "rmsprop", "lamb", "lamb_corrected") else 1
    size = 700 * 256
    for dtype, least, most in (("bfloat16", 2, 2), ("int8", 1, 1 + 4 / 256)):
        state = jax.eval_shape(RULES[name](dtype).init, jax.ShapeDtypeStruct((size,), "float32"))
        kept = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(state))
        assert moments * least * size <= kept <= moments * most * size + 64
    state = jax.eval_shape(RULES[name]("int8").init, jax.ShapeDtypeStruct((700, 256), "float32"))
    kept = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(state))
    assert moments * size <= kept <= moments * (1 + 4 / 256) * size + 64


IN_PLACE = {"adam": 2, "adamw": 2, "momentum": 1, "adamax": 2, "nesterov": 1, "rmsprop": 2}


# Bytes of temporaries a parameter. These keep their direction, an array, between two passes.
KEPT = {("rmsprop", "bfloat16"): 5.2, ("rmsprop", "int8"): 4.1, ("adamax", "int8"): 4.1}


@pytest.mark.optimized
@pytest.mark.parametrize("name", suite(IN_PLACE, "adam"))
@pytest.mark.parametrize(("moment_dtype", "most"), [("bfloat16", 2.005), ("int8", 1.05)])
def test_bytes_of_state_and_of_temporaries(name, moment_dtype, most):
    """Beside gradients that are given, most rules need less than half a byte a parameter."""
    params = {k: jax.ShapeDtypeStruct(shape, "float32") for k, shape in TREE.items()}
    tx, most = RULES[name](moment_dtype), most * IN_PLACE[name]
    count = sum(p.size for p in params.values())
    state = jax.eval_shape(tx.init, params)
    assert sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(state)) / count <= most
    step = optfn.make_train_step(
        lambda params, batch: 0.0, tx, value_and_grad=lambda params, grads: (jnp.zeros(()), grads)
    )
    compiled = step.compiled.lower(jax.eval_shape(step.init, params), params).compile()
    temporaries = compiled.memory_analysis().temp_size_in_bytes
    assert temporaries / count < KEPT.get((name, moment_dtype), 0.5)


def plain_muon(dtype):
    return optfn.muon(0.1, moment_dtype=dtype)


def test_complex_leaves_are_refused():
    for rule in (RULES["momentum"], RULES["rmsprop"], RULES["adamax"], plain_muon):
        with pytest.raises(TypeError, match=r"moment_dtype='int8' is not defined for complex.*'z'"):
            rule("int8").init({"z": jnp.ones((3, 3), jnp.complex64)})
    tx = optfn.adam(1e-3, moment_dtype="int8")
    with pytest.raises(TypeError, match="scale_by_quantized_adam is not defined for complex"):
        tx.init({"z": jnp.ones(3, jnp.complex64)})


def test_nan_of_any_bits_stays_nan_in_bfloat16():
    """All ones is the NaN of a GPU; the noise would carry them over into a zero."""
    bits = jnp.array([-1, 0x7FFFFFFF, 0x7F800001], jnp.int32)
    x = jax.lax.bitcast_convert_type(bits, jnp.float32)
    assert np.isnan(quantization.to_bfloat16(x, jnp.full(3, 0xFFFF, jnp.uint32))).all()
