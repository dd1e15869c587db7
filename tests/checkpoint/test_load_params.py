"""`load_params`: a part of a model, the average that was judged best, the model state."""

import itertools
import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from grids import suite

import optfn
from optfn.distributed import data_mesh

X = np.random.default_rng(0).normal(size=(8, 16, 8)).astype(np.float32)
PARAMS = {"student": {"w": jnp.full((8, 8), 0.1)}, "head": jnp.ones(8)}
STATE = {"mean": jnp.zeros(8), "count": jnp.zeros((), jnp.int32)}


def loss(params, state, x):
    h = x @ params["student"]["w"]
    new = {"mean": 0.9 * state["mean"] + 0.1 * jnp.mean(h, 0), "count": state["count"] + 1}
    return jnp.mean((h @ params["head"] - 1.0) ** 2), jax.lax.stop_gradient(new)


AVERAGES = {
    "ema": lambda: optfn.chain(optfn.adam(0.05), optfn.exponential_moving_average(0.8)),
    "window": lambda: optfn.chain(optfn.adam(0.05), optfn.model_average(1.0)),
    "in accumulate": lambda: optfn.accumulate(
        optfn.chain(optfn.adam(0.05), optfn.exponential_moving_average(0.8)), 2
    ),
    "frozen": lambda: optfn.chain(
        optfn.adam(0.05, param_attrs={"head": optfn.ParamAttr(trainable=False)}),
        optfn.exponential_moving_average(0.8),
    ),
}
WAYS = {"file": {}, "directory": {"shard": "params"}}


def run(directory, tx, **options):
    if "shard" in options:
        options["mesh"] = data_mesh()
    seen = []

    def evaluate(params, state):
        # A copy of what is judged; the second evaluation is the best.
        seen.append(jax.device_get((params, state)))
        return abs(len(seen) - 2.0)

    state, _ = optfn.minimize(
        loss, tx, PARAMS, X, model_state=STATE, progress=False, checkpoint=directory,
        evaluate=evaluate, evaluate_every=2, evaluate_average=True, keep_best=True, **options,
    )  # fmt: skip
    return state, seen


def assert_same(a, b):
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-6, atol=1e-7), a, b)


@pytest.mark.parametrize(
    "kind, way",
    suite(
        itertools.product(AVERAGES, WAYS),
        *(("window", "file"), ("frozen", "directory")),
    ),
)
def test_the_average_that_was_judged_best(kind, way, tmp_path):
    _, seen = run(tmp_path, AVERAGES[kind](), **WAYS[way])
    # The newest checkpoint of a run has a history beside its state; the best has none.
    assert_same(optfn.load_params(tmp_path, PARAMS, average=True), seen[-1][0])
    best = tmp_path / "best"
    assert_same(optfn.load_params(best, PARAMS, average=True), seen[1][0])
    assert_same(optfn.load_params(best, PARAMS, average=True, model_state=STATE), seen[1])


def test_model_state_without_an_average(tmp_path):
    run(tmp_path, AVERAGES["ema"]())
    params, model_state = optfn.load_params(tmp_path, PARAMS, model_state=STATE)
    last = optfn.restore_checkpoint(tmp_path, optfn.make_train_step(
        loss, AVERAGES["ema"](), model_state=True, average_model_state=True
    ).init(PARAMS, STATE))[0]  # fmt: skip
    assert_same(params, last.params)
    assert_same(model_state, last.model_state)
    assert int(model_state["count"]) == len(X)


@pytest.mark.parametrize("average", [False, True])
def test_a_part_of_a_model(average, tmp_path):
    run(tmp_path, AVERAGES["ema"]())
    whole = optfn.load_params(tmp_path, PARAMS, average=average)
    part = optfn.load_params(
        tmp_path, {"student": {"w": jnp.zeros((8, 8))}}, only="student/.*", average=average
    )
    assert_same(part, {"student": whole["student"]})
    rest = {"student": {"w": jnp.zeros((8, 8))}, "head": jnp.full(8, 7.0)}
    found = optfn.load_params(tmp_path, rest, only="student/w", average=average)
    assert_same(found, {"student": whole["student"], "head": rest["head"]})


ERRORS = {
    "nothing": ({"only": "teacher/.*"}, "only='teacher/.*' matches no path of params; it has"),
    "a part": ({}, "not expected 'params/head'.*pass only="),
    "no average": ({"average": "model_average", "only": "student/.*"}, "it has none"),
}


@pytest.mark.parametrize("kind", ERRORS)
def test_what_cannot_be_loaded_is_an_error(kind, tmp_path):
    run(tmp_path, AVERAGES["ema"]())
    options, words = ERRORS[kind]
    with pytest.raises(ValueError, match=words):
        optfn.load_params(tmp_path, {"student": {"w": jnp.zeros((8, 8))}}, **options)


