"""Plausible mistakes of a first program: each error names the argument or leaf, and the remedy."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh

import optfn
from optfn.distributed import (
    PipelineParams,
    exchange,
    pipeline_value_and_grad,
    quantize,
    scan_layers,
    stack_stages,
)

PARAMS = {"head": {"w": jnp.ones((4, 3)), "b": jnp.zeros(3)}, "scale": jnp.ones(3)}


def attrs(*patterns):
    return {pattern: optfn.ParamAttr(trainable=i == 0) for i, pattern in enumerate(patterns)}


class ForeignArray:
    """An array of another library, as a tensor of torch looks to NumPy."""

    shape = (3,)
    dtype = type("dtype", (), {"__module__": "torch"})()


ForeignArray.__module__ = "torch"


def loss_with_state(params, state, x):
    return jnp.mean(params["scale"] * x), (state, {"mean": jnp.mean(x)})


def minimize_with_state(loss_fn, **options):
    return optfn.minimize(
        loss_fn, optfn.sgd(0.1), PARAMS, [np.ones(3)], model_state={"mean": jnp.zeros(3)},
        progress=False, **options,
    )  # fmt: skip


def evaluate(fn):
    return optfn.over_batches(fn, [np.ones(3)])(PARAMS)


MISTAKES = {
    "a pattern after one that matches all its leaves": (
        lambda: optfn.adam(0.1, param_attrs=attrs(".*", "head/.*")).init(PARAMS),
        ValueError, r"param_attrs: the pattern 'head/\.\*' has no effect.*'head/b', 'head/w'",
    ),
    "a compressor after one for all leaves": (
        lambda: exchange({".*": quantize(4), "head/w": None}, min_size=1).init(PARAMS),
        ValueError, "compressor: the pattern 'head/w' has no effect",
    ),
    "an argument of torch": (
        lambda: optfn.sgd(lr=0.1),
        TypeError, r"sgd\(\) .*'lr'; its arguments are learning_rate, grad_clip",
    ),
    "a forgotten argument of a schedule": (
        lambda: optfn.schedules.cosine(0.1, 50),
        TypeError, r"cosine\(\) .*'epochs'; its arguments are .*step_each_epoch, epochs",
    ),
    "a tensor among the params": (
        lambda: optfn.make_train_step(lambda p, x: 0.0, optfn.sgd(0.1)).init({"w": ForeignArray()}),
        TypeError, "parameter 'w' must be an array of JAX or NumPy; got a ForeignArray of torch",
    ),
    "a state of optax": (
        lambda: optfn.scale_by_adam().update(PARAMS, optax.scale_by_adam().init(PARAMS), PARAMS),
        TypeError, "must be a ScaleByAdamState.*got ScaleByAdamState of optax",
    ),
    "aux without has_aux": (
        lambda: minimize_with_state(loss_with_state),
        TypeError, r"loss_fn returned \(loss, \(model_state, aux\)\); pass has_aux=True",
    ),
    "a metric of too few arguments": (
        lambda: evaluate(lambda params: 0.0),
        TypeError, r"over_batches: fn is called with \(params, batch\); it takes \(params\)",
    ),
    "a metric for each example": (
        lambda: evaluate(lambda params, x: jnp.ones(1000)),
        TypeError, "over_batches: fn must return a number or a dict of numbers; got .{100,160}$",
    ),
    "arguments of value_and_grad swapped": (
        lambda: optfn.sparse.value_and_grad("head/w", lambda p: 0.0),
        TypeError, "loss_fn must be a function .*'head/w'",
    ),
    "microbatches that do not divide a bare array": (
        lambda: optfn.minimize(
            lambda p, x: jnp.mean(p["scale"] * x), optfn.sgd(0.1), PARAMS, [np.ones((4, 3))],
            microbatches=3, progress=False,
        ),
        ValueError, "part of the batch; it has length 4",
    ),
    "an average that nothing keeps": (
        lambda: optfn.minimize(
            lambda p, x: jnp.mean(p["scale"] * x), optfn.sgd(0.1), PARAMS, [np.ones(3)],
            evaluate=lambda p: 0.0, evaluate_average=True, progress=False,
        ),
        ValueError, "evaluate_average=True: the state has no average",
    ),
    "a loss with aux as a metric": (
        lambda: evaluate(lambda params, x: (jnp.mean(x), {})),
        TypeError, r"got a tuple.*pass lambda \*arguments: loss_fn\(\*arguments\)\[0\]",
    ),
    "a loss with a key as a metric": (
        lambda: evaluate(lambda params, x, key: jnp.mean(x)),
        TypeError, r"over_batches: fn is called with \(params, batch\).*It gets no random key",
    ),
    "the state of another optimizer of optax": (
        lambda: step_with_state_of(optax.adam(0.1), optax.sgd(0.1, momentum=0.9)),
        TypeError, r"by another optimizer: it has 'scale_by_adam/count'.*step\.init\(state\.params",
    ),
    "the state of optax": (
        lambda: step_with_state_of(optax.adam(0.1), optfn.adam(0.1)),
        TypeError, r"'scale_by_adam/count'.*rename the counters of optax: docs/moving/optax\.md",
    ),
    "the state of another optimizer": (
        lambda: step_with_state_of(optfn.adam(0.1), optax.lion(0.1)),
        TypeError, "the state was made by another optimizer: it has 'scale_by_adam/step'",
    ),
    "several batches ahead": (
        lambda: minimize_with_state(loss_with_state, has_aux=True, prefetch=8),
        ValueError, "prefetch must be one of 0, 1; got 8",
    ),
    "layers of several lengths": (
        lambda: scan_layers(lambda p, x: x, {"a": jnp.ones((4, 2)), "b": jnp.ones((3, 2))}, 0.0),
        ValueError, r"scan_layers: .*got shapes \(4, 2\), \(3, 2\)",
    ),
}  # fmt: skip


def step_with_state_of(first, second):
    def loss_fn(p, x):
        return jnp.mean(p["scale"] * x)

    state = optfn.make_train_step(loss_fn, first).init(PARAMS)
    return optfn.make_train_step(loss_fn, second)(state, np.ones(3))


@pytest.mark.parametrize("name", MISTAKES)
def test_an_error_names_the_mistake(name):
    call, error, message = MISTAKES[name]
    with pytest.raises(error, match=message):
        call()


def test_a_stage_that_names_its_shared_params_otherwise_is_told_the_name():
    mesh = Mesh(np.array(jax.devices()[:2]), ("stage",))
    params = PipelineParams(stack_stages([{"w": np.eye(2)}] * 2), {"table": np.ones((2, 2))})
    batch = np.ones((2, 2), np.float32), np.zeros((2, 2), np.float32)

    def run(stage_fn, loss_fn):
        value_and_grad = pipeline_value_and_grad(stage_fn, loss_fn, mesh=mesh, num_microbatches=1)
        return value_and_grad(params, batch)[0]

    def stage(p, x, shared):
        return x @ p["w"] @ shared["table"]

    loss = run(stage, lambda y, t: jnp.mean((y - t) ** 2))
    np.testing.assert_allclose(loss, 16.0)  # each stage doubles ones
    with pytest.raises(TypeError, match=r"stage_fn is called with.*a parameter `shared`"):
        run(lambda p, x, table: x, lambda y, t, shared: jnp.mean(y))
    with pytest.raises(TypeError, match=r"loss_fn is called with.*a parameter `shared`"):
        run(stage, lambda y, t, table: jnp.mean(y))


HALF, FROZEN = optfn.ParamAttr(learning_rate=0.5), optfn.ParamAttr(trainable=False)


@pytest.mark.parametrize(
    ("attributes", "bias"),
    [
        ({"head/w": HALF, "head/.*": FROZEN}, 0.0),
        ({"head/.*": HALF, "scale": optfn.ParamAttr(), ".*": FROZEN}, -0.5),
    ],
)
def test_a_wide_pattern_after_narrow_ones_gets_the_other_leaves(attributes, bias):
    """If there are any: a last pattern for the rest may find no leaf left."""
    tx = optfn.sgd(1.0, param_attrs=attributes)
    updates, _ = tx.update(jax.tree.map(jnp.ones_like, PARAMS), tx.init(PARAMS), PARAMS)
    np.testing.assert_array_equal(updates["head"]["w"], -0.5 * np.ones((4, 3)))
    np.testing.assert_array_equal(updates["head"]["b"], bias * np.ones(3))
    np.testing.assert_array_equal(updates["scale"], -np.ones(3))


def test_names_of_a_checkpoint_that_does_not_fit_are_those_that_only_takes(tmp_path):
    step = optfn.make_train_step(lambda p, x: jnp.mean(p["head"]["w"] * x), optfn.sgd(0.1))
    optfn.save_checkpoint(tmp_path, step.init(PARAMS))
    wider = {**PARAMS, "head": {"w": jnp.ones((4, 10)), "b": jnp.zeros(10)}}
    with pytest.raises(ValueError, match=r" 'params/head/w' has shape \(4, 3\).*only="):
        optfn.restore_checkpoint(tmp_path, step.init(wider))
    with pytest.raises(TypeError, match="params must be the parameters alone; got a TrainState"):
        optfn.load_params(tmp_path, step.init(PARAMS))
