"""state_dict, load_state_dict and summary: names, exactness, errors."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import registry
from grids import by_entry

import optfn
from optfn.train.state import copy


def tree(seed, dtype=jnp.float32):
    rng = np.random.default_rng(seed)
    w = {"w": jnp.asarray(rng.normal(size=(3, 2)), dtype)}
    return {"z": w, "w": [jnp.asarray(rng.normal(size=4), dtype)], "z0": jnp.zeros((), dtype)}


def filled(entry):
    """Return a transform, bfloat16 params, and a state in which each array has numbers."""
    tx, params = entry.make(), tree(0, jnp.bfloat16)
    state, rng = tx.init(params), np.random.default_rng(1)
    draw = lambda x: jnp.asarray(rng.uniform(1, 100, np.shape(x)).astype(x.dtype))  # noqa: E731
    return tx, params, jax.tree.map(draw, state)


@by_entry(registry.ALL, *registry.SUITE)
def test_round_trip_through_npz_is_bit_exact(entry, tmp_path):
    tx, params, state = filled(entry)
    np.savez(tmp_path / "state.npz", **optfn.state_dict(state))
    with np.load(tmp_path / "state.npz") as file:
        loaded = optfn.load_state_dict(tx.init(params), file)
    assert jax.tree.structure(loaded) == jax.tree.structure(state)
    for a, b in zip(jax.tree.leaves(loaded), jax.tree.leaves(state), strict=True):
        assert (a.dtype, a.shape) == (b.dtype, b.shape)
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


@by_entry(registry.ALL, *{*registry.OTHER_SUITE, *registry.WRAPPERS})
def test_names_are_words_without_positions(entry):
    """Each name is the transform's word, a field, a path; an inserted transform moves none."""
    params = tree(0)
    names = set(optfn.state_dict(entry.make().init(params)))
    inserted = optfn.chain(optfn.clip_by_value(1.0), optax.ema(0.9), entry.make())
    assert names <= set(optfn.state_dict(inserted.init(params)))
    around = optfn.record_metrics(entry.make())
    renumbered = {n for n in names if n.startswith("record_metrics/")}
    assert names - renumbered <= set(optfn.state_dict(around.init(params)))


def test_names():
    tx = optfn.chain(
        optfn.momentum(0.1, 0.9, grad_clip=optfn.clip_by_norm(1.0)), optfn.scale_by_momentum(0.5)
    )
    assert list(optfn.state_dict(tx.init({"a": {"b": jnp.ones(2)}}))) == [
        "version",
        "clip/factor",
        "scale_by_momentum/velocity/a/b",
        "scale_by_learning_rate/step",
        "scale_by_learning_rate/learning_rate",
        "scale_by_momentum_2/velocity/a/b",
    ]
    parts = optax.partition({"x": optfn.sgd(0.1), "y": optfn.adam(0.2)}, {"a": "x", "b": "y"})
    names = optfn.state_dict(parts.init({"a": jnp.ones(1), "b": jnp.ones(2)}))
    assert "x/scale_by_learning_rate/learning_rate" in names
    assert "y/scale_by_adam/mu/b" in names


def test_without_momentum_there_is_no_velocity():
    """And the next transform keeps its number."""
    params = {"a": {"b": jnp.ones(2)}}

    def state_of(momentum):
        first = optfn.rmsprop(0.1, momentum=momentum)
        return optfn.chain(first, optfn.scale_by_momentum(0.5)).init(params)

    kept, none = state_of(jnp.float32(0.0)), state_of(0.0)
    assert optfn.state_dict(kept).keys() - optfn.state_dict(none).keys() == {
        "scale_by_momentum/velocity/a/b"
    }
    count = sum(x.size for x in jax.tree.leaves(none) if x.ndim)
    assert count == 4  # two accumulators in all
    saved = optfn.state_dict(jax.tree.map(lambda x: x + 7, kept))
    with pytest.raises(ValueError, match="not expected 'scale_by_momentum/velocity/a/b'"):
        optfn.load_state_dict(none, saved)
    del saved["scale_by_momentum/velocity/a/b"]
    loaded = optfn.state_dict(optfn.load_state_dict(none, saved))
    assert all(np.array_equal(saved[k], x) for k, x in loaded.items())
    for stranger in ("scale_by_momentum/velocities", "scale_by_momentum_3/velocity/a/b"):
        with pytest.raises(ValueError, match=f"not expected '{stranger}'"):
            optfn.load_state_dict(none, saved | {stranger: np.ones(2)})


