"""Attributes, averages, masters, accumulation, guards and metrics: what each computes."""

import functools
import operator

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import references
import registry
from grids import by_entry, suite
from problems import steps

import optfn
from optfn import core
from optfn.optimizers.assembly import optimizer

OPTIMIZERS = pytest.mark.parametrize("entry", registry.OPTIMIZERS.values(), ids=registry.OPTIMIZERS)


def tree(seed, dtype=jnp.float32):
    rng = np.random.default_rng(seed)
    draw = {"a": {"w": rng.normal(size=(3, 4)), "b": rng.normal(size=4)}, "c": rng.normal(size=5)}
    return jax.tree.map(lambda x: jnp.asarray(x, dtype), draw)


def run(tx, params, gradients, apply=optfn.apply_updates):
    """Return params and state after each of the gradients."""
    found = steps(tx, params, gradients, apply=apply)
    return [step.params for step in found], found[-1].state


# Attributes


def test_attributes_are_the_first_match():
    """An earlier pattern wins; a pattern matches the whole path."""
    attrs = {
        "a/w": optfn.ParamAttr(learning_rate=0.0),
        "a/.*": optfn.ParamAttr(learning_rate=0.5),
        ".": optfn.ParamAttr(learning_rate=3.0),
    }
    updates, _ = optfn.sgd(1.0, param_attrs=attrs).update(
        tree(1), optfn.sgd(1.0, param_attrs=attrs).init(tree(0)), tree(0)
    )
    chex.assert_trees_all_close(
        updates,
        {
            "a": {"w": -0.0 * tree(1)["a"]["w"], "b": -0.5 * tree(1)["a"]["b"]},
            "c": -3.0 * tree(1)["c"],
        },
    )


@pytest.mark.parametrize(
    "name",
    suite(
        sorted({e.name for e in registry.OPTIMIZERS.values()}),
        "adadelta",
        "adamax",
        "decayed_adagrad",
        "lars",
        "rmsprop",
    ),
)
def test_rate_factor_is_a_rate(name):
    """A factor of 0.5 at rate r is the rate r/2, for every rule, over several steps."""
    own = {"momentum": (0.9,), "lars": (0.9,)}.get(name, ())
    factory = getattr(optfn, name)
    halved = factory(0.1, *own, param_attrs={".*": optfn.ParamAttr(learning_rate=0.5)})
    gradients = [tree(k) for k in (1, 2, 3)]
    got, _ = run(halved, tree(0), gradients)
    want, _ = run(factory(0.05, *own), tree(0), gradients)
    chex.assert_trees_all_close(got[-1], want[-1], rtol=1e-5, atol=1e-7)


UNTRAINED = (
    "momentum_nesterov", "asgd_batches", "rmsprop", "adam_algorithm_1", "adamw", "adamw_int8",
    "ftrl_dense_rows", "muon",
)  # fmt: skip


@by_entry(registry.OPTIMIZERS, *UNTRAINED)
def test_untrainable_leaves_are_left_alone_bit_for_bit(entry):
    """−0.0 stays −0.0; there is no state; the gradient may be anything, or missing."""
    held = {"a/.*": optfn.ParamAttr(trainable=False)}
    options = {"param_attrs": held, "grad_clip": optfn.clip_by_global_norm(1.0)}
    tx = entry.make(**options)
    params = tree(0)
    params["a"]["b"] = jnp.array([-0.0, 0.0, jnp.nan, jnp.inf])
    state = tx.init(params)
    only_c = jax.tree.leaves(tx.init({"c": params["c"]} | {"a": {"w": jnp.zeros(0)}}))
    assert sum(x.size for x in jax.tree.leaves(state)) == sum(x.size for x in only_c)
    for gradient in (tree(1)["a"], {"w": None, "b": jnp.full(4, jnp.nan)}):
        grads = {"a": gradient, "c": tree(1)["c"]}
        updates, _ = tx.update(grads, state, params)
        for new in (optax.apply_updates(params, updates), optfn.apply_updates(params, updates)):
            for before, after in zip(
                jax.tree.leaves(params["a"]), jax.tree.leaves(new["a"]), strict=True
            ):
                assert before.tobytes() == after.tobytes()
            assert np.isfinite(new["c"]).all()  # the held NaN is not in the global norm


def test_need_clip_leaves_a_tensor_out_of_the_norm():
    attrs = {"c": optfn.ParamAttr(need_clip=False)}
    tx = optfn.sgd(1.0, grad_clip=optfn.clip_by_global_norm(0.5), param_attrs=attrs)
    updates, _ = tx.update(tree(1), tx.init(tree(0)), tree(0))
    np.testing.assert_allclose(updates["c"], -tree(1)["c"])
    clipped = np.concatenate([x.ravel() for x in jax.tree.leaves(updates["a"])])
    np.testing.assert_allclose(np.linalg.norm(clipped), 0.5, rtol=1e-6)