def test_restoring_what_the_template_does_not_have_is_an_error(tmp_path):
    """The names of a TrainState are not those of a dict of params: nothing would be loaded."""
    run(tmp_path, AVERAGES["ema"]())
    template = {"params": {"student": {"w": jnp.zeros((8, 8))}}}
    words = r"no name of the template.*load_params\(path, params, only=\)"
    with pytest.raises(ValueError, match=words) as caught:
        optfn.restore_checkpoint(tmp_path, template, only="params/student/.*")
    assert re.fullmatch("ValueError", type(caught.value).__qualname__)
    assert type(caught.value).__module__ == "builtins"


def test_params_of_one_of_several_states_need_a_template_of_the_tree(tmp_path):
    step = optfn.make_train_step(lambda p, x: jnp.sum(p["w"] * x), optfn.sgd(0.1))
    states = {
        name: step.init({"w": jnp.full(3, x)}) for name, x in (("actor", 1.0), ("critic", 2.0))
    }
    path = optfn.save_checkpoint(tmp_path, states, step=1)
    with pytest.raises(ValueError, match=r"has the states 'actor', 'critic' of a tree.*actor/"):
        optfn.load_params(path, {"w": jnp.zeros(3)})
    like = {"actor": step.init({"w": jnp.zeros(3)})}
    with pytest.warns(UserWarning, match="carried over"):
        found, _ = optfn.restore_checkpoint(tmp_path, like, only="actor/.*")
    np.testing.assert_array_equal(found["actor"].params["w"], np.ones(3))


def test_a_pattern_without_a_name_says_which_names_there_are(tmp_path):
    step = optfn.make_train_step(lambda p, x: jnp.sum(p["w"] * x), optfn.sgd(0.1))
    states = {name: step.init({"w": jnp.ones(3)}) for name in ("actor", "critic")}
    optfn.save_checkpoint(tmp_path / "tree", states, step=1)
    with pytest.raises(ValueError, match=r"matches no name in .*it has .*'actor/train/params/w'"):
        optfn.restore_checkpoint(tmp_path / "tree", states, only="actor/params/.*")
    optfn.save_checkpoint(tmp_path / "arrays", {"x": jnp.ones(3)}, step=1)
    with pytest.raises(ValueError, match=r"matches no name in .*; it has 'x'"):
        optfn.load_params(tmp_path / "arrays", {"w": jnp.ones(3)})


@pytest.mark.parametrize("tree", [{}, {"opt": optax.sgd(0.1).init(jnp.ones(3))}])
def test_a_tree_without_arrays_comes_back(tree, tmp_path):
    optfn.save_checkpoint(tmp_path, tree, step=1)
    assert optfn.restore_checkpoint(tmp_path, tree)[0] == tree


@pytest.mark.parametrize(
    "x, words",
    [
        (np.int64(2**40), "1099511627776 in int64, which the template's int32 cannot hold"),
        (np.array([1e300]), "the template's float32 cannot hold without jax_enable_x64"),
    ],
)
def test_numbers_that_jax_would_cut_are_not_restored(x, words, tmp_path):
    optfn.save_checkpoint(tmp_path, {"x": x}, step=1)
    with pytest.raises(ValueError, match=words):
        optfn.restore_checkpoint(tmp_path, {"x": x})


@pytest.mark.parametrize("x", [np.datetime64("2020-01-01"), np.str_("a"), np.longdouble(1)])
def test_scalars_that_jax_lacks_are_not_saved(x, tmp_path):
    with pytest.raises(TypeError, match=r"state 'x' has dtype .*, which JAX does not have"):
        optfn.save_checkpoint(tmp_path, {"x": x}, step=1)


@pytest.mark.parametrize(
    "label, sharded",
    [*((name, False) for name in ("params", "history", "model_state", "step")), ("params", True)],
)
def test_a_label_may_be_the_name_of_a_field(label, sharded, tmp_path):
    params = {"a": jnp.arange(3.0), "b": jnp.ones(2)}
    parts = {label: optfn.adam(0.1), "rest": optfn.sgd(0.1)}
    tx = optax.partition(parts, {"a": label, "b": "rest"})
    step = optfn.make_train_step(lambda p, x: jnp.sum(p["a"] * x) + jnp.sum(p["b"]), tx)
    state, _ = step(step.init(params), jnp.float32(2))
    optfn.save_checkpoint(tmp_path, state, {"loss": np.ones(1)}, sharded=sharded)
    found, history = optfn.restore_checkpoint(tmp_path, step.init(params))
    chex.assert_trees_all_equal(jax.device_get(found), jax.device_get(state))
    assert [*history] == ["loss"]
    chex.assert_trees_all_equal(
        *jax.device_get((optfn.load_params(tmp_path, params), state.params))
    )
    only = r"params/.*"
    with pytest.warns(UserWarning, match=rf"opt_state/{label}/|{label}/scale_by_adam"):
        part, _ = optfn.restore_checkpoint(tmp_path, step.init(params), only=only)
    assert not int(jax.tree.leaves(part.opt_state)[0])


