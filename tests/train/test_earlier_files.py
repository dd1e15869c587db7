"""Files written by earlier versions load, and the next step is the one that was made then.

Those of `run_packed_…` are of commit f02a297, `int8_blocks….npz` of bd3bf3e, all others of 8f58b5b.

`checkpoints/<name>.npz` has the `state_dict` of an entry of the registry after two steps
("state/"), the params there ("params/") and after a third step ("after/"); `run_<name>.npz` is a
file of `save_checkpoint` after three steps of a run, `run_<name>_after.npz` the params after the
fourth.
"""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import registry
from grids import thinned

import optfn
from optfn.distributed import data_mesh, rescale_residuals, stack_stages

# Fields of these files that the state does not have any more.
RETIRED = dict.fromkeys(("rmsprop_centered", "skip_nonfinite"), "scale_by_momentum/velocity/")
FILES = Path(__file__).parents[1] / "checkpoints"
NAMES = sorted(p.stem for p in FILES.glob("*.npz") if p.stem in registry.EVERYTHING)


def tree(k):
    rng = np.random.default_rng(k)

    def normal(*shape):
        return jnp.asarray(rng.standard_normal(shape), jnp.float32)

    return {"a": {"w": normal(3, 4), "z": normal(4)}, "b": [normal(2, 2), normal()]}


def part(arrays, name):
    return {k.removeprefix(f"{name}/"): v for k, v in arrays.items() if k.startswith(f"{name}/")}


def test_there_are_files():
    assert len(NAMES) == 23


@pytest.mark.parametrize("name", thinned(NAMES, every=3))
def test_a_state_goes_on(name):
    with np.load(FILES / f"{name}.npz") as file:
        arrays = dict(file)
    entry = registry.EVERYTHING[name]
    tx, template = entry.make(), tree(0)
    structure = jax.tree.structure(template)
    params = structure.unflatten(map(jnp.asarray, part(arrays, "params").values()))
    mapping = part(arrays, "state")
    state = optfn.load_state_dict(tx.init(template), mapping)
    retired = {k for k in mapping if name in RETIRED and k.startswith(RETIRED[name])}
    assert len(retired) == (4 if name in RETIRED else 0)
    assert set(optfn.state_dict(state)) == set(mapping) - retired
    updates, _ = tx.update(tree(3), state, params, **dict(entry.extra))
    after = optfn.apply_updates(params, updates)
    for got, want in zip(jax.tree.leaves(after), part(arrays, "after").values(), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-6, atol=1e-7)


def loss_fn(params, batch):
    return jnp.mean((jnp.tanh(batch @ params["w"]) @ params["v"]) ** 2)


def compressing():
    with pytest.warns(UserWarning, match="little momentum remains"):
        return optfn.dgc_momentum(
            0.1, 0.9, rampup_begin_step=1, rampup_step=2, sparsity=(0.5, 0.9), min_size=16
        )


def summing():
    exchanging = optfn.distributed.exchange(optfn.distributed.top_k(0.25), min_size=1)
    return optfn.accumulate(optfn.chain(exchanging, optfn.momentum(0.1, 0.9)), 2)


RUNS = {
    "dgc": (compressing, lambda: {"mesh": data_mesh(4)}),
    "packed": (
        lambda: optfn.lamb(0.1, grad_clip=optfn.clip_by_norm(1.0)),
        lambda: {"packed": True},
    ),
    "guarded": (lambda: optfn.skip_nonfinite(optfn.adamw(0.01)), dict),
    # Buffers that are a worker's own are whole in these files.
    "packed_local": (
        lambda: optfn.adam(0.05),
        lambda: {"mesh": data_mesh(4), "packed": True, "local_steps": 2},
    ),
    "packed_int8": (
        lambda: optfn.adam(0.05, moment_dtype="int8"),
        lambda: {"mesh": data_mesh(4), "packed": True, "local_steps": 2},
    ),
    "packed_sums": (summing, lambda: {"mesh": data_mesh(4), "packed": True}),
    "packed_dgc": (compressing, lambda: {"mesh": data_mesh(4), "packed": True}),
}