@pytest.mark.parametrize(
    ("attrs", "error", "words"),
    [
        ({"x.*": optfn.ParamAttr()}, ValueError, "'x.*' matches no leaf.*'a/b', 'a/w', 'c'"),
        ({"a": optfn.ParamAttr()}, ValueError, "'a' matches no leaf"),
        ({"(": optfn.ParamAttr()}, ValueError, "not a regular expression"),
        ({"a/w": 0.5}, TypeError, "must be a ParamAttr; got 0.5"),
        ({3: optfn.ParamAttr()}, TypeError, "pattern must be a regular expression; got 3"),
        ([("a", optfn.ParamAttr())], TypeError, "must be a mapping"),
    ],
)
def test_bad_attributes(attrs, error, words):
    with pytest.raises(error, match=words.replace("(", r"\(")):
        optfn.sgd(0.1, param_attrs=attrs).init(tree(0))


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"learning_rate": -1.0}, ValueError, "learning_rate must be >= 0"),
        ({"learning_rate": jnp.ones(())}, TypeError, "Python number"),
        ({"regularization": 0.1}, TypeError, "regularization must be a gradient transformation"),
        ({"weight_decay": -1.0}, ValueError, "weight_decay must be >= 0"),
        ({"weight_decay": None}, TypeError, "weight_decay must be a Python number"),
        ({"need_clip": 1}, TypeError, "need_clip must be True or False"),
        ({"trainable": None}, TypeError, "trainable must be True or False"),
    ],
)
def test_bad_param_attr(options, error, words):
    with pytest.raises(error, match=words):
        optfn.ParamAttr(**options)


DECAYING = {
    "adamw": (optfn.adamw, "weight_decay", {}),
    "lamb": (optfn.lamb, "weight_decay", {}),
    "asgd": (optfn.asgd, "weight_decay", {}),
    "lars": (optfn.lars, "lars_weight_decay", {"momentum": 0.9}),
}


def _item(keys, nested):
    return functools.reduce(operator.getitem, keys, nested)


@pytest.mark.parametrize("name", DECAYING)
def test_a_factor_of_the_decay_is_a_decay(name):
    """Each leaf moves as under NumPy's rule, and bit for bit as alone, with its own coefficient."""
    factory, argument, own = DECAYING[name]
    factors = {"a/w": 0.0, "a/b": 0.3, "c": 1.0}
    attrs = {k: optfn.ParamAttr(weight_decay=v) for k, v in factors.items()}
    gradients, params = [tree(k) for k in (1, 2, 3)], tree(0)
    got, _ = run(factory(0.1, **own, **{argument: 0.2}, param_attrs=attrs), params, gradients)
    packed, _ = run(
        factory(0.1, **own, **{argument: 0.2}, param_attrs=attrs),
        optfn.pack(params),
        [optfn.pack(g) for g in gradients],
    )
    for path, factor in factors.items():
        pick = functools.partial(_item, path.split("/"))
        options = own | {argument: 0.2 * factor}
        alone, _ = run(factory(0.1, **options), pick(params), [pick(g) for g in gradients])
        np.testing.assert_array_equal(pick(got[-1]), alone[-1])
        p, s = np.float64(pick(params)), {}
        for t, g in enumerate(gradients, 1):
            p, s = getattr(references, name)(p, np.float64(pick(g)), s, t, 0.1, **options)
        np.testing.assert_allclose(pick(got[-1]), p, rtol=2e-5)
        np.testing.assert_allclose(pick(optfn.unpack(packed[-1])), p, rtol=2e-5)


def test_a_factor_of_a_scheduled_decay():
    attrs = {"a/.*": optfn.ParamAttr(weight_decay=0.5)}
    gradients = [tree(k) for k in (1, 2, 3)]
    got, _ = run(
        optfn.adamw(0.1, weight_decay=lambda i: 0.2 / (1 + i), param_attrs=attrs),
        tree(0),
        gradients,
    )
    want, _ = run(optfn.adamw(0.1, weight_decay=lambda i: 0.1 / (1 + i)), tree(0), gradients)
    chex.assert_trees_all_close(got[-1]["a"], want[-1]["a"], rtol=1e-6)


def test_an_optimizer_without_decay_refuses_a_factor_of_it():
    attrs = {"a/.*": optfn.ParamAttr(weight_decay=0.0)}
    dgc = {"rampup_begin_step": 0, "param_attrs": attrs}
    for make in (
        lambda: optfn.adam(0.1, param_attrs=attrs),
        lambda: optfn.sgd(0.1, regularization=optfn.l2_decay(0.1), param_attrs=attrs),
        lambda: optfn.dgc_momentum(0.1, 0.9, **dgc),
    ):
        with pytest.raises(ValueError, match=r"'a/\.\*'.*weight_decay=0 is a factor.*has none"):
            make()
    optfn.adam(0.1, param_attrs={"a/.*": optfn.ParamAttr(weight_decay=1.0)})


# Averages


def numpy_ema(trail, decay, thres_steps):
    e, product = np.zeros_like(trail[0], np.float64), 1.0
    for s, p in enumerate(trail):
        d = min(decay, (1 + s) / (10 + s)) if thres_steps else decay
        e, product = d * e + (1 - d) * p, product * d
    return e / (1 - product)


