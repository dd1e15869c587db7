"""Parameters that are frozen at first: their moments begin when they thaw, and count from there."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import references
from grids import suite
from problems import equal, state_after, steps

import optfn
from optfn.distributed import data_mesh
from optfn.transforms.catch_up_adam import caught_up

FROZEN = {"a/.*": optfn.ParamAttr(trainable=False)}
BEFORE, AFTER = 50, 8


def tree(seed):
    rng = np.random.default_rng(seed)
    draw = {"a": {"w": rng.normal(size=(3, 4))}, "b": rng.normal(size=(5, 2))}
    return jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), draw)


GRADIENTS = [tree(k) for k in range(1, BEFORE + AFTER + 1)]
# tests/reference_run draws the others.
RULES = {
    "asgd": (optfn.asgd, references.asgd, {"batch_num": 6}, {}),
    "catch up": (optfn.adam, references.adam, {}, {"lazy": "exact"}),
}


def updated(tx, state, params, gradients):
    return steps(tx, params, gradients, state)[-1][1:]


def thawed(make, params, *, before=BEFORE):
    """Params and state after some steps with a frozen part, loaded where all of it is trained."""
    tx = make(param_attrs=FROZEN)
    params, state = updated(tx, tx.init(params), params, GRADIENTS[:before])
    with pytest.warns(UserWarning, match=r"new, as in the template: .*a/w"):
        return params, optfn.load_state_dict(
            make().init(params), optfn.state_dict(state), strict=False
        )


@pytest.mark.parametrize("name", suite(RULES, "asgd"))
def test_a_thawed_leaf_counts_its_own_steps(name):
    """Against NumPy's rule, in which the leaf's count starts at 0 when it thaws."""
    factory, rule, hyper, options = RULES[name]

    def make(**more):
        return factory(0.1, **hyper, **options, **more)

    params, state = thawed(make, tree(0))
    found, state = updated(make(), state, params, GRADIENTS[BEFORE:])
    given = hyper | {"lr": 0.1}
    p, s = np.float64(tree(0)["a"]["w"]), {}
    for t, g in enumerate(GRADIENTS[BEFORE:], 1):
        p, s = rule(p, np.float64(g["a"]["w"]), s, t, **given)
    np.testing.assert_allclose(found["a"]["w"], p, rtol=1e-5, atol=1e-5)
    p, s = np.float64(tree(0)["b"]), {}
    for t, g in enumerate(GRADIENTS, 1):
        p, s = rule(p, np.float64(g["b"]), s, t, **given)
    np.testing.assert_allclose(found["b"], p, rtol=1e-4, atol=1e-4)


def test_a_state_in_which_nothing_thaws_is_as_ever():
    tx, params = optfn.adamw(0.1), tree(0)
    _, state = updated(tx, tx.init(params), params, GRADIENTS[:3])
    for strict in (True, False):
        loaded = optfn.load_state_dict(tx.init(params), optfn.state_dict(state), strict=strict)
        chex.assert_trees_all_equal(loaded, state)
        assert jax.tree.structure(loaded) == jax.tree.structure(tx.init(params))


def test_counts_are_saved_and_go_on():
    """Under a name of their own, 4 bytes for each leaf; strict loading knows them."""
    params, state = thawed(optfn.adam, tree(0))
    tx = optfn.adam()
    params, state = updated(tx, state, params, GRADIENTS[:2])
    saved = optfn.state_dict(state)
    assert saved["scale_by_adam/step"] == BEFORE + 2
    assert saved["scale_by_adam/begun/a/w"] == BEFORE and "scale_by_adam/begun/b" not in saved
    assert saved["scale_by_adam/begun/a/w"].nbytes == 4
    loaded = optfn.load_state_dict(tx.init(params), saved)
    chex.assert_trees_all_equal(loaded, state)
    # A template that has counts takes those of the mapping, and none where that has none.
    chex.assert_trees_all_equal(optfn.load_state_dict(state, saved), state)
    _, plain = updated(tx, tx.init(params), params, GRADIENTS[:2])
    chex.assert_trees_all_equal(optfn.load_state_dict(state, optfn.state_dict(plain)), plain)
    with pytest.raises(ValueError, match="not expected 'scale_by_adam/begun/c'"):
        optfn.load_state_dict(state, saved | {"scale_by_adam/begun/c": np.int32(3)})


def test_a_leaf_that_freezes_and_thaws_again_begins_again():
    tx, held = optfn.adam(), optfn.adam(param_attrs=FROZEN)
    params, state = thawed(optfn.adam, tree(0))
    with pytest.warns(UserWarning, match="dropped: .*begun/a/w"):
        state = optfn.load_state_dict(held.init(params), optfn.state_dict(state), strict=False)
    assert jax.tree.structure(state) == jax.tree.structure(held.init(params))
    params, state = updated(held, state, params, GRADIENTS[:2])
    with pytest.warns(UserWarning, match="new"):
        state = optfn.load_state_dict(tx.init(params), optfn.state_dict(state), strict=False)
    assert optfn.state_dict(state)["scale_by_adam/begun/a/w"] == BEFORE + 2


def test_moments_that_stay_those_of_a_template_keep_their_count():
    """Moments of two runs in one state: each leaf has made as many steps as its own run."""
    tx, params = optfn.adam(), tree(0)
    _, template = updated(tx, tx.init(params), params, GRADIENTS[:3])
    _, other = updated(tx, tx.init(params), params, GRADIENTS[:7])
    saved = {k: v for k, v in optfn.state_dict(other).items() if not k.endswith("/a/w")}
    with pytest.warns(UserWarning, match="mu/a/w"):
        state = optfn.load_state_dict(template, saved, strict=False)
    got, _ = tx.update(GRADIENTS[9], state, params)
    want_a, _ = tx.update(GRADIENTS[9], template, params)
    want_b, _ = tx.update(GRADIENTS[9], other, params)
    chex.assert_trees_all_close(got, {"a": want_a["a"], "b": want_b["b"]}, rtol=1e-6)


def test_packed_leaves_thaw_as_those_of_the_tree():
    def make(**more):
        return optfn.asgd(0.1, batch_num=6, **more)

    params, state = thawed(make, tree(0))
    want, _ = updated(make(), state, params, GRADIENTS[BEFORE:])
    mapping = optfn.state_dict(state)
    packed = optfn.load_state_dict(make().init(optfn.pack(params)), mapping)
    gradients = [optfn.pack(g) for g in GRADIENTS[BEFORE:]]
    found, packed = updated(make(), packed, optfn.pack(params), gradients)
    chex.assert_trees_all_close(optfn.unpack(found), want, rtol=1e-5, atol=1e-6)
    assert set(optfn.state_dict(packed)) == set(mapping)


def test_rows_that_catch_up_after_a_thaw():
    params, state = thawed(lambda **more: optfn.adam(0.1, lazy="exact", **more), tree(0))
    tx, fresh = optfn.adam(0.1, lazy="exact"), optfn.adam(0.1, lazy="exact")
    alone = {"a": params["a"]}
    own, update, update_alone = fresh.init(alone), jax.jit(tx.update), jax.jit(fresh.update)
    for k in range(3):
        rows = optfn.sparse.Rows(jnp.array([k], jnp.int32), jnp.ones((1, 4)), 3)
        updates, state = update({"a": {"w": rows}, "b": GRADIENTS[k]["b"]}, state, params)
        want, own = update_alone({"a": {"w": rows}}, own, alone)
        np.testing.assert_allclose(updates["a"]["w"].values, want["a"]["w"].values, rtol=1e-6)
    chex.assert_trees_all_close(caught_up(state[0]).mu["a"], caught_up(own[0]).mu["a"])


def loss_fn(params, x):
    return jnp.mean((x @ params["a"]["w"] - 1.0) ** 2) + jnp.mean(params["b"] ** 2)


def wrapped(**options):
    tx = optfn.adam(0.1, multi_precision=True, **options)
    return optfn.skip_nonfinite(optfn.record_metrics(tx))


def test_a_training_step_on_a_mesh_thaws_and_resumes(tmp_path):
    """Also after a second save."""
    x, options = np.eye(4, 3, dtype=np.float32), {"mesh": data_mesh(2), "shard": "params"}
    frozen, free = (
        optfn.make_train_step(loss_fn, wrapped(param_attrs=attrs), **options)
        for attrs in (FROZEN, None)
    )
    state = state_after(frozen, frozen.init(tree(0)), [x] * 9)
    optfn.save_checkpoint(tmp_path, state, sharded=False)
    with pytest.warns(UserWarning, match="new"):
        state, _ = optfn.restore_checkpoint(tmp_path, free.init(tree(0)), strict=False)
    state, _ = free(state, x)
    optfn.save_checkpoint(tmp_path, state, sharded=False)
    resumed, _ = optfn.restore_checkpoint(tmp_path, free.init(tree(0)))
    assert jax.tree.structure(resumed) == jax.tree.structure(state)
    state, resumed = (state_after(free, start, [x] * 3) for start in (state, resumed))
    equal(resumed, state)
    assert optfn.state_dict(state)["scale_by_adam/begun/a/w"] == 9


def test_states_of_a_sweep_thaw_together():
    """Under vmap each run has its count."""
    tx, held = optfn.adam(0.1), optfn.adam(0.1, param_attrs=FROZEN)
    params = jax.tree.map(lambda x: np.stack([x, 2 * np.asarray(x)]), tree(0))
    state = jax.jit(jax.vmap(held.init))(params)
    _, state = jax.jit(jax.vmap(held.update))(params, state, params)
    with pytest.warns(UserWarning, match="new"):
        state = optfn.load_state_dict(
            jax.jit(jax.vmap(tx.init))(params), optfn.state_dict(state), strict=False
        )
    updates, _ = jax.jit(jax.vmap(tx.update))(params, state, params)
    np.testing.assert_allclose(updates["a"]["w"], -0.1 * np.sign(params["a"]["w"]), rtol=1e-4)
