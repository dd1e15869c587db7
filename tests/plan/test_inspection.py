"""What compiled steps do to memory: in place, without copies, equal leaves traced once."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import registry
from grids import by_entry, nightly, suite

import optfn
from optfn.plan import inspection

SHAPE = (128, 96)


def params_of():
    return {"w": jnp.ones(SHAPE), "v": jnp.ones(SHAPE)}


def loss_fn(params, batch):
    return jnp.mean((batch @ params["w"] - params["v"]) ** 2)


BATCH = np.ones((SHAPE[0], SHAPE[0]), np.float32)


IN_PLACE = [k for k, v in registry.OPTIMIZERS.items() if not v.copies]


@pytest.mark.optimized
@pytest.mark.parametrize(
    "name",
    suite(IN_PLACE, "momentum_int8", "rmsprop_centered", "adam_bfloat16", "ftrl", "lamb_int8"),
)
@pytest.mark.filterwarnings("ignore:.*has no effect without tables")
def test_train_steps_are_in_place(name):
    step = optfn.make_train_step(loss_fn, registry.OPTIMIZERS[name].make())
    optfn.assert_in_place(step, step.init(params_of()), BATCH)


@pytest.mark.optimized
@pytest.mark.parametrize("name", ["ftrl", "adam", *map(nightly, ("lamb", "lars", "accumulate"))])
def test_updates_keep_no_temporaries(name):
    """Beyond params, state and gradients, less than a tenth of a byte per parameter."""
    tx, params = registry.EVERYTHING[name].make(), {k: jnp.ones((512, 128)) for k in "abc"}

    def step(params, state, grads):
        updates, state = tx.update(grads, state, params)
        return optfn.apply_updates(params, updates), state

    lowered = jax.jit(step, donate_argnums=(0, 1)).lower(params, tx.init(params), params)
    assert lowered.compile().memory_analysis().temp_size_in_bytes <= 0.1 * 3 * 512 * 128


@pytest.mark.optimized
def test_another_order_of_donated_arguments_is_found():
    tx = optfn.adam(0.1)

    def step(grads, state, params):
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    args = params_of(), tx.init(params_of()), params_of()
    donated = jax.jit(step, donate_argnums=(1, 2))
    with pytest.raises(AssertionError, match=r"copies \d+ arrays .*f32\[128,96\]"):
        optfn.assert_in_place(donated, *args)
    with pytest.raises(AssertionError, match="no argument is donated"):
        optfn.assert_in_place(jax.jit(step), *args)
    with pytest.raises(TypeError, match=r"TrainStep or a function from jax\.jit"):
        optfn.assert_in_place(step, *args)


@by_entry(
    registry.PROGRAMS,
    *("sgd_clip_l1", "adadelta", "adamw", "lamb", "reduce_on_plateau", "dynamic_loss_scale"),
)
def test_equal_leaves_are_treated_as_any(entry):
    """Under jit they share one traced rule; the results are those of unlike leaves, one by one."""
    rng = np.random.default_rng(0)
    keys = ("w", "v", "z", "0")

    def random(scale=1.0):
        return {k: jnp.asarray(scale * rng.normal(size=5), jnp.float32) for k in keys}

    params, grads = random(), [random(0.1 * (k + 1)) for k in range(2)]
    tx = entry.make()

    def one(params, state, g):
        updates, state = tx.update(g, state, params, **dict(entry.extra))
        return optax.apply_updates(params, updates), state

    def after(step):
        new, state = params, tx.init(params)
        for g in grads:
            new, state = step(new, state, g)
        return new, state

    found, want = after(jax.jit(one)), after(one)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(want), strict=True):
        tolerance = {"rtol": 0.1, "atol": 0.05} if entry.quantized else {"rtol": 2e-5, "atol": 1e-6}
        np.testing.assert_allclose(
            np.asarray(a, np.float32), np.asarray(b, np.float32), **tolerance
        )


def test_equal_leaves_are_traced_once():
    """The program of 40 equal leaves has one copy of Adam's rule, called 40 times."""
    tx = optfn.adam(0.1)
    params = {f"w{k}": jnp.ones(7) for k in range(40)} | {"other": jnp.ones((2, 3))}

    def step(params, state, grads):
        return tx.update(grads, state, params)

    text = jax.jit(step).lower(params, tx.init(params), params).as_text()
    assert text.count("stablehlo.sqrt") <= 4  # one shared, one of its own, and the bias correction


def test_a_train_step_is_checked_with_its_state():
    step = optfn.make_train_step(lambda p, x: jnp.sum(p["w"] * x), optfn.sgd(0.1))
    params, x = {"w": jnp.ones(5000)}, jnp.ones(5000)
    for args in ((params, x), (x,), ()):
        with pytest.raises(TypeError, match=r"\(state, batch\), and the state is a TrainS"):
            optfn.assert_in_place(step, *args)


@pytest.mark.optimized
def test_copies_of_activations_are_no_copies_of_the_state():
    """XLA transposes the heads of attention, which have other sizes than params."""

    def loss(params, x):
        heads = (x @ params["w"]).reshape(8, 16, 4, 16).transpose(0, 2, 1, 3)
        return jnp.sum(jnp.einsum("bhqd,bhkd->bhqk", heads, heads) ** 2)

    step = optfn.make_train_step(loss, optfn.adam(1e-3))
    state, x = step.init({"w": jnp.ones((64, 64))}), jnp.ones((8, 16, 64))
    assert "8,4,16,16" in str(step.compiled.lower(state, x).compile().as_text())
    optfn.assert_in_place(step, state, x)


@pytest.mark.parametrize("accumulates", [False, True])
def test_a_schedule_that_is_over_before_the_run_begins_is_said(accumulates):
    """A schedule goes on from the step of the state."""
    every = 2 if accumulates else 1
    rate = optfn.schedules.warmup_cosine(1e-2, warmup_steps=5, total_steps=40)

    def make(schedule):
        tx = optfn.sgd(schedule)
        return optfn.make_train_step(
            lambda w, x: jnp.sum(w * x), optfn.accumulate(tx, 2) if accumulates else tx
        )

    def first_phase():
        step = make(rate)
        return optfn.fit(step, step.init(jnp.ones(3)), X, steps=40 * every, progress=False)[0]

    X = [np.ones(3, np.float32)] * 200
    with pytest.warns(UserWarning, match="is 0 in all steps of this run, 40 to 79.*step - 40"):
        optfn.fit(make(rate), first_phase(), X, steps=40 * every, progress=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optfn.fit(make(lambda n: rate(n - 40)), first_phase(), X, steps=40 * every, progress=False)
        optfn.fit(make(rate), make(rate).init(jnp.ones(3)), X, steps=1, progress=False)


@pytest.mark.optimized
def test_the_sizes_of_donated_arrays_are_those_of_a_device():
    """The factor of the clip is donated too, but the program does not read it."""
    tx = optfn.adam(1e-3, grad_clip=optfn.clip_by_global_norm(1.0))
    mesh = optfn.distributed.data_mesh(8)
    step = optfn.make_train_step(
        lambda p, x: jnp.mean((x @ p["w"]) ** 2), tx, mesh=mesh, shard="params"
    )
    compiled = step.lower({"w": jnp.ones((256, 64))}, jnp.ones((8, 256))).compile()
    assert inspection._find_donated_sizes(compiled.as_text()) == {1, 256 * 64 // 8}