@pytest.mark.parametrize("thres_steps", [False, True])
@pytest.mark.parametrize("decay", [0.0, 0.3, 0.999])
def test_ema_against_numpy(decay, thres_steps):
    tx = optfn.chain(
        optfn.sgd(0.1), optfn.exponential_moving_average(decay, thres_steps=thres_steps)
    )
    params = tree(0)
    chex.assert_trees_all_equal(optfn.averaged_params(tx.init(params), params), params)
    trail, state = run(tx, params, [tree(k) for k in range(1, 8)])
    before = jax.device_get(state)
    got = optfn.averaged_params(state, trail[-1])
    chex.assert_trees_all_equal(before, jax.device_get(state))
    for path in (("a", "w"), ("a", "b")):
        series = [np.asarray(p[path[0]][path[1]]) for p in trail]
        want = numpy_ema(series, decay, thres_steps)
        np.testing.assert_allclose(got[path[0]][path[1]], want, rtol=2e-6, atol=1e-7)


def numpy_model_average(trail, rate, shortest, longest):
    s1 = s2 = s3 = 0.0
    updates = acc = old = 0
    for p in trail:
        updates, acc, s1 = updates + 1, acc + 1, s1 + p.astype(np.float64)
        if updates % 16384 == 0:
            s2, s1 = s2 + s1, 0.0
        if acc >= shortest and acc >= min(longest, int(np.float32(updates) * np.float32(rate))):
            s3, s1, s2, old, acc = s1 + s2, 0.0, 0.0, acc, 0
    return (s1 + s2 + s3) / (acc + old)


@pytest.mark.parametrize(
    ("rate", "shortest", "longest"), [(0.5, 2, 5), (0.15, 1, 100), (1.0, 9, 9)]
)
def test_model_average_against_numpy(rate, shortest, longest):
    tx = optfn.chain(
        optfn.sgd(0.1),
        optfn.model_average(rate, min_average_window=shortest, max_average_window=longest),
    )
    params = {"w": jnp.arange(3.0)}
    chex.assert_trees_all_equal(optfn.averaged_params(tx.init(params), params), params)
    gradients = [{"w": jnp.asarray(np.random.default_rng(k).normal(size=3))} for k in range(20)]
    trail, _ = run(tx, params, gradients)
    for k in (1, 7, 20):
        _, state = run(tx, params, gradients[:k])
        want = numpy_model_average([np.asarray(p["w"]) for p in trail[:k]], rate, shortest, longest)
        got = optfn.averaged_params(state, trail[k - 1])["w"]
        np.testing.assert_allclose(got, want, rtol=1e-5)


def test_model_average_at_its_sum_boundary():
    """The first sum moves into the second at update 16384, in one scan."""
    tx = optfn.model_average(0.15, min_average_window=20000, max_average_window=20000)
    zero = {"w": jnp.zeros(1)}

    def step(state, p):
        return tx.update(zero, state, {"w": p})[1], None

    values = np.random.default_rng(0).normal(size=(16390, 1)).astype(np.float32)
    state, _ = jax.jit(lambda s, v: jax.lax.scan(step, s, v))(tx.init(zero), values)
    np.testing.assert_allclose(state.sum_1["w"], values[16384:].sum(0), rtol=1e-4)
    got = optfn.averaged_params(state, zero)["w"]
    np.testing.assert_allclose(got, values.mean(0, np.float64), atol=1e-5)


def test_averages_share_no_buffer_and_choose_by_name():
    tx = optfn.chain(
        optfn.sgd(0.1), optfn.exponential_moving_average(0.9), optfn.model_average(0.5)
    )
    params = tree(0) | {"ids": jnp.arange(3)}
    state = tx.init(params)
    with pytest.raises(ValueError, match="'exponential_moving_average', 'model_average'"):
        optfn.averaged_params(state, params)
    for name in ("exponential_moving_average", "model_average"):
        averaged = optfn.averaged_params(state, params, name=name)
        chex.assert_trees_all_equal(averaged, params)
        theirs = {x.unsafe_buffer_pointer() for x in jax.tree.leaves(params)}
        assert theirs.isdisjoint(x.unsafe_buffer_pointer() for x in jax.tree.leaves(averaged))
    with pytest.raises(ValueError, match="holds none"):
        optfn.averaged_params(optfn.sgd(0.1).init(params), params)
    with pytest.raises(ValueError, match="min_average_window must be <= max"):
        optfn.model_average(0.5, min_average_window=5, max_average_window=4)


def test_averages_see_what_apply_updates_makes():
    """Rounded to the parameter's dtype outside master_weights, the master inside."""
    params, gradients = tree(0, jnp.bfloat16), [tree(k, jnp.bfloat16) for k in (1, 2)]
    average = optfn.exponential_moving_average(0.0)
    trail, state = run(optfn.chain(optfn.sgd(0.1), average), params, gradients)
    chex.assert_trees_all_equal(optfn.averaged_params(state, trail[-1]), trail[-1])
    inside = optfn.master_weights(optfn.chain(optfn.sgd(0.1), average))
    _, state = run(inside, params, gradients)
    chex.assert_trees_all_equal(state.inner_state[1].average, state.master)


