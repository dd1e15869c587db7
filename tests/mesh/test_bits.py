"""The dtypes of saved arrays: numbers read into another dtype are the same, or refused."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from grids import suite

import optfn

FLOATS = ["float8_e4m3fn", "float8_e5m2", "float16", "bfloat16", "float32"]
INTEGERS = ["int4", "int8", "uint8", "int16", "uint16", "int32", "uint32"]
PAIRS = [(a, b) for a in FLOATS + INTEGERS for b in FLOATS + INTEGERS]
NUMBERS = np.array([1.0, 2.5, 3.0, 0.5, 0.0, 4.0, 2.0, 7.0])  # exact in all floats
MESH = optfn.distributed.data_mesh()


def by_dict(directory, saved, like):
    return optfn.load_state_dict(like, optfn.state_dict(saved))


def by_numpy(directory, saved, like):
    np.savez(directory / "saved.npz", **optfn.state_dict(saved))
    with np.load(directory / "saved.npz") as file:
        return optfn.load_state_dict(like, file)


def by_file(directory, saved, like, sharded=False):
    if sharded:
        pytest.importorskip("orbax.checkpoint")
    optfn.save_checkpoint(directory, saved, step=1, sharded=sharded, background=False)
    return optfn.restore_checkpoint(directory, like)[0]


def by_directory(directory, saved, like):
    return by_file(directory, saved, like, sharded=True)


WAYS = {"dict": by_dict, "np.load": by_numpy, "file": by_file, "directory": by_directory}
CASES = [(way, *pair) for way in WAYS for pair in PAIRS]
SUITE = [
    ("dict", "bfloat16", "float32"), ("np.load", "float8_e5m2", "float32"),
    ("file", "bfloat16", "float32"), ("file", "float8_e4m3fn", "bfloat16"),
    ("file", "uint16", "bfloat16"), ("file", "int4", "int8"), ("file", "float32", "bfloat16"),
    ("directory", "bfloat16", "float32"), ("directory", "uint16", "bfloat16"),
    ("np.load", "bfloat16", "int32"),
]  # fmt: skip


@pytest.mark.parametrize(("way", "before", "after"), suite(CASES, *SUITE))
def test_numbers_stay_or_are_refused(way, before, after, tmp_path):
    numbers = NUMBERS if before in FLOATS else NUMBERS // 1
    saved, like = {"w": jnp.asarray(numbers, before)}, {"w": jnp.zeros(8, after)}
    if before in FLOATS and after in INTEGERS:
        with pytest.raises(ValueError, match=rf"'w' has dtype {before}, but .* has {after}"):
            WAYS[way](tmp_path, saved, like)
        return
    found = WAYS[way](tmp_path, saved, like)["w"]
    assert found.dtype == after
    np.testing.assert_array_equal(np.asarray(found, np.float64), numbers)


@pytest.mark.parametrize(
    ("number", "before", "after"),
    [
        (70_000, "int32", "int16"), (300, "int32", "int8"), (-1, "int32", "uint32"),
        (2**24 + 1, "int32", "float32"), (9, "int8", "int4"), (257, "int32", "bfloat16"),
        (7e4, "float32", "float16"), (500.0, "float32", "float8_e4m3fn"),
        (8.0, "float32", "float4_e2m1fn"),
    ],
)  # fmt: skip
def test_numbers_that_do_not_fit_are_refused(number, before, after):
    saved = optfn.state_dict({"a": {"w": jnp.full(3, number, before)}, "b": jnp.ones(2)})
    with pytest.raises(ValueError, match=f"'a/w' has {number} in {before}.* {after} cannot hold"):
        optfn.load_state_dict({"a": {"w": jnp.zeros(3, after)}, "b": jnp.zeros(2)}, saved)


def test_counters_of_64_bits_are_refused_with_32():
    saved = {"n": np.array([3_000_000_000])}
    with pytest.raises(ValueError, match="'n' has 3000000000 in int64"):
        optfn.load_state_dict({"n": jnp.zeros(1, jnp.int32)}, saved)


def test_floats_are_rounded_and_what_is_not_finite_stays():
    numbers = np.array([1 / 3, 65519.0, np.inf, -np.inf, np.nan, 1e-30], np.float32)
    like = {"w": jnp.zeros(6, jnp.float16)}
    found = optfn.load_state_dict(like, {"w": numbers})["w"]
    np.testing.assert_array_equal(found, numbers.astype(np.float16))


def test_bits_without_the_list_of_dtypes_are_read_only_as_the_dtype_of_the_template():
    saved = optfn.state_dict({"w": jnp.asarray([1.0, -2.5], jnp.bfloat16)})
    del saved["dtypes"]
    found = optfn.load_state_dict({"w": jnp.zeros(2, jnp.bfloat16)}, saved)
    np.testing.assert_array_equal(np.asarray(found["w"], float), [1.0, -2.5])
    with pytest.raises(ValueError, match="'w' has 2 bytes for each number and nothing names"):
        optfn.load_state_dict({"w": jnp.zeros(2)}, saved)


def test_a_list_of_dtypes_that_does_not_fit_is_refused():
    saved = optfn.state_dict({"w": jnp.ones(2, jnp.bfloat16)})
    saved["w"] = saved["w"].astype(np.uint8)
    with pytest.raises(ValueError, match="'w' is uint8, but the list of dtypes says bfloat16"):
        optfn.load_state_dict({"w": jnp.zeros(2)}, saved)


def square(w, x):
    return jnp.mean((x @ w["w"].astype(jnp.float32)) ** 2)


LAYOUTS = {"one device": {}, "packed": {"packed": True}, "mesh": {"mesh": MESH, "shard": "params"}}
X = np.random.default_rng(0).normal(size=(8, 8)).astype(np.float32)


@pytest.mark.parametrize("layout", suite(LAYOUTS, "packed"))
def test_bfloat16_params_go_on_in_float32(layout, tmp_path):
    before = optfn.make_train_step(square, optfn.sgd(0.0))
    saved, like = {"w": jnp.asarray(NUMBERS, jnp.bfloat16)}, {"w": jnp.zeros(8)}
    optfn.save_checkpoint(tmp_path, before.init(saved), background=False)
    np.testing.assert_array_equal(optfn.load_params(tmp_path, like)["w"], NUMBERS)
    options = LAYOUTS[layout]
    state, _ = optfn.minimize(
        square, optfn.sgd(0.0), like, [X, X], checkpoint=tmp_path, progress=False, **options
    )
    assert int(state.step) == 2
    np.testing.assert_array_equal(optfn.unpack(state.params)["w"], NUMBERS)


@pytest.mark.parametrize(("before", "after"), [("bfloat16", None), (None, "bfloat16")])
def test_moments_go_on_in_another_dtype(before, after):
    first = optfn.make_train_step(square, optfn.adam(0.01, moment_dtype=before))
    state = first.init({"w": jnp.asarray(NUMBERS, jnp.float32)})
    for _ in range(3):
        state, _ = first(state, X)
    moments = state.opt_state[0]
    second = optfn.make_train_step(square, optfn.adam(0.01, moment_dtype=after))
    found = optfn.load_state_dict(second.init({"w": jnp.zeros(8)}), optfn.state_dict(state))
    for name in ("mu", "nu"):
        want, got = (getattr(x, name)["w"] for x in (moments, found.opt_state[0]))
        assert got.dtype == jnp.dtype(after or "float32")
        np.testing.assert_allclose(np.float64(got), np.float64(want), rtol=2**-8)


@pytest.mark.parametrize("form", ["float32", 32, 24])
def test_masters_beside_params_of_another_dtype(form):
    """A run in float16 with masters goes on in bfloat16, whatever the form of the masters."""
    before = optfn.master_weights(optfn.sgd(0.1))
    params = {"w": jnp.asarray([1 / 3, -2 / 7], jnp.float16)}
    state = optfn.make_train_step(square, before).init(params)
    bits = {} if form == "float32" else {"bits": form}
    after = optfn.make_train_step(square, optfn.master_weights(optfn.sgd(0.1), **bits))
    template = after.init({"w": jnp.zeros(2, jnp.bfloat16)})
    found = optfn.load_state_dict(template, optfn.state_dict(state))
    want = np.asarray(params["w"], np.float32)
    assert found.params["w"].dtype == jnp.bfloat16
    np.testing.assert_allclose(np.float32(found.params["w"]), want, rtol=2**-8)
    again = optfn.make_train_step(square, optfn.master_weights(optfn.sgd(0.1)))
    copies = optfn.load_state_dict(again.init(found.params), optfn.state_dict(found))
    masters = [x for x in jax.tree.leaves(copies.opt_state) if x.shape == (2,)]
    np.testing.assert_allclose(masters[0], want, rtol=2**-15)