def begun(name):
    make, options = RUNS[name]
    step = optfn.make_train_step(loss_fn, make(), **options())
    return step, step.init({"w": np.zeros((6, 8), np.float32), "v": np.zeros((8, 2), np.float32)})


@pytest.mark.parametrize("name", RUNS)
def test_a_run_goes_on(name):
    step, template = begun(name)
    state, history = optfn.load_checkpoint(FILES / f"run_{name}.npz", template)
    assert int(state.step) == 3 * step.local_steps and history["loss"].shape == (3,)
    state, _ = step(state, np.random.default_rng(3).standard_normal((8, 6)).astype(np.float32))
    params = optfn.unpack(state.params)
    with np.load(FILES / f"run_{name}_after.npz") as want:
        for key in want.files:
            np.testing.assert_allclose(params[key], want[key], rtol=1e-5, atol=1e-6)


def levels(codes, start):
    """Return the fraction of the scale that each 8-bit code stands for; see `codes.Code`."""
    numbers = [(1 + k % 8 / 8) * 2.0 ** (k // 8 + start) - 2.0**start for k in range(codes)]
    return np.array(numbers) / numbers[-1]


SIGNED = np.concatenate([-levels(128, -16)[:0:-1], levels(128, -16)])
UNSIGNED = levels(256, -32)
# The shapes of leaves, and of the scales of their rows.
LEAVES = {
    "matrix": (3, 300),
    "kernel": (2, 3, 100),
    "vector": (1100,),
    "small": (3, 4),
    "scalar": (),
}
SCALES = {"matrix": (3,), "kernel": (2,), "vector": (), "small": (), "scalar": ()}


def numbers_of_blocks(codes, scales):
    """Return what codes stand for, with a scale for each 256 elements."""
    table, zero = (SIGNED, 127) if codes.dtype == np.int8 else (UNSIGNED, 0)
    each = np.repeat(scales.astype(np.float64), 256)[: codes.size]
    return table[codes.astype(int) + zero] * each.reshape(codes.shape)


def numbers_of_rows(codes, scales):
    """Return what codes stand for, and the scale of each."""
    table, zero = (SIGNED, 127) if codes.dtype == np.int8 else (UNSIGNED, 0)
    each = np.repeat(scales.astype(np.float64).reshape(-1), codes.size // scales.size)
    return table[codes.astype(int) + zero] * each.reshape(codes.shape), each.reshape(codes.shape)


def check_nearest(found, each, want, has_sign):
    """A code is within half its step: a sixteenth of its number, below the smallest of the scale.

    The smallest positive code of a magnitude alone stands for all below it, but for 0.
    """
    smallest = each * (2.0**-19 if has_sign else 2.0**-35)
    assert np.all(np.abs(found - want) <= np.maximum(np.abs(want) / 15.9, smallest / 7.9))
    assert has_sign or np.array_equal(found == 0, want == 0)


def test_8_bit_moments_with_scales_of_blocks_load():
    with np.load(FILES / "int8_blocks.npz") as file:
        arrays = dict(file)
    tx, state = optfn.adamw(0.1, moment_dtype="int8"), part(arrays, "state")
    params = {k: jnp.asarray(x) for k, x in part(arrays, "params").items()}
    assert {k: x.shape for k, x in params.items()} == LEAVES
    template = tx.init(params)
    loaded = optfn.load_state_dict(template, state)
    again = optfn.state_dict(loaded)
    for moment in ("mu", "nu"):
        for path, shape in SCALES.items():
            code, scale = (f"scale_by_int8_adam/{x}/{path}" for x in (moment, f"{moment}_scale"))
            assert again[scale].shape == shape
            before = numbers_of_blocks(state[code], state[scale])
            found, each = numbers_of_rows(again[code], again[scale])
            check_nearest(found, each, before, moment == "mu")
            assert np.all(each >= np.repeat(state[scale], 256)[: each.size].reshape(each.shape))
    rng = np.random.default_rng(3)
    grads = {
        k: jnp.asarray(rng.standard_normal(s) * np.exp(rng.normal(size=s)), jnp.float32)
        for k, s in LEAVES.items()
    }
    after = optfn.apply_updates(params, jax.jit(tx.update)(grads, loaded, params)[0])
    for path, want in part(arrays, "after").items():
        step = np.linalg.norm(want - params[path])
        assert np.linalg.norm(after[path] - want) < 0.1 * step  # other codes round at random
    # A state of this version does not change, and what does not fit is still an error.
    twice = optfn.state_dict(optfn.load_state_dict(template, again))
    assert all(np.array_equal(twice[k], again[k]) for k in again)
    with pytest.raises(ValueError, match="mu/matrix"):
        optfn.load_state_dict(template, state | {"scale_by_int8_adam/mu/matrix": np.zeros((3, 4))})


@pytest.mark.parametrize("workers", [4, 2])
def test_8_bit_moments_of_each_worker_with_scales_of_blocks_load(workers):
    """With another number of workers, the mean of the numbers of the four that were saved."""
    with np.load(FILES / "int8_blocks_local.npz") as file:
        mapping = part(dict(file), "state")
    step = optfn.make_train_step(
        lambda p, x: jnp.sum(p["w"]) + jnp.sum(p["z"]), optfn.adam(0.05, moment_dtype="int8"),
        mesh=data_mesh(workers), local_steps=2,
    )  # fmt: skip
    template = step.init({"w": np.ones((2, 300), np.float32), "z": np.ones(600, np.float32)})
    saved = mapping if workers == 4 else rescale_residuals(mapping, workers)
    again = optfn.state_dict(optfn.load_state_dict(template, saved))
    for moment in ("mu", "nu"):
        for path, shape in (("w", (2, 300)), ("z", (600,))):
            field = "inner/scale_by_int8_adam"
            names = f"{field}/{moment}/{path}", f"{field}/{moment}_scale/{path}"
            codes, scales = (mapping[name].reshape(4, -1) for name in names)
            want = np.stack(
                [numbers_of_blocks(*x) for x in zip(codes, scales, strict=True)]
            ).reshape(4, *shape)
            codes, scales = (again[name].reshape(workers, -1) for name in names)
            assert scales.shape == (workers, 2 if path == "w" else 1)
            for k in range(workers):
                found, each = numbers_of_rows(codes[k].reshape(shape), scales[k])
                if workers == 4:
                    check_nearest(found, each, want[k], moment == "mu")
                else:  # each is rounded, and then their mean
                    error = np.abs(found - want.mean(0))
                    assert np.all(error <= np.abs(want).mean(0) / 7.9 + each * 2.0**-19)


def test_residuals_of_an_earlier_file_are_rescaled():
    """It does not list what is a worker's own."""
    with np.load(FILES / "run_dgc.npz") as file:
        mapping = dict(file)
    assert "per_worker" not in mapping
    rescaled = rescale_residuals(mapping, 2)
    (key,) = (k for k in mapping if k.endswith("residual/w"))
    mean = mapping[key].reshape(4, -1).mean(0)
    np.testing.assert_allclose(rescaled[key].reshape(2, -1), [mean, mean], rtol=1e-6)


def test_the_state_of_stacked_stages_goes_on():
    with np.load(FILES / "stacked.npz") as file:
        arrays = dict(file)
    tx = optfn.adam(0.1)
    params = stack_stages([{"w": jnp.asarray(w)} for w in arrays["params/w"]])
    state = optfn.load_state_dict(tx.init(params), part(arrays, "state"))
    updates, _ = tx.update(jax.tree.map(jnp.sin, params), state, params)
    after = optfn.apply_updates(params, updates)
    np.testing.assert_allclose(after["w"], arrays["after/w"], rtol=1e-6, atol=1e-7)


def test_asgd_of_one_batch_ignores_the_gradients_that_it_kept():
    """An earlier state had the step and a gradient; now the state of one batch has no arrays."""
    params, tx = tree(0), optfn.asgd(0.1)
    state = tx.init(params)
    kept = optfn.state_dict(optfn.asgd(0.1, batch_num=2).init(params))
    earlier = {k: v[:1] if "/gradients/" in k else v for k, v in kept.items()}
    assert {k.split("/")[1] for k in earlier if "asgd" in k} == {"step", "gradients"}
    loaded = optfn.load_state_dict(state, earlier)
    assert jax.tree.structure(loaded) == jax.tree.structure(state)
    assert not any("asgd" in k for k in optfn.state_dict(loaded))