# Masters


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("apply", [optax.apply_updates, optfn.apply_updates])
def test_master_weights_land_on_the_rounded_master(dtype, apply):
    """Over magnitudes from 1e-4 to 1e4, steps small and large, both ways of applying."""
    rng = np.random.default_rng(0)
    p = {"w": jnp.asarray(rng.normal(size=4096) * 10.0 ** rng.uniform(-4, 4, 4096), dtype)}
    tx = optfn.master_weights(optfn.sgd(1.0))
    state = tx.init(p)
    for size in (1e-6, 1e-3, 0.3, 1.0):
        g = {"w": p["w"].astype(jnp.float32) * jnp.asarray(rng.normal(size=4096) * size)}
        updates, state = tx.update(g, state, p)
        assert updates["w"].dtype == jnp.float32
        p = apply(p, updates)
        np.testing.assert_array_equal(p["w"], state.master["w"].astype(dtype))


TRACKED = (
    "momentum", "asgd", "adadelta", "adam", "adam_clip_l2", "adamw_lazy_exact", "ftrl",
    "lamb_int8",
)  # fmt: skip


@by_entry(registry.OPTIMIZERS, *TRACKED)
def test_multi_precision_tracks_float32(entry):
    """200 bf16 steps: the masters follow the float32 run, at rates bf16 itself cannot take."""
    name = entry.name
    own = {"momentum": (0.9,), "lars": (0.9,)}.get(name, ())
    rate = 1.0 if name == "adadelta" else 1e-3
    wide = getattr(optfn, name)(rate, *own)
    narrow = getattr(optfn, name)(rate, *own, multi_precision=True)
    noise = jnp.asarray(np.random.default_rng(0).normal(size=(200, 16)), jnp.float32)
    start = jnp.full((16,), 1.0)

    def trained(tx, dtype):
        def step(carry, eta):
            p, state = carry
            u, state = tx.update((p.astype(jnp.float32) - 0.5 + 0.1 * eta).astype(dtype), state, p)
            return (optfn.apply_updates(p, u), state), None

        p = start.astype(dtype)
        return jax.lax.scan(step, (p, tx.init(p)), noise)[0][0].astype(jnp.float32)

    moved = np.abs(trained(wide, jnp.float32) - start).max()
    error = np.abs(trained(narrow, jnp.bfloat16) - trained(wide, jnp.float32)).max()
    assert error < 0.03 * moved + 2**-8


def test_wide_leaves_have_no_master():
    tx = optfn.sgd(0.1, multi_precision=True)
    state = tx.init({"w": jnp.ones(3), "h": jnp.ones(3, jnp.float16), "ids": jnp.arange(3)})
    assert [x.shape for x in jax.tree.leaves(state.master)] == [(3,)]
    with pytest.raises(ValueError, match="dtype must be float32 or float64"):
        optfn.master_weights(optfn.sgd(0.1), jnp.bfloat16)


# Accumulation


@by_entry(registry.OPTIMIZERS, "sgd", "decayed_adagrad", "adam_clip_l2", "ftrl_dense_rows")
def test_accumulate_is_the_step_of_the_mean_gradient(entry):
    """Every third call steps; the others change neither params nor inner state."""
    tx = optfn.accumulate(entry.make(), 3)
    params, gradients = tree(0), [tree(k) for k in range(1, 7)]
    trail, state = run(tx, params, gradients)
    means = [jax.tree.map(lambda *g: sum(g) / 3, *gradients[k : k + 3]) for k in (0, 3)]
    want, inner = run(entry.make(), params, means)
    chex.assert_trees_all_close(trail[2], want[0], rtol=1e-5, atol=1e-6)
    chex.assert_trees_all_close(trail[5], want[1], rtol=1e-4, atol=1e-5)
    chex.assert_trees_all_equal(trail[0], params)
    chex.assert_trees_all_equal(trail[4], trail[2])
    chex.assert_trees_all_close(state.inner_state, inner, rtol=1e-4, atol=1e-5)


def test_accumulate_equals_the_big_batch():
    x = np.random.default_rng(0).normal(size=(12, 3)).astype(np.float32)

    def loss(w, batch):
        return jnp.mean((batch @ w - 1.0) ** 2)

    small, _ = optfn.minimize(
        loss, optfn.accumulate(optfn.adam(0.1), 4), jnp.zeros(3), list(x.reshape(4, 3, 3)),
        progress=False,
    )  # fmt: skip
    big, _ = optfn.minimize(loss, optfn.adam(0.1), jnp.zeros(3), [x], progress=False)
    np.testing.assert_allclose(small.params, big.params, rtol=1e-5)


def test_accumulate_runs_the_inner_update_only_when_due():
    """In the compiled program it stands inside a loop, and averages advance with real steps."""
    tx = optfn.accumulate(optfn.chain(optfn.sgd(0.1), optfn.exponential_moving_average(0.9)), 2)
    _, state = run(tx, tree(0), [tree(k) for k in range(1, 6)])
    assert int(state.inner_state[1].step) == 2
    assert int(state.micro_step) == 1
    jaxpr = str(jax.make_jaxpr(tx.update)(tree(1), tx.init(tree(0)), tree(0)))
    assert jaxpr.count("while[") == 1


