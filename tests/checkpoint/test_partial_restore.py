"""A checkpoint loaded into another run: a part of it, or what the two have in common."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from problems import equal, state_after

import optfn
from optfn.checkpoint import background

PARAMS = {"body": {"w": jnp.arange(6.0).reshape(3, 2)}, "head": jnp.ones(2)}
BOTH_KINDS = pytest.mark.parametrize("sharded", [False, True], ids=["file", "directory"])


def loss_fn(params, x):
    return jnp.mean((x @ params["body"]["w"] @ params["head"] - 1.0) ** 2)


def trained(tx, directory, *, sharded=False, params=PARAMS, steps=3):
    """The state after some steps, saved."""
    step = optfn.make_train_step(loss_fn, tx)
    state = state_after(step, step.init(params), [jnp.eye(3)] * steps)
    optfn.save_checkpoint(directory, state, {"loss": np.ones(steps)}, sharded=sharded)
    background.wait_for_writes()
    return state


def fresh(tx, params=PARAMS):
    return optfn.make_train_step(loss_fn, tx).init(params)


@BOTH_KINDS
def test_another_chain_loads_what_it_has_in_common_and_says_the_rest(sharded, tmp_path):
    saved = trained(optfn.momentum(0.1, 0.9), tmp_path, sharded=sharded)
    template = fresh(optfn.adam(0.3))
    with pytest.warns(UserWarning) as warned:
        state, history = optfn.restore_checkpoint(tmp_path, template, strict=False)
    warning, of_rate = warned
    text = str(warning.message)
    assert "of its checkpoint, 0.1, and not with that of tx, 0.3" in str(of_rate.message)
    assert "call optfn.set_learning_rate" in str(of_rate.message)
    assert "step_000000003" in text and warning.filename == __file__
    carried, new, dropped = text.split("; ")
    assert carried.endswith(
        "carried over: 'step', 'params/body/w', 'params/head', 'scale_by_learning_rate/step', "
        "'scale_by_learning_rate/learning_rate'"
    )
    assert new == (
        "new, as in the template: 'scale_by_adam/step', 'scale_by_adam/mu/body/w', "
        "'scale_by_adam/mu/head', 'scale_by_adam/nu/body/w', 'scale_by_adam/nu/head'"
    )
    assert dropped == (
        "dropped: 'scale_by_momentum/velocity/body/w', 'scale_by_momentum/velocity/head'"
    )
    equal(state.params, saved.params)
    equal(state.opt_state[0], template.opt_state[0])
    assert int(state.step) == 3
    assert optfn.get_learning_rate(state.opt_state) == np.float32(0.1)
    np.testing.assert_array_equal(history["loss"], np.ones(3))
    with warnings.catch_warnings():  # the error says it, and no warning before it
        warnings.simplefilter("error")
        with pytest.raises(
            ValueError,
            match=r"missing 'scale_by_adam/step'.*in both, call restore_checkpoint with strict=Fal",
        ):
            optfn.restore_checkpoint(tmp_path, template)


def test_a_clip_and_a_guard_added_in_mid_run_need_no_argument(tmp_path):
    saved = trained(optfn.adam(0.1), tmp_path)
    guarded = optfn.skip_nonfinite(optfn.adam(0.1, grad_clip=optfn.clip_by_global_norm(1.0)))
    state, _ = optfn.restore_checkpoint(tmp_path, fresh(guarded))
    equal(state.opt_state.inner_state[1:], saved.opt_state)
    equal(state.params, saved.params)


@BOTH_KINDS
def test_only_the_names_of_a_pattern_are_loaded(sharded, tmp_path):
    tx = optfn.adam(0.1)
    saved = trained(tx, tmp_path, sharded=sharded)
    template = fresh(tx, jax.tree.map(jnp.zeros_like, PARAMS))
    for only in ("params/body/.*", lambda name: name == "params/body/w"):
        with pytest.warns(UserWarning) as warned:
            state, _ = optfn.restore_checkpoint(tmp_path, template, only=only)
        (warning,) = warned
        assert "carried over: 'params/body/w'; new, as in the template: 'step', 'params/head'" in (
            str(warning.message)
        )
        assert "dropped: 'step', 'params/head', 'scale_by_adam/step'" in str(warning.message)
        equal(state.params["body"], saved.params["body"])
        want = template._replace(params=template.params | {"body": saved.params["body"]})
        equal(state, want)
    with pytest.raises(
        ValueError, match=r"only='train/params/.\*' matches no name .*'params/head'"
    ):
        optfn.restore_checkpoint(tmp_path, template, only="train/params/.*")


@BOTH_KINDS
def test_an_error_of_shapes_names_the_argument_that_loads_the_rest(sharded, tmp_path):
    """strict=False takes names that differ, and no other shapes; only= leaves them out."""
    tx = optfn.adam(0.1)
    saved = trained(tx, tmp_path, sharded=sharded)
    template = fresh(tx, {"body": PARAMS["body"], "head": jnp.zeros((2, 4))})
    for strict in (True, False):
        with pytest.raises(
            ValueError, match=r"has shape \(2,\).*call restore_checkpoint with only="
        ):
            optfn.restore_checkpoint(tmp_path, template, strict=strict)
    with pytest.raises(ValueError, match=r"has shape \(2,\).*call restore_checkpoint with only="):
        optfn.load_params(tmp_path, template.params)
    with pytest.warns(UserWarning, match="carried over: 'params/body/w'"):
        state, _ = optfn.restore_checkpoint(tmp_path, template, only="params/body/.*")
    equal(state.params["body"], saved.params["body"])
    equal(state.params["head"], template.params["head"])


def test_the_error_of_another_model_lists_twenty_arrays_and_how_many_there_are(tmp_path):
    params = {f"w{i:02}": jnp.ones(2) for i in range(30)}
    step = optfn.make_train_step(lambda p, x: p["w00"].sum(), optfn.sgd(0.1))
    optfn.save_checkpoint(tmp_path, step.init(params))
    with pytest.raises(ValueError, match="has shape") as raised:
        optfn.restore_checkpoint(tmp_path, step.init({k: jnp.ones(3) for k in params}))
    text = str(raised.value)
    assert text.count("has shape") == 20 and "… (30 in all)" in text


def test_names_lose_the_word_of_the_state_and_no_other(tmp_path):
    """Where "train/" is of a parameter, or of a label of the optimizer, it stays."""
    keys = ("constrain/w", "train/x", "a'train/b")
    tx = optax.partition({"train": optfn.adam(0.1)}, dict.fromkeys(keys, "train"))
    step = optfn.make_train_step(lambda p, x: p["train/x"].sum(), tx)
    optfn.save_checkpoint(tmp_path, step.init(dict.fromkeys(keys, np.ones(2))))
    with pytest.raises(ValueError, match="from another run") as raised:
        optfn.restore_checkpoint(tmp_path, step.init(dict.fromkeys(keys, np.ones(3))))
    for prefix in ("params", "train/scale_by_adam/mu", "train/scale_by_adam/nu"):
        for key in keys:
            assert f"{f'{prefix}/{key}'!r} has shape (2,)" in str(raised.value)
    with pytest.raises(ValueError, match="matches no name") as raised:
        optfn.restore_checkpoint(tmp_path, step.init(dict.fromkeys(keys, np.ones(2))), only="mu")
    for name in ("step", "params/train/x", "train/scale_by_adam/mu/train/x"):
        assert repr(name) in str(raised.value)


def test_a_directory_without_a_checkpoint_has_no_params(tmp_path):
    for place in (tmp_path, tmp_path / "none"):
        with pytest.raises(FileNotFoundError, match="there is no checkpoint at"):
            optfn.load_params(place, PARAMS)


def test_params_are_no_template_of_a_run(tmp_path):
    saved = trained(optfn.adam(0.1), tmp_path)
    for template in (saved.params, saved.opt_state):
        with pytest.raises(ValueError, match=r"It has a TrainState; load_params loads the param"):
            optfn.restore_checkpoint(tmp_path, template)


def test_a_pattern_that_names_everything_says_nothing(tmp_path):
    saved = trained(optfn.adam(0.1), tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        state, _ = optfn.restore_checkpoint(tmp_path, fresh(optfn.adam(0.1)), only=".*")
        equal(state, saved)


def test_new_masters_are_those_of_the_params_that_were_loaded(tmp_path):
    """Masters of the template would overwrite the params at the next step."""
    params = jax.tree.map(lambda x: x.astype(jnp.bfloat16), PARAMS)
    frozen = {"body/.*": optfn.ParamAttr(trainable=False)}
    tx = optfn.adam(0.1, multi_precision=True)
    saved = trained(
        optfn.adam(0.1, multi_precision=True, param_attrs=frozen), tmp_path, params=params
    )
    template = fresh(tx, jax.tree.map(jnp.zeros_like, params))
    for options in ({"strict": False}, {"only": "params/.*"}):
        with pytest.warns(UserWarning, match="new, as in the template"):
            state, _ = optfn.restore_checkpoint(tmp_path, template, **options)
        equal(state.params, saved.params)
        masters = state.opt_state.master
        np.testing.assert_array_equal(masters["body"]["w"], PARAMS["body"]["w"])
        assert masters["body"]["w"].dtype == jnp.float32
    np.testing.assert_array_equal(masters["head"], saved.params["head"].astype(jnp.float32))


@BOTH_KINDS
def test_params_alone_load_from_a_checkpoint_and_from_a_directory_of_them(sharded, tmp_path):
    saved = trained(optfn.adam(0.1), tmp_path, sharded=sharded)
    template = jax.tree.map(lambda x: jnp.zeros_like(x, jnp.float16), PARAMS)
    (path,) = optfn.checkpoint.newest.list_checkpoints(tmp_path)
    for place in (path, tmp_path, str(tmp_path)):
        loaded = optfn.load_params(place, template)
        equal(loaded, jax.tree.map(lambda x: x.astype(jnp.float16), saved.params))
    packed = optfn.load_params(path, optfn.pack(PARAMS))
    equal(optfn.unpack(packed), saved.params)


@BOTH_KINDS
def test_a_template_may_be_on_the_host_or_shapes(sharded, tmp_path):
    saved = trained(optfn.adam(0.1), tmp_path, sharded=sharded)
    for template in (jax.device_get(PARAMS), jax.eval_shape(lambda: PARAMS)):
        equal(optfn.load_params(tmp_path, template), saved.params)
    template = jax.device_get(fresh(optfn.adam(0.1)))
    equal(optfn.restore_checkpoint(tmp_path, template)[0], saved)


def test_params_of_another_model_are_refused_by_name(tmp_path):
    trained(optfn.adam(0.1), tmp_path)
    (path,) = optfn.checkpoint.newest.list_checkpoints(tmp_path)
    with pytest.raises(ValueError, match=r"another model: missing 'params/tail'"):
        optfn.load_params(path, PARAMS | {"tail": jnp.ones(1)})


def test_params_of_the_newest_intact_checkpoint(tmp_path):
    saved = trained(optfn.adam(0.1), tmp_path)
    (tmp_path / "step_000000009.npz").write_bytes(b"half")
    with pytest.warns(UserWarning, match="step_000000009"):
        equal(optfn.load_params(tmp_path, PARAMS), saved.params)


AVERAGES = {
    "exponential_moving_average": lambda: optfn.exponential_moving_average(0.9),
    "model_average": lambda: optfn.model_average(1.0, min_average_window=3, max_average_window=3),
}


@pytest.mark.parametrize("average", AVERAGES.values(), ids=AVERAGES)
def test_the_average_of_a_new_leaf_begins_at_its_parameter(average, tmp_path):
    """It goes on as if the leaf had been there, at that value, from the first step on."""

    def loss_fn(params, x):
        return sum(jnp.mean((x @ w - 1.0) ** 2) for w in params.values())

    x = np.random.default_rng(0).normal(size=(14, 4, 3)).astype(np.float32)
    tx = optfn.chain(optfn.sgd(0.1), average())
    step = optfn.make_train_step(loss_fn, tx)
    start = {"old": jnp.ones(3)}
    before, _ = optfn.fit(step, step.init(start), x[:8], progress=False, checkpoint=tmp_path)
    head = jnp.array([5.0, 6.0, 7.0])
    template = step.init(start | {"new": head})
    with pytest.warns(UserWarning, match="new, as in the template"):
        state, _ = optfn.restore_checkpoint(tmp_path, template, strict=False)
    averaged = optfn.averaged_params(state.opt_state, state.params)
    np.testing.assert_allclose(averaged["new"], head, rtol=1e-6)
    want = optfn.averaged_params(before.opt_state, before.params)
    np.testing.assert_array_equal(averaged["old"], want["old"])

    def hold(params, x):
        return loss_fn(params | {"new": jax.lax.stop_gradient(params["new"])}, x)

    held = optfn.make_train_step(hold, tx)
    whole, _ = optfn.fit(held, held.init(start | {"new": head}), x[:8], progress=False)
    for batch in x[8:]:
        state, _ = step(state, batch)
        whole, _ = step(whole, batch)
        got, want = (optfn.averaged_params(s.opt_state, s.params) for s in (state, whole))
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), got, want)


def test_an_average_inside_masters_begins_there_too(tmp_path):
    def loss_fn(params, x):
        return sum(jnp.mean((x @ w - 1.0) ** 2) for w in params.values())

    average = optfn.exponential_moving_average(0.9)
    tx = optfn.master_weights(optfn.chain(optfn.sgd(0.1), average))
    step = optfn.make_train_step(loss_fn, tx)
    start = {"old": jnp.ones(3, jnp.bfloat16)}
    x = np.ones((2, 4, 3), jnp.bfloat16)
    optfn.fit(step, step.init(start), x, progress=False, checkpoint=tmp_path)
    head = jnp.array([5.0, 6.0, 7.0], jnp.bfloat16)
    with pytest.warns(UserWarning, match="new, as in the template"):
        state, _ = optfn.restore_checkpoint(
            tmp_path, step.init(start | {"new": head}), strict=False
        )
    averaged = optfn.averaged_params(state.opt_state, state.params)
    np.testing.assert_array_equal(averaged["new"], head)
    np.testing.assert_array_equal(state.opt_state.master["new"], head)


def test_an_average_that_is_new_without_params_is_said_to_begin_at_zero():
    tx = optfn.exponential_moving_average(0.9)
    params = {"old": jnp.ones(3)}
    _, state = tx.update(params, tx.init(params), params)
    template = tx.init(params | {"new": jnp.ones(2)})
    with pytest.warns(UserWarning) as caught:
        optfn.load_state_dict(template, optfn.state_dict(state), strict=False)
    assert any("average/new' are new and begin at zero" in str(w.message) for w in caught)
