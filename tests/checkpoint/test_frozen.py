"""Checkpoints without the params that are not trained: resume, refusals, and adapters on a base."""

import chex
import jax.numpy as jnp
import numpy as np
import pytest
from grids import suite

import optfn
from optfn.distributed import data_mesh

X = np.random.default_rng(0).normal(size=(6, 8, 64)).astype(np.float32)
FROZEN = {"base/.*": optfn.ParamAttr(trainable=False)}


def make_params(seed=1, dtype=jnp.float32):
    random = np.random.default_rng(seed)
    return {
        "base": {k: jnp.asarray(random.normal(size=(64, 64)) / 8, dtype) for k in ("u", "w")},
        "lora": {
            "a": jnp.asarray(random.normal(size=(64, 2)), jnp.float32),
            "b": jnp.zeros((2, 64)),
        },
    }


def loss_fn(params, x):
    base, lora = params["base"], params["lora"]
    return jnp.mean((jnp.tanh(x @ base["u"]) @ (base["w"] + lora["a"] @ lora["b"]) - 1.0) ** 2)


def make_optimizer(param_attrs=FROZEN):
    return optfn.adam(0.01, param_attrs=param_attrs)


def run(directory, params=None, batches=X, **options):
    return optfn.minimize(
        loss_fn, make_optimizer(), make_params() if params is None else params, batches,
        checkpoint=directory, **{"progress": False, "save_frozen": False} | options,
    )  # fmt: skip


LAYOUTS = {
    "one device": {},
    "packed": {"packed": True},
    "FSDP": {"mesh": data_mesh(), "shard": "params"},
}


def test_a_file_has_the_names_that_are_trained(tmp_path):
    run(tmp_path / "part")
    run(tmp_path / "whole", save_frozen=True)
    part, whole = (np.load(next((tmp_path / k).glob("*6.npz"))) for k in ("part", "whole"))
    frozen = {"train/params/base/u", "train/params/base/w"}
    assert set(whole) - set(part) == frozen
    assert set(part) - set(whole) == {"history/frozen_checksums"}
    same = set(part) & set(whole) - {"dtypes"}
    assert all(np.array_equal(part[name], whole[name]) for name in same)


@pytest.mark.parametrize("layout", suite(LAYOUTS, "FSDP"))
def test_another_base_is_refused_by_name(tmp_path, layout):
    run(tmp_path, batches=X[:3], **LAYOUTS[layout])
    other = make_params()
    other["base"]["w"] = other["base"]["w"].at[3, 5].add(1e-6)
    with pytest.raises(ValueError, match=r"'params/base/w' of your params are not those"):
        run(tmp_path, other, **LAYOUTS[layout])
    with pytest.raises(ValueError, match=r"'params/base/u', 'params/base/w' of your params"):
        run(tmp_path, make_params(dtype=jnp.bfloat16), **LAYOUTS[layout])


@pytest.mark.filterwarnings("ignore:.*carried over")
def test_load_params_merges_adapters_into_their_base(tmp_path):
    state, _ = run(tmp_path)
    chex.assert_trees_all_equal(optfn.load_params(tmp_path, make_params()), state.params)
    with pytest.raises(ValueError, match=r"'params/base/u', 'params/base/w' of your params"):
        optfn.load_params(tmp_path, make_params(seed=2))
    step = optfn.make_train_step(loss_fn, make_optimizer())
    other, history = optfn.restore_checkpoint(
        tmp_path, step.init(make_params(seed=2)), only="params/lora/.*"
    )
    chex.assert_trees_all_equal(other.params["lora"], state.params["lora"])
    chex.assert_trees_all_equal(other.params["base"], make_params(seed=2)["base"])
    assert "frozen_checksums" not in history


@pytest.mark.filterwarnings("ignore:.*carried over")
def test_a_base_thaws(tmp_path):
    state, _ = run(tmp_path)
    step = optfn.make_train_step(loss_fn, make_optimizer(None))
    found, _ = optfn.restore_checkpoint(tmp_path, step.init(make_params()), strict=False)
    chex.assert_trees_all_equal(found.params, state.params)
    assert int(found.step) == 6


def test_the_best_state_is_kept_without_its_base(tmp_path):
    values = iter([3.0, 1.0, 2.0, 2.0, 2.0, 2.0])
    run(tmp_path, evaluate=lambda params: next(values), evaluate_every=1, keep_best=True)
    assert "train/params/base/w" not in np.load(next((tmp_path / "best").glob("*2.npz")))


def test_a_loop_of_your_own_names_its_optimizer(tmp_path):
    tx = make_optimizer()
    step = optfn.make_train_step(loss_fn, tx)
    state, _ = step(step.init(make_params()), X[0])
    for sharded in (False, True):
        directory = tmp_path / str(sharded)
        optfn.save_checkpoint(directory, state, save_frozen=False, tx=tx, sharded=sharded)
        found, history = optfn.restore_checkpoint(directory, step.init(make_params()))
        chex.assert_trees_all_equal(found, state)
        assert history == {}
    plain = optfn.sgd(0.1)  # freezes nothing
    optfn.save_checkpoint(tmp_path / "all", state, save_frozen=False, tx=plain)
    assert "train/params/base/w" in np.load(next((tmp_path / "all").glob("*.npz")))
    with pytest.raises(ValueError, match="save_frozen=False needs tx"):
        optfn.save_checkpoint(tmp_path, state, save_frozen=False)
    with pytest.raises(TypeError, match="save_frozen=False takes a TrainState"):
        optfn.save_checkpoint(tmp_path, {"step": state.step}, save_frozen=False, tx=tx)
    with pytest.raises(TypeError, match="save_frozen must be True or False"):
        run(tmp_path, save_frozen="base")