def test_accumulate_writes_the_update_over_the_sum():
    """What is there at micro-step 0 is not added to the next gradient, whatever it is."""
    tx, p = optfn.accumulate(optfn.sgd(0.5), 2), jnp.float32(3.0)
    state = tx.init(p)
    for g in (1.0, 3.0):
        u, state = tx.update(jnp.float32(g), state, p)
    assert u == state.total == -1.0
    _, state = tx.update(jnp.float32(5.0), state._replace(total=jnp.float32(np.nan)), p)
    assert state.total == 5.0


def test_bad_accumulate():
    with pytest.raises(ValueError, match="every must be >= 1"):
        optfn.accumulate(optfn.sgd(0.1), 0)


# Guard


SKIPPING = (
    "sgd_clip_l1", "asgd", "rmsprop", "adam_lazy", "adamw_exclude", "ftrl", "muon",
)  # fmt: skip


@by_entry(registry.OPTIMIZERS, *SKIPPING)
def test_skip_leaves_params_and_state_bit_identical(entry):
    tx = optfn.skip_nonfinite(entry.make(), max_consecutive=2)
    params = tree(0)
    trail, state = run(tx, params, [tree(1)])
    for bad in (jnp.nan, jnp.inf):
        grads = tree(2)
        grads["a"]["w"] = grads["a"]["w"].at[1, 1].set(bad)
        updates, after = jax.jit(tx.update)(grads, state, trail[0])
        chex.assert_trees_all_equal(optfn.apply_updates(trail[0], updates), trail[0])
        chex.assert_trees_all_equal(after.inner_state, state.inner_state)
        assert (int(after.consecutive), int(after.skipped)) == (1, 1)
    good, _ = tx.update(tree(2), after, trail[0])
    want, _ = entry.make().update(tree(2), state.inner_state, trail[0])
    chex.assert_trees_all_close(good, want, rtol=1e-5, atol=1e-7)


def test_skip_lets_a_long_run_through_and_counts():
    tx = optfn.skip_nonfinite(optfn.sgd(0.1), max_consecutive=2)
    params, state = {"w": jnp.ones(1)}, None
    state = tx.init(params)
    seen = []
    for g in (jnp.nan, jnp.nan, jnp.nan, 10.0, jnp.nan):
        updates, state = tx.update({"w": jnp.full(1, g)}, state, params)
        seen.append(
            (
                float(updates["w"][0]),
                int(state.consecutive),
                int(state.skipped),
                bool(state.gave_up),
            )
        )
    np.testing.assert_equal(
        seen,
        [
            (-0.0, 1, 1, False),
            (-0.0, 2, 2, False),
            (np.nan, 3, 2, True),
            (-1.0, 0, 2, False),
            (-0.0, 1, 3, False),
        ],
    )


def test_workers_agree_to_skip():
    """One worker's NaN makes all of them skip; without the axis they would part ways."""
    tx = optfn.skip_nonfinite(optfn.sgd(0.1), axis_name="data")
    p = jnp.ones(2)
    g = jnp.ones((4, 2)).at[2, 0].set(jnp.nan)
    updates, state = jax.vmap(lambda g: tx.update(g, tx.init(p), p), axis_name="data")(g)
    assert not np.any(updates)
    np.testing.assert_array_equal(state.skipped, 1)
    with pytest.raises(ValueError, match=r"axis 'data' is not bound.*shard_map"):
        tx.update(p, tx.init(p), p)


def test_training_stops_on_the_host_after_too_many():
    tx = optfn.skip_nonfinite(optfn.sgd(0.1), max_consecutive=1)
    with pytest.raises(FloatingPointError, match="in a row"):
        optfn.minimize(
            lambda p, x: jnp.sum(p * x), tx, jnp.ones(2), [jnp.full(2, jnp.nan)] * 5,
            progress=False,
        )  # fmt: skip


# Metrics


@pytest.mark.optimized
def test_a_guard_does_not_repeat_its_verdict_in_the_update_of_each_leaf():
    tx = optfn.skip_nonfinite(optfn.sgd(0.1))

    def conjunctions(leaves):
        params = {str(i): jnp.ones(3) for i in range(leaves)}
        compiled = jax.jit(tx.update).lower(params, tx.init(params), params).compile()
        return compiled.as_text().count(" and(")

    # Each leaf adds the same number of them; the verdict in each update would make it quadratic.
    assert conjunctions(48) - conjunctions(32) == conjunctions(32) - conjunctions(16)


