"""Any tree of arrays and states is saved and restored, by names that tell its arrays apart."""

from collections import namedtuple
from importlib.util import find_spec

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from compilations import count_compilations
from problems import state_after

import optfn
from optfn.checkpoint.background import wait_for_writes

WITH_ORBAX = pytest.mark.skipif(find_spec("orbax") is None, reason="needs orbax-checkpoint")
FORMS = pytest.mark.parametrize(
    "sharded", [False, pytest.param(True, marks=WITH_ORBAX)], ids=["file", "directory"]
)
W = {"w": np.arange(6, dtype=np.float32)}


def loss_fn(params, x):
    return jnp.sum((params["w"] - x) ** 2)


def trained(tx, steps, params=W):
    step = optfn.make_train_step(loss_fn, tx)
    return state_after(step, step.init(params), [np.full(6, k, np.float32) for k in range(steps)])


def equal(a, b):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        x, y = (jax.random.key_data(v) if optfn.core.tree.is_key(v) else v for v in (x, y))
        assert x.dtype == y.dtype
        np.testing.assert_array_equal(np.asarray(x), np.asarray(y))


# Two networks that are trained against each other, and the same in another order.
Networks = namedtuple("Networks", "step generator critic key")
Reordered = namedtuple("Reordered", "critic generator key step")


def networks(kind=Networks, steps=(3, 5)):
    adam, slow = optfn.adam(0.1), optfn.adam(0.01)
    return kind(
        step=jnp.int32(steps[0]),
        generator=trained(adam, steps[0]),
        critic=trained(slow, steps[1]),
        key=jax.random.key(steps[0]),
    )


def test_the_states_of_a_named_tuple_are_named_by_its_fields():
    saved = networks()
    names = [*optfn.state_dict(saved)]
    for owner in ("generator", "critic"):
        assert {f"{owner}/train/params/w", f"{owner}/scale_by_adam/mu/w"} <= {*names}
    assert not any("_2" in name for name in names)
    found = optfn.load_state_dict(networks(Reordered, (0, 0)), optfn.state_dict(saved))
    equal(found.generator, saved.generator)
    equal(found.critic, saved.critic)


# The states of two optimizers, of a type that is named as a state.
PairState = namedtuple("PairState", "first second")
SwappedState = namedtuple("SwappedState", "second first")


def test_fields_of_a_state_with_several_states_are_labels_and_those_of_a_wrapper_are_not():
    tx = optfn.adam(0.1)
    first, second = trained(tx, 2).opt_state, trained(tx, 4).opt_state
    saved = optfn.state_dict(PairState(first, second))
    assert {"first/scale_by_adam/mu/w", "second/scale_by_adam/mu/w"} <= saved.keys()
    fresh = tx.init(W)
    found = optfn.load_state_dict(SwappedState(fresh, fresh), saved)
    equal(found.first, first)
    equal(found.second, second)
    wrapped = optfn.skip_nonfinite(optfn.accumulate(tx, 2)).init(W)
    assert "scale_by_adam/mu/w" in optfn.state_dict(wrapped)
    assert "scale_by_adam/mu/w" in optfn.state_dict(optax.MultiSteps(tx, 2).init(W))


@pytest.mark.parametrize(
    "kind, sharded",
    [(Networks, False), pytest.param(dict, True, marks=WITH_ORBAX)],
    ids=["NamedTuple in a file", "dict in a directory"],
)
def test_two_optimizers_and_a_key_are_saved_and_restored(kind, sharded, tmp_path):
    saved, fresh = networks(kind), networks(kind, (0, 0))
    path = optfn.save_checkpoint(tmp_path, saved, {"loss": np.ones(2)}, sharded=sharded)
    assert path.name.startswith("step_000000003")
    found, history = optfn.restore_checkpoint(tmp_path, fresh)
    equal(found, saved)
    np.testing.assert_array_equal(history["loss"], [1, 1])
    equal(optfn.load_checkpoint(path, fresh)[0], saved)


def test_a_tree_without_a_step_needs_the_number_in_the_name(tmp_path):
    with pytest.raises(TypeError, match="another field or key `step` that is a scalar integer; el"):
        optfn.save_checkpoint(tmp_path, W)
    assert optfn.save_checkpoint(tmp_path, W, step=7).name == "step_000000007.npz"
    found, _ = optfn.restore_checkpoint(tmp_path, {"w": np.zeros(6, np.float32)})
    np.testing.assert_array_equal(found["w"], W["w"])