def test_one_of_two_averages_of_a_kind(tmp_path):
    fast, slow = (optfn.exponential_moving_average(decay) for decay in (0.5, 0.9))
    step = optfn.make_train_step(
        lambda p, x: jnp.sum(p["a"] * x), optfn.chain(optfn.sgd(0.1), fast, slow)
    )
    state = step.init({"a": jnp.ones(3)})
    for x in range(3):
        state, _ = step(state, jnp.float32(x))
    optfn.save_checkpoint(tmp_path, state)
    second = "exponential_moving_average_2"
    with pytest.raises(ValueError, match=f"must tell one average .*'{second}'"):
        optfn.load_params(tmp_path, state.params, average=True)
    found = [
        optfn.load_params(tmp_path, state.params, average=name)["a"]
        for name in (second.removesuffix("_2"), second)
    ]
    params = np.array([1.0, 1 - 0.1, 1 - 0.3])  # after each step
    for value, decay in zip(found, (0.5, 0.9), strict=True):
        weights = decay ** np.arange(2, -1, -1)
        np.testing.assert_allclose(value, np.average(params, weights=weights), rtol=1e-6)


@pytest.mark.parametrize("only", [None, "student/.*"])
def test_packed_params_are_loaded_by_their_paths(only, tmp_path):
    tx, params = AVERAGES["ema"](), {"student": {"w": jnp.ones((4, 4))}, "head": jnp.ones(4)}
    state, _ = optfn.minimize(
        lambda p, x: jnp.mean((x @ p["student"]["w"] @ p["head"]) ** 2), tx, params, X[:, :, :4],
        packed=True, checkpoint=tmp_path, progress=False,
    )  # fmt: skip
    found = optfn.unpack(optfn.load_params(tmp_path, state.params, average=True, only=only))
    average = optfn.unpack(optfn.averaged_params(state.opt_state, state.params))
    np.testing.assert_array_equal(found["student"]["w"], average["student"]["w"])
    whole = optfn.load_params(tmp_path, state.params, only=only)
    chex.assert_trees_all_equal(optfn.unpack(whole), optfn.unpack(state.params))


def test_the_average_of_a_model_state_that_is_one_array(tmp_path):
    def loss(w, mean, x):
        return jnp.mean((w - x) ** 2), 0.5 * mean + x

    state, _ = optfn.minimize(
        loss, AVERAGES["ema"](), jnp.ones(8), X[:, 0], model_state=jnp.zeros(8), progress=False,
        evaluate=lambda w, mean: 0.0, evaluate_every=1, evaluate_average=True, checkpoint=tmp_path,
    )  # fmt: skip
    found = optfn.load_params(tmp_path, jnp.ones(8), average=True, model_state=jnp.zeros(8))
    assert np.max(np.abs(found[1] - state.model_state)) > 1e-3


def test_frozen_params_of_numpy_are_those_that_the_run_began_with(tmp_path):
    params = {"base": np.ones(3), "head": np.ones(3)}
    tx = optfn.sgd(0.1, param_attrs={"base": optfn.ParamAttr(trainable=False)})
    optfn.minimize(
        lambda p, x: jnp.mean((p["base"] * p["head"] - x) ** 2), tx, params, X[:, 0, :3],
        checkpoint=tmp_path, save_frozen=False, progress=False,
    )  # fmt: skip
    found = optfn.load_params(tmp_path, params)
    np.testing.assert_array_equal(found["base"], params["base"])


@pytest.mark.parametrize("name", ["file", "allow_pickle"])
def test_any_name_may_stand_at_the_top_of_a_tree(name, tmp_path):
    optfn.save_checkpoint(tmp_path, {name: jnp.ones(2, jnp.bfloat16)}, step=1, sharded=False)
    found, _ = optfn.restore_checkpoint(tmp_path, {name: jnp.zeros(2, jnp.bfloat16)})
    np.testing.assert_array_equal(found[name], np.ones(2))


@pytest.mark.parametrize("kind", ["states", "arrays", "scalar"])
def test_states_that_are_not_finite_are_marked_in_every_tree(kind, tmp_path):
    step = optfn.make_train_step(lambda p, x: jnp.sum(p) * x, optfn.adam(0.1))

    def tree(value, n):
        p = jnp.full(() if kind == "scalar" else 3, value)
        state = step.init(jnp.zeros_like(p))._replace(params=p, step=jnp.int32(n))
        other = step.init(jnp.ones(3))
        arrays = {"params": {"w": p}, "opt": optfn.adam(0.1).init({"w": p})}
        return {"states": {"a": state, "b": other}, "arrays": arrays, "scalar": state}[kind]

    for n, value in enumerate((1.0, np.nan, np.nan)):
        at = {} if kind == "scalar" else {"step": n}
        optfn.save_checkpoint(tmp_path, tree(value, n), keep=1, **at)
    with pytest.warns(UserWarning, match="not finite"):
        found, _ = optfn.restore_checkpoint(tmp_path, tree(0.0, 0))
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(found))