def test_metrics_are_norms_factor_and_rate():
    tx = optfn.record_metrics(optfn.sgd(0.1, grad_clip=optfn.clip_by_global_norm(0.5)))
    params, grads = tree(0), tree(1)
    state = tx.init(params)
    assert float(optfn.metrics(state)["learning_rate"]) == pytest.approx(0.1)
    _, state = tx.update(grads, state, params)

    def norm(t):
        return np.linalg.norm(np.concatenate([np.ravel(x) for x in jax.tree.leaves(t)]))

    want = {
        "grad_norm": norm(grads),
        "update_norm": 0.05,
        "param_norm": norm(params),
        "clip_factor": 0.5 / norm(grads),
        "learning_rate": 0.1,
    }
    got = optfn.metrics(state)
    assert set(got) == set(want)
    for name, value in want.items():
        np.testing.assert_allclose(got[name], value, rtol=1e-5, err_msg=name)
    with pytest.raises(ValueError, match="it has 0"):
        optfn.metrics(state.inner_state)


@pytest.mark.parametrize("packed", [False, True])
def test_metrics_by_patterns_of_paths(packed):
    """Against NumPy; a frozen leaf has no update, and its parameters count."""
    tx = optfn.record_metrics(
        optfn.sgd(0.1, param_attrs={"a/b": optfn.ParamAttr(trainable=False)}),
        per=("a/.*", "c", "a/b"),
    )
    params, grads = tree(0), tree(1)
    form = optfn.pack if packed else lambda x: x
    state = tx.init(form(params))
    assert set(optfn.metrics(state)) > {"grad_norm/a/.*", "update_ratio/c"}
    _, state = jax.jit(tx.update)(form(grads), state, form(params))
    got = optfn.metrics(state)

    def norm(*arrays):
        return np.sqrt(sum(np.sum(np.float64(x) ** 2) for x in arrays))

    a, g = params["a"], grads["a"]
    want = {
        "grad_norm/a/.*": norm(g["w"], g["b"]),
        "update_norm/a/.*": 0.1 * norm(g["w"]),
        "param_norm/a/.*": norm(a["w"], a["b"]),
        "update_ratio/a/.*": 0.1 * norm(g["w"]) / norm(a["w"], a["b"]),
        "grad_norm/c": norm(grads["c"]),
        "update_norm/c": 0.1 * norm(grads["c"]),
        "param_norm/c": norm(params["c"]),
        "update_ratio/c": 0.1 * norm(grads["c"]) / norm(params["c"]),
        "update_norm/a/b": 0.0,
        "param_norm/a/b": norm(a["b"]),
    }
    for name, value in want.items():
        np.testing.assert_allclose(got[name], value, rtol=1e-5, err_msg=name)
    plain = optfn.record_metrics(tx.call[1][0])
    assert set(optfn.metrics(plain.init(params))) == {k for k in got if "/" not in k}
    loaded = optfn.load_state_dict(plain.init(params), optfn.state_dict(state))  # only a report
    assert optfn.metrics(loaded)["grad_norm"] == got["grad_norm"]


@pytest.mark.parametrize(
    ("per", "error", "words"),
    [
        ("nothing", ValueError, "per: .*'nothing' matches no leaf|'nothing' matches no leaf"),
        (("a/.*", 3), TypeError, "per must be a regular expression of paths"),
        ("(", ValueError, "not a regular expression"),
    ],
)
def test_bad_patterns_of_metrics(per, error, words):
    with pytest.raises(error, match=words):
        optfn.record_metrics(optfn.sgd(0.1), per=per).init(tree(0))


def test_a_training_step_reports_the_norms_of_patterns_over_workers():
    """Of the mean gradient, the same on two devices as on one."""
    tx = optfn.record_metrics(optfn.sgd(0.1), per="c")
    reported = []
    for options in ({}, {"mesh": optfn.distributed.data_mesh(2)}):
        step = optfn.make_train_step(
            lambda p, x: jnp.mean(x) * sum(jnp.sum(v**2) for v in jax.tree.leaves(p)), tx, **options
        )
        _, metrics = step(step.init(tree(0)), np.arange(4.0, dtype=np.float32))
        reported.append(float(metrics["grad_norm/c"]))
    np.testing.assert_allclose(reported, 3.0 * np.linalg.norm(tree(0)["c"]), rtol=1e-5)


def test_metrics_inside_scan():
    tx = optfn.record_metrics(optfn.adam(0.1))

    def step(carry, g):
        p, state = carry
        updates, state = tx.update(g, state, p)
        return (p + updates, state), optfn.metrics(state)

    p = jnp.ones(3)
    _, series = jax.lax.scan(step, (p, tx.init(p)), jnp.arange(12.0).reshape(4, 3))
    np.testing.assert_allclose(
        series["grad_norm"], np.linalg.norm(np.arange(12.0).reshape(4, 3), axis=1), rtol=1e-6
    )


def test_references_agree_on_attributes():
    """The float64 references' attributes, on a leaf with everything set."""
    attrs = {"w": {"learning_rate": 0.5, "regularization": ("l2", 0.3), "need_clip": False}}
    p, g = np.ones((2, 3)), np.random.default_rng(0).normal(size=(5, 2, 3))
    want = references.trajectory(
        "momentum", {"w": p}, {"w": g}, learning_rate=0.1, momentum=0.9,
        grad_clip=("norm", 0.1), regularization=("l1", 0.2), param_attrs=attrs,
    )  # fmt: skip
    tx = optfn.momentum(
        0.1, 0.9, grad_clip=optfn.clip_by_norm(0.1), regularization=optfn.l1_decay(0.2),
        param_attrs={
            "w": optfn.ParamAttr(
                learning_rate=0.5, regularization=optfn.l2_decay(0.3), need_clip=False
            )
        },
    )  # fmt: skip
    trail, _ = run(tx, {"w": jnp.asarray(p, jnp.float32)}, [{"w": jnp.asarray(x)} for x in g])
    np.testing.assert_allclose([t["w"] for t in trail], want["w"], rtol=1e-5)