def test_a_population_is_saved_by_the_step_that_its_members_have_in_common(tmp_path):
    step = optfn.make_train_step(lambda p, x: jnp.mean((p["w"] - x) ** 2), optfn.adam(1e-2))
    population = jax.vmap(lambda w: step.init({"w": w}))(jnp.ones((3, 6)))
    for _ in range(2):
        population, _ = jax.vmap(step, in_axes=(0, None))(population, jnp.zeros(6))
    assert optfn.save_checkpoint(tmp_path, population).name == "step_000000002.npz"
    found, _ = optfn.restore_checkpoint(tmp_path, jax.tree.map(jnp.zeros_like, population))
    equal(found, population)
    apart = population._replace(step=jnp.arange(3))
    with pytest.raises(ValueError, match=r"TrainState has shape \(3,\), .*3 different numbers"):
        optfn.save_checkpoint(tmp_path, apart)
    assert optfn.save_checkpoint(tmp_path, apart, step=9).name == "step_000000009.npz"
    for train in (step, lambda state, x: optfn.fit(step, state, [x], progress=False)):
        with pytest.raises(ValueError, match=r"whose step has shape \(3,\), as a population has"):
            train(population, jnp.zeros(6))


REFUSED = {
    "one name": ({"a/b": np.ones(2), "a": {"b": np.zeros(2)}}, ValueError, "have the name 'a/b'"),
    "NUL": ({"a\0b": np.ones(2)}, ValueError, r"names 'a\\x00b' have a NUL"),
    "version": ({"version": np.ones(2)}, ValueError, "names 'version' are those of other entries"),
    "about": ({"about": np.ones(2)}, ValueError, "names 'about' are those of other entries"),
    "history": ({"history": {"loss": np.ones(2)}}, ValueError, "'history/loss' are those of other"),
    "no name": (jnp.ones(2), ValueError, "put an array alone into a dict"),
    "text": ({"a": "text"}, TypeError, "its leaf a is 'text' of type str"),
    "a number": ({"a": 3}, TypeError, "its leaf a is 3 of type int"),
    "an optimizer": (optfn.sgd(0.1), TypeError, "its leaf 0 is <function"),
}


@FORMS
@pytest.mark.parametrize(("given", "error", "words"), REFUSED.values(), ids=REFUSED)
def test_saving_and_restoring_refuse_the_same_trees(given, error, words, sharded, tmp_path):
    with pytest.raises(error, match=words):
        optfn.save_checkpoint(tmp_path, given, step=1, sharded=sharded)
    assert not [*tmp_path.glob("step*")]
    optfn.save_checkpoint(tmp_path, W, step=1, sharded=sharded)
    wait_for_writes()
    with pytest.raises(error, match=words):
        optfn.restore_checkpoint(tmp_path, given)


def test_a_state_dict_has_no_two_arrays_of_one_name_and_none_of_its_own_entries():
    for given in (REFUSED["one name"], REFUSED["NUL"], REFUSED["version"]):
        with pytest.raises(ValueError, match=given[2]):
            optfn.state_dict(given[0])


@FORMS
@pytest.mark.parametrize("place", ["uncommitted", "committed"])
def test_the_result_is_committed_where_the_template_is(place, sharded, tmp_path):
    step = optfn.make_train_step(loss_fn, optfn.adam(0.1), packed=True, donate=False)
    state = step.init({"w": W["w"], "v": np.ones(3, np.float32)})
    if place == "committed":
        state = jax.device_put(state, jax.devices()[0])
    optfn.save_checkpoint(tmp_path, state, sharded=sharded)
    found, _ = optfn.restore_checkpoint(tmp_path, state)
    for x, like in zip(jax.tree.leaves(found), jax.tree.leaves(state), strict=True):
        assert x.committed == like.committed and x.sharding == like.sharding
    batch = np.ones(6, np.float32)
    want, _ = step(state, batch)
    with count_compilations() as count:
        result, _ = step(found, batch)
    assert count.value == 0
    equal(result, want)
    with count_compilations() as count:
        jax.jit(lambda x: x * 5.25 + 1.75)(batch)
    assert count.value > 0


@WITH_ORBAX
def test_large_arrays_of_a_directory_lie_as_their_templates(tmp_path):
    """They are read in shards; small ones, and those of another shape, as a whole."""
    mesh = optfn.distributed.data_mesh(8)
    place = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
    values = np.random.default_rng(0).normal(size=(1024, 512)).astype(np.float32)
    saved = {"large": jax.device_put(values, place), "small": jnp.arange(8.0)}
    optfn.save_checkpoint(tmp_path, saved, step=1, sharded=True)
    found, _ = optfn.restore_checkpoint(tmp_path, saved)
    equal(found, saved)
    assert found["large"].sharding == place and not found["small"].committed
    across = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(None, "data"))
    found, _ = optfn.restore_checkpoint(tmp_path, saved | {"large": jax.device_put(values, across)})
    equal(found, saved)
    assert found["large"].sharding == across


def test_a_train_state_in_place_of_params_is_refused_by_name(recwarn):
    tx = optfn.adam(0.1)
    step = optfn.make_train_step(loss_fn, tx)
    state = step.init(W)
    words = r"params must be the parameters alone; got a TrainState.*fit\(step, state, batches\)"
    for call in (
        lambda: step.init(state),
        lambda: optfn.minimize(loss_fn, tx, state, [W["w"]], progress=False),
    ):
        with pytest.raises(TypeError, match=words):
            call()
    assert not [str(entry.message) for entry in recwarn]
