"""Epochs, which evaluation is better, means over batches, auxiliary numbers, several logs."""

import re
import warnings

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from problems import scripted

import optfn
from optfn.distributed import data_mesh

X = np.random.default_rng(0).normal(size=(6, 8, 3)).astype(np.float32)
TARGET = np.array([1.0, -2.0, 0.5], np.float32)


def loss_fn(w, batch):
    error = batch @ w - batch @ TARGET
    return jnp.mean(error**2), {"largest": jnp.max(jnp.abs(error)), "errors": error}


STEP = optfn.make_train_step(loss_fn, optfn.sgd(0.1), has_aux=True)


def run(batches=X, state=None, **options):
    state = STEP.init(jnp.zeros(3)) if state is None else state
    return optfn.fit(STEP, state, batches, **{"progress": False} | options)


def test_epochs_need_batches_that_can_be_iterated_again():
    with pytest.raises(ValueError, match=r"epochs=2 needs batches that can be iterated again.*gen"):
        run((x for x in X), epochs=2)
    source = iter(X)

    class Once:
        def __iter__(self):
            return source

    with pytest.raises(ValueError, match="batches gave no batch in epoch 2 of 2"):
        run(Once(), epochs=2)
    with pytest.raises(ValueError, match="of type iterator, which gives its batches only once: "):
        run(source)
    with pytest.raises(ValueError, match='evaluate_every="epoch" needs epochs'):
        run(evaluate=lambda w: 0.0, evaluate_every="epoch")
    with pytest.raises(ValueError, match="epochs must be >= 1"):
        run(epochs=0)


def test_lines_without_a_terminal_show_the_epoch(capfd):
    run(X[:3], epochs=2, progress=True)
    lines = capfd.readouterr().err.splitlines()
    assert lines[0].startswith("step 1 epoch 1 loss ")
    assert lines[-1].startswith("step 6 epoch 2 loss ")


def test_a_mode_is_one_of_two():
    with pytest.raises(ValueError, match="mode must be one of 'min', 'max'; got 'maximum'"):
        run(mode="maximum")


@pytest.mark.parametrize("option", [{"keep_best": True}, {"patience": 2}])
def test_a_number_that_rises_all_the_time_asks_once_which_way_is_right(option):
    words = 'evaluation rose from each evaluation to the next.*pass mode="max"'
    with pytest.warns(UserWarning, match=words) as caught:
        state, history = run(
            evaluate=scripted([0.5, 0.7, 0.9]), evaluate_every=1, steps=3, **option
        )
    assert [entry.filename for entry in caught] == [__file__]
    assert int(state.step) == (1 if "keep_best" in option else 3)
    assert history["evaluation"].tolist() == [0.5, 0.7, 0.9]


@pytest.mark.parametrize(
    ("values", "options"),
    [
        ([0.5, 0.7, 0.6], {"keep_best": True}),
        ([0.5, 0.7, 0.9], {}),
        # A run may overfit, or diverge, from its first evaluation on.
        ([0.5, 0.7, 0.9], {"keep_best": True, "mode": "min"}),
        ([0.9, 0.7, 0.5], {"patience": 2, "mode": "max"}),
    ],
)
def test_a_number_that_turns_or_whose_way_is_known_is_no_warning(values, options):
    run(evaluate=scripted(values), evaluate_every=1, steps=3, **options)


def test_one_number_as_aux_is_named_aux():
    def with_count(w, batch):
        return jnp.mean((batch @ w) ** 2), jnp.sum(batch > 0)

    _, history = optfn.minimize(
        with_count, optfn.sgd(0.1), jnp.zeros(3), X, has_aux=True, progress=False
    )
    assert history["aux"].tolist() == [int(np.sum(x > 0)) for x in X]


class Tensor:
    """An array of another library in the memory of the host, which `np.asarray` does not copy."""

    def __init__(self, x):
        self.x = x

    def __array__(self, dtype=None, copy=None):
        if self.x is None:
            raise TypeError("can't convert cuda:0 device type tensor to numpy")
        return self.x


def test_tensors_of_other_libraries_are_batches():
    state, history = run([Tensor(x) for x in X], evaluate=lambda w: w[0])
    want, losses = run()
    np.testing.assert_array_equal(history["loss"], losses["loss"])
    np.testing.assert_array_equal(state.params, want.params)
    words = r"leaf '' is a .*Tensor, and np.asarray fails: can't convert cuda:0"
    with pytest.raises(TypeError, match=words):
        run([Tensor(None)])


EXAMPLES = np.random.default_rng(1).normal(size=(21, 3)).astype(np.float32)
PARTS = [EXAMPLES[:8], EXAMPLES[8:16], EXAMPLES[16:]]