# Arguments

PARAMS = {"w": jnp.ones(3)}


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: optfn.accumulate(3, 2), TypeError, "accumulate: tx must be a gradient"),
        (lambda: optfn.skip_nonfinite("adam"), TypeError, "skip_nonfinite: tx .* got 'adam'"),
        (lambda: optfn.record_metrics(None), TypeError, "record_metrics: tx .* got None"),
        (lambda: optfn.summary(3, PARAMS), TypeError, "summary: tx must be .* got 3 of type int"),
        (lambda: optfn.master_weights(optfn.sgd(0.1), "float99"), ValueError, "dtype.*'float99'"),
        (lambda: optfn.master_weights(3), TypeError, "master_weights: tx must be a gradient"),
        (lambda: optfn.load_state_dict(3, 3), TypeError, "load_state_dict: mapping .* got 3"),
    ],
)
def test_wrong_arguments_are_named(call, error, message):
    with pytest.raises(error, match=message):
        call()


@pytest.mark.parametrize(
    "tx",
    [
        optfn.accumulate(optfn.sgd(0.1), 2),
        optfn.skip_nonfinite(optfn.sgd(0.1)),
        optfn.record_metrics(optfn.sgd(0.1)),
        optfn.master_weights(optfn.sgd(0.1)),
        optfn.exponential_moving_average(),
        optfn.model_average(0.5),
        optfn.chain(optfn.sgd(0.1)),
        optfn.sgd(0.1),
    ],
    ids=repr,
)
def test_the_state_of_another_optimizer_is_an_error(tx):
    params = {"w": jnp.ones(2)}
    for state in (optfn.adam(0.1).init(params), None, 3, {}):
        with pytest.raises(TypeError, match=r"the state must be a .*made by another optimizer"):
            tx.update(params, state, params)


def test_functions_among_the_leaves_are_told_how_to_part():
    """As in an equinox module that is not partitioned."""
    with pytest.raises(
        TypeError, match=r"parameter 'act' must be a floating-point array.*eqx\.partition"
    ):
        optfn.adam(0.1).init({"act": jnp.tanh, "w": jnp.ones(3)})


def test_norms_are_taken_in_float32():
    """Also of narrow gradients: in float16 the squares of large ones are infinite."""
    for dtype, value in ((jnp.bfloat16, 0.7), (jnp.float16, 297.06)):
        tx, params = optfn.record_metrics(optfn.sgd(0.1)), {"w": jnp.ones(200, dtype)}
        grads = {"w": jnp.full(200, value, dtype)}
        _, state = tx.update(grads, tx.init(params), params)
        want = np.linalg.norm(np.asarray(grads["w"], np.float64))
        np.testing.assert_allclose(optfn.metrics(state)["grad_norm"], want, rtol=1e-6)


def test_one_recorder_inside_another_is_several():
    tx = optfn.record_metrics(optfn.skip_nonfinite(optfn.record_metrics(optfn.sgd(0.1))))
    with pytest.raises(ValueError, match="must have one record_metrics; it has 2"):
        optfn.metrics(tx.init(PARAMS))


def test_python_scalars_beside_attributes_and_wrappers():
    """A frozen number does not move, a norm of numbers is one, and errors can be built of them."""
    params, grads = {"a": 2.0, "b": 1.0}, {"a": 3.0, "b": 4.0}
    tx = optfn.sgd(0.1, param_attrs={"a": optfn.ParamAttr(trainable=False)})
    updates, _ = tx.update(grads, tx.init(params), params)
    assert float(updates["a"]) == 0 and np.signbit(updates["a"])
    tx = optfn.record_metrics(optfn.sgd(0.1))
    _, state = tx.update(grads, tx.init(params), params)
    assert float(optfn.metrics(state)["grad_norm"]) == 5
    tx = optfn.accumulate(optfn.sgd(0.1), 2)
    with pytest.raises(ValueError, match=r"'a' has shape \(\); in the state it is \(2,\)"):
        tx.update({"a": 3.0}, tx.init({"a": jnp.ones(2)}))