def test_bfloat16_is_kept_as_bits(tmp_path):
    state = optax.trace(0.9, accumulator_dtype=jnp.bfloat16).init({"w": jnp.ones(3)})
    state = jax.tree.map(lambda x: x + jnp.asarray(1.5, x.dtype), state)
    saved = optfn.state_dict(state)
    assert saved["trace/trace/w"].dtype == np.uint16
    np.savez(tmp_path / "s.npz", **saved)
    with np.load(tmp_path / "s.npz") as file:
        chex.assert_trees_all_equal(optfn.load_state_dict(state, file), state)
    raw = {"trace/trace/w": saved["trace/trace/w"].view("V2")}
    chex.assert_trees_all_equal(optfn.load_state_dict(state, raw), state)  # as npz gives it back


def test_saved_state_outlives_a_donated_one():
    step = optfn.make_train_step(lambda p, x: jnp.sum(p * x), optfn.adam(0.1))
    state, _ = step(step.init(jnp.zeros(2)), jnp.ones(2))
    saved = optfn.state_dict(state.opt_state)
    copy = {k: np.array(v) for k, v in saved.items()}
    step(state, jnp.ones(2))
    chex.assert_trees_all_equal(saved, copy)


def test_a_copy_of_a_numpy_array_is_made_at_once():
    """While a CPU computes, JAX copies an aligned NumPy array later."""
    memory = np.zeros(2**22 + 64, np.uint8)
    start = -memory.ctypes.data % 64
    params = memory[start : start + 2**22].view(np.float32)
    powers = jax.jit(lambda x: x @ x @ x @ x)
    copy(params), powers(jnp.eye(1000)).block_until_ready()  # both compile
    under_way = powers(jnp.eye(1000))
    copied = copy(params)
    params[:] = 1.0
    np.testing.assert_array_equal(copied, 0.0)
    under_way.block_until_ready()


@pytest.mark.parametrize("other", [0.5, jnp.asarray(0.5), optfn.schedules.cosine(0.5, 1, 10)])
def test_a_state_loads_under_another_kind_of_rate(other):
    """The step goes on: the next update uses the schedule at the step that was saved."""
    params = {"w": jnp.ones(2)}
    for first in (0.1, optfn.schedules.step_decay(0.1, 1)):
        tx = optfn.adam(first)
        state = tx.init(params)
        for _ in range(3):
            _, state = tx.update(params, state, params)
        new = optfn.adam(other)
        loaded = optfn.load_state_dict(new.init(params), optfn.state_dict(state))
        updates, loaded = new.update(params, loaded, params)
        kept = optfn.get_learning_rate(state) if other == 0.5 and isinstance(other, float) else None
        want = kept if kept is not None else (other(3) if callable(other) else other)
        np.testing.assert_allclose(optfn.get_learning_rate(loaded), want, rtol=1e-6)
        np.testing.assert_allclose(updates["w"], -want, rtol=1e-4)


def test_errors_name_everything_that_is_wrong():
    params = {"a": jnp.ones(2), "b": jnp.ones(3)}
    state = optfn.momentum(0.1, 0.9).init(params)
    saved = optfn.state_dict(state)
    bad = {k: v for k, v in saved.items() if not k.endswith("/a")}
    bad["scale_by_momentum/velocity/b"] = np.ones((3, 1))
    bad["stranger"] = np.ones(1)
    with pytest.raises(ValueError, match="does not fit") as error:
        optfn.load_state_dict(state, bad)
    for words in (
        "missing 'scale_by_momentum/velocity/a'",
        "not expected 'stranger'",
        "'scale_by_momentum/velocity/b' has shape (3, 1), but the template has (3,)",
    ):
        assert words in str(error.value)
    with pytest.raises(ValueError, match=r"velocity/b' has shape"):
        optfn.load_state_dict(state, bad, strict=False)
    with pytest.raises(ValueError, match="complex"):
        optfn.load_state_dict(state, saved | {"scale_by_momentum/velocity/b": np.ones(3, complex)})
    with pytest.raises(ValueError, match="format version 99"):
        optfn.load_state_dict(state, saved | {"version": 99})
    for version in ("x", None, np.ones(2), 1.5):
        with pytest.raises(TypeError, match="version must be a Python integer"):
            optfn.load_state_dict(state, saved | {"version": version})
    with pytest.raises(TypeError, match="strict must be True or False; got 3"):
        optfn.load_state_dict(state, saved, strict=3)


def test_partial_loading_keeps_the_rest():
    params = {"a": jnp.ones(2), "b": jnp.ones(3)}
    state = optfn.momentum(0.1, 0.9).init(params)
    part = {"scale_by_momentum/velocity/a": np.full(2, 7.0), "stranger": 1}
    with pytest.warns(UserWarning) as warned:
        loaded = optfn.load_state_dict(state, part, strict=False)
    (warning,) = warned
    assert str(warning.message) == (
        "load_state_dict: carried over: 'scale_by_momentum/velocity/a'; new, as in the template: "
        "'scale_by_momentum/velocity/b', 'scale_by_learning_rate/step', "
        "'scale_by_learning_rate/learning_rate'; dropped: 'stranger'"
    )
    assert warning.filename == __file__
    saved = optfn.state_dict(loaded)
    np.testing.assert_array_equal(saved["scale_by_momentum/velocity/a"], 7.0)
    np.testing.assert_array_equal(saved["scale_by_momentum/velocity/b"], 0.0)


