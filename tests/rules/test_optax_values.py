"""Values and idioms of optax: no state, infinite norms, eps 0, schedules of weight decay."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import registry
from grids import nightly

import optfn

G = {"w": jnp.array([3.0, -4.0, 0.0]), "b": jnp.array([[1e-3, 2.0]])}
P = {"w": jnp.array([1.0, 0.0, -2.0]), "b": jnp.array([[0.5, 0.25]])}


WITHOUT_STATE = [
    "add_decayed_weights", "clip_by_global_norm", "clip_by_norm", "clip_by_value", "l1_decay",
    "l2_decay", "scale_by_lars", "scale_by_trust_ratio",
]  # fmt: skip


@pytest.mark.parametrize("state", [None, (), optax.EmptyState()], ids=repr)
@pytest.mark.parametrize("name", WITHOUT_STATE)
def test_a_transform_that_reads_no_state_takes_none(name, state):
    tx = registry.TRANSFORMS[name].make()
    found, new = tx.update(G, state, P)
    want, _ = tx.update(G, tx.init(P), P)
    jax.tree.map(np.testing.assert_array_equal, found, want)
    tx.update(G, new, P)


@pytest.mark.parametrize("state", [None, (), optax.EmptyState()], ids=repr)
def test_a_transform_that_reads_its_state_takes_no_other(state):
    with pytest.raises(TypeError, match="the state must be"):
        optfn.scale_by_adam().update(G, state, P)


@pytest.mark.parametrize("make", [optfn.clip_by_norm, optfn.clip_by_global_norm])
def test_a_clip_to_an_infinite_norm_changes_no_bit(make):
    g = np.array([1e-42, -0.0, 1e38, np.nan, -np.inf], np.float32)
    for clip in (make(float("inf")), make(np.float32("inf"))):
        found, state = jax.jit(clip.update)({"w": g}, clip.init({"w": g}))
        assert np.asarray(found["w"]).tobytes() == g.tobytes()
        assert float(state.factor) == 1.0


@pytest.mark.parametrize("make", [optfn.clip_by_norm, optfn.clip_by_global_norm])
def test_an_infinite_norm_may_be_traced(make):
    found, state = jax.jit(lambda c: make(c).update(G, None))(jnp.inf)
    jax.tree.map(np.testing.assert_array_equal, found, G)
    assert float(state.factor) == 1.0


@pytest.mark.parametrize("nesterov", [False, True])
def test_momentum_1_sums_up_as_in_optax(nesterov):
    ours, theirs = optfn.scale_by_momentum(1.0, nesterov=nesterov), optax.trace(1.0, nesterov)
    a, b = ours.init(G), theirs.init(G)
    for _ in range(3):
        found, a = ours.update(G, a)
        want, b = theirs.update(G, b)
        jax.tree.map(np.testing.assert_array_equal, found, want)
    assert float(optfn.momentum(1.0, 1).update(G, optfn.momentum(1.0, 1).init(P))[0]["w"][0]) == -3


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (optfn.adam(0.1, eps=0, eps_hat=False), optax.adam(0.1, eps=0)),
        (optfn.adamw(0.1, eps=0, weight_decay=0.1), optax.adamw(0.1, eps=0, weight_decay=0.1)),
        (optfn.adagrad(0.1, eps=0), optax.adagrad(0.1, initial_accumulator_value=0, eps=0)),
        (optfn.rmsprop(0.1, rho=0.9, eps=0), optax.rmsprop(0.1, decay=0.9, eps=0)),
        (optfn.adamax(0.1, eps=0), optax.adamax(0.1, eps=0)),
    ],
    ids=["adam", "adamw", "adagrad", "rmsprop", "adamax"],
)
def test_eps_0_is_that_of_optax(ours, theirs):
    """0/0 included: the last element of w never has a gradient."""
    a, b = ours.init(P), theirs.init(P)
    for k in range(3):
        g = jax.tree.map(lambda x, k=k: x * (1.0 - 0.3 * k), G)
        found, a = ours.update(g, a, P)
        want, b = theirs.update(g, b, P)
        for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(want), strict=True):
            np.testing.assert_allclose(x, y, rtol=2e-5)  # NaN where optax has it, and nowhere else


DECAYS = jnp.array([0.5, 0.1, 0.0, 0.3])


def decay_at(step):
    assert step.dtype == jnp.int32
    return DECAYS[step]


@pytest.mark.parametrize(
    "make",
    [
        lambda wd: optfn.add_decayed_weights(wd),
        nightly(lambda wd: optfn.adamw(0.1, weight_decay=wd, exclude="b")),
        nightly(lambda wd: optfn.adamw(0.1, weight_decay=wd, moment_dtype="bfloat16")),
        lambda wd: optfn.asgd(0.1, batch_num=2, weight_decay=wd),
        nightly(lambda wd: optfn.lamb(0.1, weight_decay=wd, exclude="b")),
        nightly(lambda wd: optfn.lars(0.1, 0.9, lars_coeff=0.1, lars_weight_decay=wd, exclude="b")),
    ],
    ids=["add_decayed_weights", "adamw", "adamw bfloat16", "asgd", "lamb", "lars"],
)
def test_a_schedule_of_weight_decay_is_its_number_at_each_step(make):
    tx = make(decay_at)
    state, update = tx.init(P), jax.jit(tx.update)
    kept = make(0.5).init(P)
    for coefficient in DECAYS.tolist():
        found, state = update(G, state, P)
        want, kept = make(coefficient).update(G, kept, P)
        for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(want), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7)


def test_only_a_schedule_of_weight_decay_counts_steps():
    number, schedule = (optfn.adamw(0.1, weight_decay=wd).init(P) for wd in (0.1, decay_at))
    new = optfn.state_dict(schedule).keys() - optfn.state_dict(number).keys()
    assert new == {"add_decayed_weights/step"}


def test_inject_hyperparams_has_one_learning_rate_for_optax():
    tx = optax.inject_hyperparams(optfn.adam)(learning_rate=0.25)
    state = tx.init(P)
    state = optax.tree_utils.tree_set(state, learning_rate=jnp.float32(0.5))
    updates, state = tx.update(G, state, P)
    assert float(updates["w"][0]) == pytest.approx(-0.5, rel=1e-5)
    assert float(optax.tree_utils.tree_get(state, "learning_rate")) == 0.5
    assert float(optfn.get_learning_rate(state)) == 0.5
    with pytest.raises(ValueError, match="since a schedule or an array"):
        optfn.set_learning_rate(state, 0.1)


def test_a_rate_that_an_array_drives_keeps_its_name_in_files():
    tx = optfn.sgd(jnp.float32(0.25))
    mapping = optfn.state_dict(tx.init(P))
    assert set(mapping) == set(optfn.state_dict(optfn.sgd(0.25).init(P)))
    mapping["scale_by_learning_rate/learning_rate"] = np.float32(0.125)
    state = optfn.load_state_dict(tx.init(P), mapping)
    assert float(optfn.get_learning_rate(state)) == 0.125


@pytest.mark.parametrize("rate", [0.25, lambda step: 0.25], ids=["number", "schedule"])
def test_optax_finds_the_rate_in_our_state(rate):
    assert float(optax.tree_utils.tree_get(optfn.adam(rate).init(P), "learning_rate")) == 0.25


def rebuilt(tx):
    leaves, structure = jax.tree.flatten(tx)
    return structure.unflatten(leaves)


def test_a_transformation_that_jax_rebuilds_is_the_same():
    tx = optfn.chain(
        optfn.ftrl(0.1, param_attrs={"b": optfn.ParamAttr(trainable=False)}),
        optfn.exponential_moving_average(0.9),
    )
    again = rebuilt(tx)
    assert again is tx
    for attribute in ("call", "unchecked", "param_attrs", "inner"):
        assert getattr(again, attribute) == getattr(tx, attribute)
    with pytest.raises(ValueError, match="needs the parameters"):
        optfn.chain(optfn.clip_by_norm(1.0), rebuilt(optfn.adamw(0.1))).update(
            G, optfn.chain(optfn.clip_by_norm(1.0), optfn.adamw(0.1)).init(P)
        )


def test_a_transformation_survives_being_parted_and_combined():
    """As equinox.partition and combine do: functions on one side, None on the other."""
    tx = optfn.adam(0.1)
    arrays = jax.tree.map(lambda x: None, tx)
    assert repr(arrays) == "Transform(None, None)"
    is_none = {"is_leaf": lambda x: x is None}
    assert jax.tree.map(lambda a, b: b if a is None else a, arrays, tx, **is_none) is tx


def test_a_transformation_of_other_functions_keeps_no_functions_of_the_old():
    calls = []

    def counted(function):
        def call(*args, **kwargs):
            calls.append(function)
            return function(*args, **kwargs)

        return call

    tx = optfn.sgd(0.1)
    wrapped = jax.tree.map(counted, tx)
    assert wrapped.unchecked is None and "counted" in repr(wrapped)
    chain = optfn.chain(wrapped, optfn.clip_by_norm(1.0))
    chain.update(G, chain.init(P))
    assert len(calls) == 2


def test_a_transformation_is_itself_inside_filter_jit():
    equinox = pytest.importorskip("equinox")
    seen = []

    @equinox.filter_jit
    def step(params, state, tx):
        seen.append(tx)
        return tx.update(params, state, params)

    tx = optfn.adam(0.1)
    found, _ = step(P, tx.init(P), tx)
    assert seen == [tx] and repr(seen[0]) == "adam(0.1)"
    want, _ = tx.update(P, tx.init(P), P)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5)


@pytest.mark.parametrize("make", [optax.adam, optax.adamw], ids=["adam", "adamw"])
def test_an_optimizer_of_optax_names_the_integer_leaf_that_it_cannot_take(make):
    def loss(params, batch):
        return jnp.sum(params["a"]["w"] * batch)

    params = {"a": {"w": np.ones(2, np.float32), "n": np.arange(3)}}
    step = optfn.make_train_step(loss, make(0.1))
    with pytest.raises(TypeError, match=r"integer leaves 'a/n', which are float0.*optax\.masked"):
        step(step.init(params), 1.0)
    held = {"a": {"w": True, "n": False}}
    step = optfn.make_train_step(loss, optax.masked(make(0.1), held))
    state, _ = step(step.init(params), 1.0)
    assert state.params["a"]["n"].tolist() == [0, 1, 2]
    np.testing.assert_allclose(state.params["a"]["w"], 0.9, rtol=1e-3)
