"""Layers that are updated inside the backward pass: as in the step without, or a named error."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from grids import thinned

import optfn
from optfn.distributed import data_mesh, exchange, scan_layers
from optfn.train.options import EXCLUDES

LAYERS, WIDTH, HIDDEN = 3, 8, 32
PATTERN = "layers/.*"


def normal(seed, *shape):
    return np.asarray(np.random.default_rng(seed).normal(size=shape) / 3, np.float32)


def model(layers=LAYERS, width=WIDTH, hidden=HIDDEN):
    stack = {
        "up": normal(1, layers, width, hidden),
        "down": normal(2, layers, hidden, width),
        "bias": normal(3, layers, hidden),
    }
    return {
        "embed": normal(0, 64, width),
        "layers": optfn.Stacked(stack),
        "head": normal(4, width, 1),
    }


def layer(w, x):
    return x + jnp.tanh(x @ w["up"] + w["bias"]) @ w["down"]


def loss_fn(params, ids):
    x = scan_layers(layer, params["layers"], params["embed"][ids])
    return jnp.mean((x @ params["head"] - 1) ** 2)


BATCHES = [np.arange(16) + 8 * k for k in range(3)]


def trained(tx, loss_fn=loss_fn, params=None, batches=BATCHES, **options):
    step = optfn.make_train_step(loss_fn, tx, **options)
    state = step.init(params or model())
    losses = []
    for batch in batches:
        state, metrics = step(state, batch)
        losses.append(metrics["loss"])
    return state, losses


def assert_same(found, expected, atol=0.0):
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_allclose(
            np.asarray(a, np.float64), np.asarray(b, np.float64), rtol=0, atol=atol
        )


ATTRIBUTES = {
    "layers/up": optfn.ParamAttr(learning_rate=0.5, weight_decay=0.0),
    "layers/bias": optfn.ParamAttr(trainable=False),
}
# The rules, and by how much the result may differ: XLA fuses another sum where it is not 0.
RULES = {
    "sgd": (lambda: optfn.sgd(0.1), 0),
    "adam": (lambda: optfn.adam(1e-2), 0),
    "attributes and a schedule": (
        lambda: optfn.adamw(optfn.schedules.noam(16, 4), param_attrs=ATTRIBUTES),
        0,
    ),
    "masters": (lambda: optfn.adam(1e-2, multi_precision=True), 0),
    "average": (
        lambda: optfn.chain(optfn.adam(1e-2), optfn.exponential_moving_average(0.9)),
        0,
    ),
    "accumulate": (lambda: optfn.accumulate(optfn.adam(1e-2), 2), 0),
    "asgd": (lambda: optfn.asgd(0.1, batch_num=2), 1e-7),
    "lamb": (lambda: optfn.lamb(1e-2, grad_clip=optfn.clip_by_value(0.01)), 1e-6),
    "muon": (lambda: optfn.muon(1e-2, matrices="layers/(up|down)"), 1e-6),
    "optax adamw": (lambda: optax.adamw(1e-2), 2e-7),
    "plateau": (
        lambda: optfn.chain(optfn.sgd(1.0), optfn.schedules.reduce_on_plateau(0.1, patience=1)),
        0,
    ),
}


@pytest.mark.parametrize("rule", thinned(RULES))
def test_a_step_is_that_without_it(rule):
    make, atol = RULES[rule]
    expected, losses = trained(make())
    found, of_found = trained(make(), update_in_backward=PATTERN)
    assert_same(found, expected, atol)
    np.testing.assert_allclose(losses, of_found, rtol=0 if atol == 0 else 1e-6)
    assert np.abs(expected.params["layers"]["up"] - model()["layers"]["up"]).max() > 1e-3


def test_params_of_bfloat16_have_masters_that_are_updated_in_backward():
    params = jax.tree.map(lambda p: p.astype(jnp.bfloat16), model())
    tx = optfn.adamw(1e-2, multi_precision=32)
    expected, _ = trained(tx, params=params)
    found, _ = trained(tx, params=params, update_in_backward=PATTERN)
    assert_same(found, expected)


def test_leaves_of_a_layer_that_are_not_selected_are_updated_by_the_step():
    def wider(params, ids):
        """What a layer closes over, and an integer beside x, pass through the scan."""
        scale = jnp.mean(params["head"])

        def fn(w, carry):
            x, number = carry
            return layer(w, x) * (1 + scale / (number + 1)), number + 1

        x, number = scan_layers(fn, params["layers"], (params["embed"][ids], 0))
        return jnp.mean((x @ params["head"] - number) ** 2)

    expected, _ = trained(optfn.adam(1e-2), wider)
    found, _ = trained(optfn.adam(1e-2), wider, update_in_backward="layers/(up|bias)")
    assert_same(found, expected, 1e-7)


def test_the_workers_of_a_mesh_average_the_gradient_of_each_layer():
    alone, _ = trained(optfn.adam(1e-2))
    found, _ = trained(optfn.adam(1e-2), mesh=data_mesh(4), update_in_backward=PATTERN)
    assert_same(found.params, alone.params, 2e-6)


def test_model_state_keys_and_aux_pass():
    def loss(params, state, ids, key):
        keep = jax.random.bernoulli(key, 0.5, (len(ids), 1))
        value = loss_fn(params, ids) + jnp.mean(keep)
        return value, (0.9 * state + value, {"kept": jnp.sum(keep)})

    options = {"model_state": True, "has_aux": True, "rng": 3}

    def run(**more):
        step = optfn.make_train_step(loss, optfn.adam(1e-2), **options, **more)
        return step(step.init(model(), jnp.zeros(())), BATCHES[0])

    assert_same(run(update_in_backward=PATTERN), run())


def test_steps_run_inside_a_scan():
    def last(rate):
        tx = optfn.adam(rate)
        step = optfn.make_train_step(loss_fn, tx, update_in_backward=PATTERN)

        def one(state, batch):
            return step(state, batch)[0], None

        return jax.lax.scan(one, step.init(model()), np.stack(BATCHES))[0].params

    expected, _ = trained(optfn.adam(1e-2))
    assert_same(jax.jit(last, static_argnums=0)(1e-2), expected.params, 1e-7)


@pytest.mark.optimized
def test_the_gradients_of_all_layers_are_never_in_memory_at_once():
    def temporaries(**options):
        step = optfn.make_train_step(loss_fn, optfn.adam(1e-2), **options)
        state = step.init(model(12, 128, 512))
        compiled = step.compiled.lower(state, BATCHES[0]).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    assert temporaries(update_in_backward=PATTERN) <= 0.5 * temporaries()


def scaling(factor_of):
    """Return a transform that multiplies by a number from the arguments of a training step."""

    def update(updates, state, params=None, **extra):
        factor = factor_of(params, **extra)
        return jax.tree.map(lambda g: -factor * g, updates), state

    return optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), update)


scale_by_loss = scaling(lambda params, *, value, **extra: value)
scale_by_loss_again = scaling(lambda params, *, value_fn, **extra: value_fn(params))


# What changes the optimizer so that a layer cannot be updated alone, and a word of the error.
DEPENDENT = {
    "a global norm": (lambda: optfn.adam(1e-2, grad_clip=optfn.clip_by_global_norm(1.0)), "norms"),
    "that of optax": (lambda: optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(1.0)), "norms"),
    "a guard": (lambda: optfn.skip_nonfinite(optfn.sgd(0.1)), "guards"),
    "that of optax too": (lambda: optax.apply_if_finite(optax.sgd(0.1), 3), "guards"),
    "spikes": (lambda: optfn.skip_spikes(optfn.sgd(0.1)), "skip_spikes/norms"),
    "a scale of the loss": (lambda: optfn.dynamic_loss_scale(optfn.sgd(0.1)), "depends on"),
    "recorded norms": (lambda: optfn.record_metrics(optfn.sgd(0.1)), "record_metrics/grad_norm"),
    "a recorded factor": (lambda: optfn.sgd(0.1, grad_clip=optfn.clip_by_norm(0.1)), "clip/factor"),
    "a polyak step": (lambda: optax.polyak_sgd(), "depends on"),
    "the loss": (lambda: scale_by_loss, "depends on 'the loss'"),
    "the loss again": (lambda: scale_by_loss_again, "evaluates the loss again"),
    "a line search": (lambda: optax.lbfgs(), "belongs to no single leaf"),
    "blocks of int8": (lambda: optfn.adam(1e-2, moment_dtype="int8"), "mu_scale/layers/bias"),
    "noise": (lambda: optax.chain(optax.add_noise(0.1, 0.5, 0), optax.sgd(0.1)), "is no number"),
}


@pytest.mark.parametrize("kind", DEPENDENT)
def test_an_optimizer_that_needs_other_gradients_is_refused(kind):
    make, words = DEPENDENT[kind]
    with pytest.raises(ValueError, match=f"^update_in_backward: .*{words}"):
        trained(make(), update_in_backward=PATTERN)


def test_an_exchange_is_refused():
    tx = optfn.chain(exchange(), optfn.sgd(0.1))
    with pytest.raises(ValueError, match="update_in_backward: tx exchanges gradients by itself"):
        trained(tx, mesh=data_mesh(2), update_in_backward=PATTERN)


VALUES = {
    "value_and_grad": jax.value_and_grad(loss_fn),
    "packed": True,
    "microbatches": 2,
    "recompute": ("x",),
    "tables": "embed",
    "local_steps": 2,
    "shard": "state",
}


@pytest.mark.parametrize("other", [b for a, b, _ in EXCLUDES if a == "update_in_backward"])
def test_an_option_that_excludes_it_is_named(other):
    with pytest.raises(
        ValueError, match=rf"update_in_backward='.*' cannot be combined with {other}.*: \w"
    ):
        optfn.make_train_step(
            loss_fn, optfn.sgd(0.1), update_in_backward=PATTERN, mesh=data_mesh(2),
            **{other: VALUES[other]},
        )  # fmt: skip


def scanned(params, x):
    return scan_layers(layer, params["layers"], x)


# Losses that a step with `update_in_backward` cannot take, and words of the error.
LOSSES = {
    "twice": (lambda p, x: jnp.mean(scanned(p, scanned(p, x))), "scan_layers gets it twice"),
    "tied": (lambda p, x: jnp.mean(scanned(p, x) @ p["layers"]["up"][0]), "outside of scan"),
    "cast": (
        lambda p, x: jnp.mean(scan_layers(layer, jax.tree.map(jnp.asarray, p["layers"]), x)),
        "outside of scan_layers",
    ),
    "an attribute": (lambda p, x: jnp.mean(scanned(p, x)) + p["layers"]["up"].sum(), "'sum'"),
    "an operator": (
        lambda p, x: jnp.mean(scanned(p, x)) + jnp.sum(2 * p["layers"]["up"]),
        r"leaf 'layers/up' .* the loss uses it outside of scan_layers \(mul\)",
    ),
    "a comparison": (
        lambda p, x: jnp.mean(scanned(p, x)) * (p["layers"]["up"] != 0),
        r"outside of scan_layers \(ne\)",
    ),
    "NumPy": (
        lambda p, x: jnp.mean(scanned(p, x)) * np.size(np.asarray(p["layers"]["up"])),
        r"outside of scan_layers \(a conversion to NumPy\)",
    ),
    "vmap": (lambda p, x: jnp.mean(jax.vmap(lambda x: scanned(p, x))(x)), "inside another"),
    "jit": (lambda p, x: jnp.mean(jax.jit(lambda x: scanned(p, x))(x)), "inside another"),
    "checkpoint": (
        lambda p, x: jnp.mean(jax.checkpoint(lambda x: scanned(p, x))(x)),
        "inside another",
    ),
    "scan": (
        lambda p, x: jnp.mean(jax.lax.scan(lambda x, _: (scanned(p, x), None), x, length=2)[0]),
        "inside another",
    ),
    "not at all": (lambda p, x: jnp.mean(x @ p["head"]), "does not depend on it"),
    "without a gradient": (
        lambda p, x: jnp.mean(x @ p["head"] + jax.lax.stop_gradient(scanned(p, x))),
        "does not depend on it",
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", LOSSES)
def test_a_loss_that_uses_layers_otherwise_is_refused(kind):
    loss, words = LOSSES[kind]
    with pytest.raises((ValueError, TypeError), match=words):
        trained(optfn.sgd(0.1), lambda p, ids: loss(p, p["embed"][ids]), update_in_backward=PATTERN)


def test_layers_that_no_stacked_marks_are_refused():
    params = model() | {"layers": model()["layers"].layers}
    with pytest.raises(ValueError, match=r"leaf 'layers/bias' .* no floating-point leaf of an"):
        trained(optfn.sgd(0.1), params=params, update_in_backward=PATTERN)


def test_a_pattern_that_matches_nothing_is_an_error():
    with pytest.raises(ValueError, match="update_in_backward: the pattern 'layer' matches no leaf"):
        trained(optfn.sgd(0.1), update_in_backward="layer")