def test_complex_leaves_beside_a_real_penalty_of_others():
    """Only the leaves that a penalty or a clip applies to must be real."""
    params = {"w": jnp.ones(2), "z": jnp.ones(2, jnp.complex64)}
    penalty = optfn.ParamAttr(regularization=optfn.l1_decay(0.5))
    tx = optfn.sgd(1.0, param_attrs={"w": penalty})
    updates, _ = tx.update(params, tx.init(params), params)
    np.testing.assert_array_equal(updates["w"], [-1.5, -1.5])
    np.testing.assert_array_equal(updates["z"], [-1, -1])
    tx = optfn.sgd(
        1.0,
        grad_clip=optfn.clip_by_value(0.5),
        param_attrs={"z": optfn.ParamAttr(need_clip=False)},
    )
    updates, _ = tx.update(params, tx.init(params), params)
    np.testing.assert_array_equal(updates["w"], [-0.5, -0.5])
    np.testing.assert_array_equal(updates["z"], [-1, -1])
    tx = optfn.sgd(1.0, param_attrs={"z": penalty})
    with pytest.raises(TypeError, match=r"l1_decay is not defined for complex leaves.*'z'"):
        tx.update(params, tx.init(params), params)


@pytest.mark.parametrize("chained", [False, True])
def test_an_optimizer_of_one_transform_need_not_be_a_chain(chained):
    @optimizer
    def descent(
        rate, *, grad_clip=None, regularization=None, param_attrs=None, multi_precision=False
    ):
        tx = optfn.scale_by_learning_rate(rate)
        return optfn.chain(tx) if chained else tx

    tx, params = descent(0.5, grad_clip=optfn.clip_by_value(1.0)), 3.0
    updates, _ = tx.update(4.0, tx.init(params), params)
    assert float(updates) == -0.5


@pytest.mark.parametrize(
    ("average", "field"),
    [
        (lambda: optfn.model_average(1.0), "sum_1"),
        (lambda: optfn.exponential_moving_average(0.0), "average"),
    ],
)
def test_a_compiled_average_is_of_the_rounded_params(average, field):
    tx = optfn.chain(optfn.sgd(0.1), average())
    params = jnp.asarray(np.linspace(0.1, 1.0, 7), jnp.bfloat16)

    @jax.jit
    def step(params, state):
        updates, state = tx.update(jnp.cos(params), state, params)
        return optfn.apply_updates(params, updates), state

    params, state = step(params, tx.init(params))
    np.testing.assert_array_equal(getattr(state[-1], field), params.astype(jnp.float32))


def types_of(state):
    """The types of the states of a chain's links; an empty state serves for any other."""
    if type(state) is tuple:
        return tuple(map(types_of, state))
    return type(state) if jax.tree.leaves(state) else ()


SUITE = (
    "sgd", "momentum_int8", "adagrad", "rmsprop_centered", "adam_lazy", "adamw_decay_schedule",
    "adamax", "lamb", "muon_int8",
)  # fmt: skip


@pytest.mark.parametrize(
    "name",
    suite(registry.OPTIMIZERS, *SUITE),
)
def test_the_state_of_each_other_optimizer_is_an_error(name):
    params = {"w": jnp.ones(2)}
    tx = registry.OPTIMIZERS[name].make()
    own = types_of(jax.eval_shape(tx.init, params))
    for other in (x.make() for x in registry.OPTIMIZERS.values()):
        state = jax.eval_shape(other.init, params)
        if types_of(state) != own:
            with pytest.raises(TypeError, match=r"the state must be a .*made by another optimizer"):
                jax.eval_shape(tx.update, params, state, params)


def test_a_rule_that_needs_leaves():
    """Its state is not compared with that of an empty tree."""

    @core.transform()
    def scale_by_largest():
        def init(params):
            return {"largest": jnp.max(jnp.stack([jnp.max(p) for p in jax.tree.leaves(params)]))}

        def update(updates, state, params=None, **extra):
            return jax.tree.map(lambda g: g / state["largest"], updates), state

        return core.rule(init, update)

    params, tx = {"w": jnp.array([1.0, 4.0])}, scale_by_largest()
    assert tx.update(params, tx.init(params), params)[0]["w"].tolist() == [0.25, 1.0]


@pytest.mark.parametrize(
    "wrap",
    [
        lambda: optfn.adam(0.1, multi_precision=True),
        lambda: optfn.adam(0.1, multi_precision=32),
        lambda: optfn.accumulate(optfn.adam(0.1), 2),
        lambda: optfn.chain(optfn.adam(0.1), optfn.exponential_moving_average(0.9)),
        lambda: optfn.chain(optfn.adam(0.1), optfn.model_average(0.5)),
        lambda: optfn.skip_nonfinite(optfn.adam(0.1)),
        lambda: optfn.record_metrics(optfn.skip_spikes(optfn.adam(0.1), 2.0)),
        lambda: optfn.dynamic_loss_scale(optfn.adam(0.1)),
    ],
)
def test_a_python_number_as_a_leaf_is_trained_as_its_array_is(wrap):
    numbers = {"w": jnp.ones(3, jnp.bfloat16), "s": 2.0}
    arrays = jax.tree.map(jnp.asarray, numbers)
    found = []
    for params in (numbers, arrays):
        tx = wrap()
        state, grads = tx.init(params), jax.tree.map(lambda x: 0.5 * jnp.asarray(x), numbers)
        for _ in range(2):
            updates, state = tx.update(grads, state, params)
            params = optfn.apply_updates(params, updates)
        found.append((params, state))
    jax.tree.map(np.testing.assert_array_equal, *found)