def test_means_over_batches_count_examples_and_compile_once_a_shape():
    traced = []

    def fn(w, batch):
        traced.append(batch.shape)
        error = batch @ (w - TARGET)
        return {"loss": jnp.mean(error**2), "wrong": jnp.mean(error > 0)}

    evaluate = optfn.over_batches(fn, [PARTS[0], Tensor(PARTS[1]), PARTS[2]])
    _, history = run(evaluate=evaluate, evaluate_every=3)
    w = np.zeros(3)
    for i, x in enumerate(X.astype(np.float64)):
        w = w - 0.1 * 2 / 8 * x.T @ (x @ (w - TARGET))
        if i in (2, 5):
            error = EXAMPLES @ (w - TARGET)
            loss, wrong = history["evaluation/loss"][i // 3], history["evaluation/wrong"][i // 3]
            np.testing.assert_allclose(loss, np.mean(error**2), rtol=1e-3)
            np.testing.assert_allclose(wrong, np.mean(error > 0), rtol=1e-6)
    assert traced == [(8, 3), (5, 3)]


def test_means_over_batches_with_model_state_and_on_a_mesh():
    """The params lie in eight parts; the short batch has fewer examples than there are devices."""
    params = {"w": np.arange(24, dtype=np.float32).reshape(8, 3)}
    spread = jax.device_put(params, NamedSharding(data_mesh(8), P("data")))

    def fn(params, scale, batch):
        return jnp.mean(scale * (batch["x"] @ params["w"].T))

    batches = [{"x": x, "id": np.arange(len(x))} for x in PARTS]
    evaluate = optfn.over_batches(fn, batches)
    expected = 2.0 * np.mean(EXAMPLES.astype(np.float64) @ params["w"].T)
    assert evaluate(spread, jnp.float32(2.0)) == pytest.approx(expected, rel=1e-4)
    assert evaluate(params, jnp.float32(2.0)) == pytest.approx(expected, rel=1e-4)


def test_batches_of_scalars_have_no_examples():
    with pytest.raises(ValueError, match=r"the same length; got shapes \(\)$"):
        optfn.over_batches(lambda w, x: w * x, [1.0, 2.0])(2.0)


def test_a_mean_over_batches_without_weight_is_nan():
    fn = optfn.over_batches(lambda w, x: optfn.Mean(jnp.sum(w * x), 0 * jnp.sum(x)), PARTS)
    assert np.isnan(fn(jnp.ones(3)))


@pytest.mark.parametrize(
    ("batches", "error", "words"),
    [
        (iter(PARTS), ValueError, "each evaluation iterates over batches again"),
        (3, TypeError, "batches must be an iterable; got 3"),
        ([], ValueError, "batches has no examples"),
        (
            [(PARTS[0], 1.0)],
            ValueError,
            r"must all have the same length; got shapes \(8, 3\), \(\)",
        ),
        ([PARTS[0], PARTS[0][:2]], ValueError, "the same keys for each batch"),
        ([PARTS[0][:1]], TypeError, "must return a number or a dict of numbers"),
    ],
)
def test_batches_without_a_mean(batches, error, words):
    def fn(w, batch):
        return {2: {"a": 0.0}, 1: batch}.get(len(batch), {"b": 0.0})

    with pytest.raises(error, match=words):
        optfn.over_batches(fn, batches)(jnp.zeros(3))


def test_an_empty_batch_counts_nothing():
    evaluate = optfn.over_batches(lambda w, x: jnp.mean(x @ w), [*PARTS, EXAMPLES[:0]])
    expected = np.mean(EXAMPLES.astype(np.float64) @ TARGET)
    assert evaluate(TARGET) == pytest.approx(expected, rel=1e-4)
    chex.assert_type(evaluate(TARGET), float)


@pytest.mark.parametrize(
    ("monitor", "is_said"),
    [
        *((name, True) for name in ("accuracy", "val_accuracy", "AUC", "f1-macro", "top5/acc")),
        *((name, False) for name in ("loss", "accumulated", "perplexity")),
    ],
)
def test_a_number_that_should_rise_needs_a_mode(monitor, is_said):
    """One tie hides from the other warning that all evaluations went the wrong way."""

    def go(**options):
        values = iter([0.5, 0.7, 0.7, 0.9])
        evaluate = lambda w: {monitor: next(values)}  # noqa: E731
        options |= {"evaluate_every": 1, "monitor": monitor, "keep_best": True}
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            state, _ = run(evaluate=evaluate, steps=4, **options)
        return int(state.step), [str(entry.message) for entry in caught]

    words = f'monitor={monitor!r} looks like a number that should rise.*pass mode="max"'
    step, said = go()
    assert step == 1 and len(said) == is_said and all(re.match(words, x) for x in said)
    assert go(mode="max") == (4, [])
    assert go(mode="min") == (1, [])


def test_keep_best_after_a_run_that_evaluated_nothing_compares_the_state_that_it_resumes_from(
    tmp_path,
):
    run(steps=4, checkpoint=tmp_path)
    options = {"evaluate_every": 1, "keep_best": True, "checkpoint": tmp_path}
    state, history = run(evaluate=scripted([1.0, 3.0, 2.0]), steps=6, **options)
    assert int(state.step) == 4 and history["evaluation_step"].tolist() == [5, 6]


def test_batches_on_one_device_are_evaluated_beside_params_on_a_mesh():
    """As a training step takes them."""
    mesh = data_mesh(4)
    whole = NamedSharding(mesh, P())
    params = jax.device_put(jnp.full(3, 2.0), whole)
    batches = [jax.device_put(jnp.full((2, 3), x), jax.devices()[1]) for x in (1.0, 3.0)]
    evaluate = optfn.over_batches(lambda w, x: jnp.mean(w * x), batches)
    assert evaluate(params) == 4.0