def test_partial_loading_keeps_the_rest_of_packed_params():
    tx, params = optfn.momentum(0.1, 0.9), optfn.pack({"a": jnp.ones(2), "b": jnp.ones(3)})
    state = tx.update(params, tx.init(params), params)[1]
    part = {"scale_by_momentum/velocity/a": np.full(2, 7.0)}
    with pytest.warns(UserWarning, match="velocity/b"):
        loaded = optfn.load_state_dict(state, part, strict=False)
    saved = optfn.state_dict(loaded)
    np.testing.assert_array_equal(saved["scale_by_momentum/velocity/a"], 7.0)
    np.testing.assert_array_equal(saved["scale_by_momentum/velocity/b"], 1.0)


GUARDS = {
    "clip": lambda tx: optfn.chain(optfn.clip_by_global_norm(1.0), tx),
    "two clips": lambda tx: optfn.chain(optfn.clip_by_norm(1.0), optfn.clip_by_norm(2.0), tx),
    "guard": optfn.skip_nonfinite,
    "recorder": optfn.record_metrics,
    "labels": lambda tx: optax.partition({"x": optfn.record_metrics(tx)}, {"a": "x"}),
}


@pytest.mark.parametrize("name", GUARDS)
def test_what_only_reports_is_no_reason_to_refuse(name):
    """A clip, a guard or a recorder may come and go between two runs, also with strict=True."""
    params, tx = {"a": jnp.ones(2)}, optfn.adam(0.1)
    plain = optax.partition({"x": tx}, {"a": "x"}) if name == "labels" else tx
    for before, after in [(plain, GUARDS[name](tx)), (GUARDS[name](tx), plain)]:
        state = before.update(params, before.init(params), params)[1]
        loaded = optfn.load_state_dict(after.init(params), optfn.state_dict(state))
        old, new = optfn.state_dict(state), optfn.state_dict(loaded)
        common = set(old) & set(new)
        assert len(common) >= 6
        for key in common:
            np.testing.assert_array_equal(old[key], new[key])


def test_a_parameter_with_the_name_of_a_report_is_still_needed():
    tx, params = optfn.momentum(0.1, 0.9), {"clip": {"factor": jnp.ones(2)}, "b": jnp.ones(2)}
    saved = optfn.state_dict(tx.init(params))
    with pytest.raises(ValueError, match="not expected 'scale_by_momentum/velocity/clip/factor'"):
        optfn.load_state_dict(tx.init({"b": jnp.ones(2)}), saved)
    del saved["scale_by_momentum/velocity/clip/factor"]
    with pytest.raises(ValueError, match="missing 'scale_by_momentum/velocity/clip/factor'"):
        optfn.load_state_dict(tx.init(params), saved)


def test_results_take_dtype_and_sharding_of_the_template():
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:2]), ("x",))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x"))
    params = {"w": jax.device_put(jnp.ones(4), sharding)}
    tx = optfn.momentum(0.1, 0.9)
    state = tx.init(params)
    saved = optfn.state_dict(state)
    saved["scale_by_momentum/velocity/w"] = np.arange(4.0)  # float64
    loaded = optfn.load_state_dict(state, saved)
    (velocity,) = [x for x in jax.tree.leaves(loaded) if x.shape == (4,)]
    assert velocity.dtype == jnp.float32
    assert velocity.sharding == sharding


def test_stacked_states():
    tx = optfn.adam(0.1)
    state = jax.vmap(tx.init)({"w": jnp.ones((3, 2))})
    changed = optfn.set_learning_rate(state, 0.5)
    loaded = optfn.load_state_dict(state, optfn.state_dict(changed))
    chex.assert_trees_all_equal(loaded, changed)
    assert loaded[1].rate.learning_rate.shape == (3,)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_nnx_wrappers_stay():
    nnx = pytest.importorskip("flax.nnx")
    model = nnx.Linear(3, 2, rngs=nnx.Rngs(0))
    tx = optfn.chain(optfn.adam(0.1), optfn.exponential_moving_average(0.9))
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    optimizer.update(model, nnx.grad(lambda m: m(jnp.ones((1, 3))).sum())(model))
    saved = optfn.state_dict(optimizer.opt_state)
    assert "scale_by_adam/mu/kernel" in saved
    loaded = optfn.load_state_dict(optimizer.opt_state, saved)
    assert jax.tree.structure(loaded) == jax.tree.structure(optimizer.opt_state)
    averaged = optfn.averaged_params(optimizer.opt_state, nnx.state(model, nnx.Param))
    np.testing.assert_allclose(averaged["bias"][...], model.bias[...], rtol=1e-6)


def test_summary_counts_every_byte():
    tx = optfn.chain(
        optfn.adam(
            0.1,
            multi_precision=True,
            param_attrs={
                "emb/w": optfn.ParamAttr(trainable=False),
                "b": optfn.ParamAttr(learning_rate=0.5, need_clip=False, regularization=None),
            },
        ),
        optfn.exponential_moving_average(0.9),
    )
    shapes = {
        "emb": {"w": jax.ShapeDtypeStruct((100, 8), jnp.float32)},
        "w": jax.ShapeDtypeStruct((8, 8), jnp.bfloat16),
        "b": jax.ShapeDtypeStruct((8,), jnp.float32),
        "ids": jax.ShapeDtypeStruct((3,), jnp.int32),
    }
    rows = {line.split()[0]: line for line in optfn.summary(tx, shapes).splitlines()}
    assert "frozen: not trainable" in rows["emb/w"]
    assert rows["emb/w"].split()[-2] == "0"  # of the average too
    assert "frozen: not floating point" in rows["ids"]
    assert "rate × 0.5, no regularization, not clipped" in rows["b"]
    assert rows["w"].split()[-2:] == [f"{64 * 16:,}", "16.00"]  # master, mu, nu, average
    assert rows["b"].split()[-2:] == [str(8 * 12), "12.00"]
    state = jax.eval_shape(tx.init, shapes)
    total = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(state))
    assert rows["total"].split()[-2] == f"{total:,}"


@pytest.mark.parametrize(
    "around", [lambda tx: tx, optfn.record_metrics, lambda tx: optax.chain(optax.clip(1.0), tx)]
)
def test_summary_shows_the_label_of_a_partition(around):
    """Also of a rule without state."""
    members = {"head": optfn.sgd(1e-2), "body": optfn.adam(1e-3)}
    labels = {"w": "head", "layers": "body"}
    tx = around(optax.partition(members, labels))
    params = {"w": jnp.ones(2), "layers": [{"b": jnp.ones(3)}]}
    rows = {line.split()[0]: line for line in optfn.summary(tx, params).splitlines()}
    assert "rule 'head'" in rows["w"] and "rule 'body'" in rows["layers/0/b"]


def test_summary_shows_what_is_sent_compressed():
    exchange = optfn.distributed.exchange
    compressed = exchange(optfn.distributed.top_k(0.01), min_size=10)
    params = {"w": jnp.ones((8, 8)), "b": jnp.ones(3)}
    for tx in (
        optfn.chain(compressed, optfn.sgd(0.1)),
        optfn.dgc_momentum(0.1, 0.9, rampup_begin_step=0, min_size=10),
    ):
        rows = {line.split()[0]: line for line in optfn.summary(tx, params).splitlines()}
        assert "compressed" in rows["w"] and "compressed" not in rows["b"]
    tx = optfn.accumulate(optfn.chain(exchange(None), optfn.sgd(0.1)), 4)
    assert "compressed" not in optfn.summary(tx, params)


def test_summary_shows_what_is_excluded_from_weight_decay():
    tx = optfn.skip_nonfinite(optfn.adamw(1e-3, weight_decay=0.1, exclude="b|.*/scale"))
    params = {"b": jnp.ones(2), "norm": {"scale": jnp.ones(2)}, "w": jnp.ones(2)}
    rows = {line.split()[0]: line for line in optfn.summary(tx, params).splitlines()}
    shown = {name: "no weight decay" in rows[name] for name in ("b", "norm/scale", "w")}
    assert shown == {"b": True, "norm/scale": True, "w": False}
    attrs = {"b": optfn.ParamAttr(weight_decay=0), "w": optfn.ParamAttr(weight_decay=0.5)}
    rows = optfn.summary(optfn.adamw(1e-3, param_attrs=attrs), params).splitlines()
    assert "no weight decay" in rows[2] and "weight decay × 0.5" in rows[4]


@by_entry(registry.ALL, *{*registry.SUITE, *registry.WRAPPERS})
def test_summary_of_everything(entry):
    params = tree(0) | {"ids": jnp.arange(3)}
    state = entry.make().init(params)
    lines = optfn.summary(entry.make(), params).splitlines()
    total = sum(x.nbytes for x in jax.tree.leaves(state))
    assert lines[-1].split()[-2] == f"{total:,}"
    assert len(lines) == 8
