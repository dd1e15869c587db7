"""A loss that is a `Mean` gives the step of one big batch, in every way to divide the batch.

The reference is the quotient as a plain loss, on one device and the whole batch, in float64.
"""

import functools
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from grids import nightly
from jax.sharding import Mesh

import optfn
from optfn.distributed import pipeline_value_and_grad, stack_stages
from optfn.loss.mean import Mean

EXAMPLES, WIDTH, STEPS, TOLERANCE = 32, 8, 3, 1e-12


def normal(seed, *shape):
    return np.random.default_rng(seed).normal(size=shape)


X = normal(0, EXAMPLES, WIDTH)
# The first worker of 8 has no tokens, and some microbatches have none.
MASK = (np.random.default_rng(1).random((EXAMPLES, WIDTH)) < 0.4).astype(np.float64)
MASK[:4] = MASK[8:12] = 0
PARAMS = {"w": normal(2, WIDTH, 16), "v": normal(3, 16), "layers": 0.3 * normal(4, 3, 16, 16)}


@pytest.fixture(autouse=True)
def x64():
    with jax.enable_x64(True):
        yield


def squares(params, x):
    """Return the loss of each token, (examples, WIDTH)."""

    def layer(h, w):
        return jnp.tanh(h @ w), None

    h = jax.lax.scan(jax.checkpoint(layer), jnp.tanh(x @ params["w"]), params["layers"])[0]
    return ((h * params["v"])[:, :WIDTH] - x) ** 2


def plain(params, batch):
    """Return the mean over tokens of a whole batch, and two numbers of it."""
    x, mask = batch
    each = squares(params, x)
    first = jnp.sum(each[:, 0] * mask[:, 0]) / jnp.sum(mask[:, 0] > 0)
    return jnp.sum(each * mask) / jnp.sum(mask), {"first": first, "each": jnp.mean(each)}


def mean_of(params, batch):
    """Return the same as Means; the total of a part without tokens is 0/0, as its gradient is."""
    x, mask = batch
    each = squares(params, x)
    count = jnp.sum(mask)
    first = Mean(jnp.sum(each[:, 0] * mask[:, 0]), jnp.sum(mask[:, 0] > 0))
    return Mean(jnp.sum(each * mask) / count * count, count), {
        "first": first,
        "each": jnp.mean(each),
    }


def mesh_of(*sizes, names=("data", "model")):
    devices = np.array(jax.devices()[: np.prod(sizes)]).reshape(sizes)
    return Mesh(devices, names[: len(sizes)])


def divided():
    return {"mesh": mesh_of(8), "shard": "params"}


def adam():
    return optfn.adam(1e-2)


def train(loss, tx=adam, params=PARAMS, batch=(X, MASK), steps=STEPS, **options):
    step = optfn.make_train_step(loss, tx(), **options)
    state = step.init(jax.tree.map(jnp.asarray, params))
    for _ in range(steps):
        state, metrics = step(state, batch)
    return jax.device_get((optfn.unpack(state.params), metrics))


@functools.cache
def expected():
    with jax.enable_x64(True):
        return train(plain, has_aux=True)


def assert_near(a, b, tolerance=TOLERANCE):
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=0, atol=tolerance), a, b)


def test_a_gradient_flows_through_a_weight_that_depends_on_params():
    def mean(params, batch):
        x, mask = batch
        weights = mask * jax.nn.sigmoid(x @ params["w"])[:, :WIDTH]
        return Mean(jnp.sum(squares(params, x) * weights), jnp.sum(weights))

    def quotient(params, batch):
        return mean(params, batch).total / mean(params, batch).weight

    assert_near(train(mean, **divided())[0], train(quotient)[0])
    with pytest.raises(ValueError, match="stop_gradient"):
        train(mean, microbatches=4)


def test_weights_of_accumulate_in_a_loop_of_your_own():
    """A call without a weight counts 1; weights of 0 alone take no step."""
    tx = optfn.accumulate(optfn.sgd(1.0), 3)
    params = jnp.zeros(2)
    g = [jnp.array([1.0, 2.0]), jnp.array([4.0, -1.0]), jnp.array([0.0, 3.0])]

    def run(weights):
        state, total = tx.init(params), jnp.zeros(2)
        for x, w in zip(g, weights, strict=True):
            more = {} if w is None else {"weight": w}
            u, state = tx.update(x, state, params, **more)
            total += u
        assert int(state.micro_step) == 0
        return total

    np.testing.assert_allclose(run([None] * 3), -(g[0] + g[1] + g[2]) / 3)
    np.testing.assert_allclose(run([2, 5.0, 1]), -(2 * g[0] + 5 * g[1] + g[2]) / 8)
    np.testing.assert_allclose(run([None, None, 0.5]), -(g[0] + g[1] + 0.5 * g[2]) / 2.5)
    np.testing.assert_array_equal(run([0, 0.0, jnp.zeros(())]), 0)


def loss_alone(params, batch):
    return mean_of(params, batch)[0]


def test_a_value_and_grad_returns_the_gradient_of_its_own_quotient():
    def value_and_grad(params, batch):
        return loss_alone(params, batch), jax.grad(lambda p: plain(p, batch)[0])(params)

    params, metrics = train(None, value_and_grad=value_and_grad, mesh=mesh_of(4, 2), microbatches=2)
    assert_near(params, expected()[0])
    assert_near(metrics["loss"], expected()[1]["loss"])


def test_line_searches_see_the_same_loss():
    def quotient(params, batch):
        return plain(params, batch)[0]

    def tx():
        return optax.chain(optax.sgd(0.1), optax.scale_by_backtracking_linesearch(4))

    want = train(quotient, tx, steps=2)[0]
    assert_near(train(loss_alone, tx, steps=2, **divided())[0], want, 1e-9)


BLOCKS = [0.5 * normal(i, WIDTH, WIDTH) for i in range(4)]


@pytest.mark.nightly
def test_a_pipeline_of_a_list_of_functions():
    """tests/reference_run draws those of one function."""

    def stage(w, x):
        return jnp.tanh(x @ w)

    def loss(y, target):
        x, mask = target
        return Mean(jnp.sum((y - x) ** 2 * mask) / mask.sum() * mask.sum(), mask.sum())

    def whole(params, batch):
        x, target = batch
        for w in params:
            x = stage(w, x)
        return jnp.sum((x - target[0]) ** 2 * target[1]) / jnp.sum(target[1])

    value_and_grad = pipeline_value_and_grad(
        [stage] * 4, loss, mesh=mesh_of(4, names=("stage",)), num_microbatches=4
    )
    options = {"params": BLOCKS, "batch": (X, (X[::-1].copy(), MASK))}
    found, metrics = train(None, value_and_grad=value_and_grad, **options)
    want, of_want = train(whole, **options)
    assert_near(found, want)
    assert_near(metrics["loss"], of_want["loss"])
    assert metrics["weight"] == MASK.sum()


def test_a_pipeline_refuses_a_weight_that_depends_on_params():
    def loss(y, target):
        return Mean(jnp.sum((y - target) ** 2), jnp.sum(jax.nn.sigmoid(y)))

    value_and_grad = pipeline_value_and_grad(
        lambda w, x: x @ w, loss, mesh=mesh_of(4, names=("stage",)), num_microbatches=4
    )
    with pytest.raises(ValueError, match=r"weight of the loss.*stop_gradient"):
        value_and_grad(stack_stages(list(map(jnp.asarray, BLOCKS))), X, X)


EVALUATED = {
    "a Mean": (lambda p, b: mean_of(p, b)[0], lambda p, b: plain(p, b)[0]),
    "a dict": (
        lambda p, b: {"loss": mean_of(p, b)[0], "each": jnp.mean(squares(p, b[0]))},
        lambda p, b: {"loss": plain(p, b)[0], "each": jnp.mean(squares(p, b[0]))},
    ),
}


@pytest.mark.parametrize("kind", EVALUATED)
def test_over_batches_is_the_mean_over_tokens_of_all_batches(kind):
    of_batches, of_all = EVALUATED[kind]
    batches = [(X[i : i + 7], MASK[i : i + 7]) for i in range(0, EXAMPLES, 7)]
    batches.append((X[:4], 0 * MASK[:4]))  # all padding
    found = optfn.over_batches(of_batches, batches[:-1] if kind == "a dict" else batches)(PARAMS)
    assert_near(found, jax.tree.map(float, of_all(PARAMS, (X, MASK))))


def test_a_run_names_a_step_without_weight_and_evaluates_a_mean():
    batches = [(X[:8], MASK[:8]), (X[:8], 0 * MASK[:8]), (X, MASK)]
    with pytest.warns(UserWarning, match="add up to 0 in step 2") as caught:
        state, history = optfn.minimize(
            loss_alone, optfn.sgd(0.1), PARAMS, batches, progress=False, on_nonfinite="stop",
            evaluate=lambda params: loss_alone(params, (X, MASK)),
        )  # fmt: skip
    assert len(caught) == 1
    assert_near(history["evaluation"][-1], plain(state.params, (X, MASK))[0], 1e-9)


def test_count_tokens_by_weight_needs_a_mean(tmp_path):
    with pytest.raises(ValueError, match=r"count_tokens='weight'.*optfn.Mean"):
        optfn.minimize(
            lambda p, b: plain(p, b)[0], optfn.sgd(0.1), PARAMS, [(X, MASK)], progress=False,
            log=tmp_path / "log.jsonl", count_tokens="weight",
        )  # fmt: skip


def test_weights_may_be_numbers_and_integers():
    want, of_want = train(lambda p, b: jnp.mean(squares(p, b[0])), steps=1)
    for kind, parts in ((int, 4), (np.int32, 1)):
        params, metrics = train(
            lambda p, b: Mean(jnp.sum(squares(p, b[0])), kind(32 * WIDTH // parts)),  # noqa: B023
            steps=1,
            microbatches=parts,
        )
        assert_near(params, want)
        assert_near(metrics["loss"], of_want["loss"])


BAD = {
    "complex": (lambda x: Mean(1j * x, 1), TypeError, "total of a Mean must be real"),
    "text": (lambda x: Mean(x, "tokens"), TypeError, "weight of a Mean must be a number"),
    "shape": (lambda x: Mean(x, jnp.ones(3)), ValueError, "same shape"),
    "array": (lambda x: Mean(x * jnp.ones(3), jnp.ones(3)), ValueError, "must return a scalar"),
}


@pytest.mark.parametrize("kind", BAD)
def test_what_is_no_mean_is_an_error(kind):
    make, error, match = BAD[kind]
    with pytest.raises(error, match=match):
        train(lambda p, b: make(jnp.sum(squares(p, b[0]))))


def test_a_mean_is_no_pair():
    for options in ({"has_aux": True}, {"model_state": True}):
        step = optfn.make_train_step(lambda p, *b: Mean(jnp.sum(p), 1), optfn.sgd(0.1), **options)
        given = [jnp.ones(2)] if options.get("model_state") else []
        with pytest.raises(TypeError, match="got a Mean"):
            step(step.init(jnp.ones(2), *given), np.ones(2))


@pytest.mark.optimized
def test_the_pass_that_gives_the_weight_is_dropped():
    """Under shard="params" the weight is known before the loss is differentiated, once."""

    def lowered(loss):
        step = optfn.make_train_step(loss, adam(), **divided())
        return step.lower(jax.tree.map(jnp.asarray, PARAMS), (X, MASK))

    def of_examples(params, batch):
        return jnp.mean(squares(params, batch[0]))

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert "weight" not in train(of_examples)[1]
    of_mean, plain = lowered(loss_alone), lowered(of_examples)
    # A sum of weights and one of totals, both of one number.
    assert of_mean.as_text().count("all_reduce") - plain.as_text().count("all_reduce") >= 1
    of_mean, plain = (x.compile().as_text() for x in (of_mean, plain))
    for name in ("all-gather(", "reduce-scatter(", " dot("):
        assert of_mean.count(name) == plain.count(name)


@pytest.mark.parametrize(
    ("options", "wrap"),
    [
        ({"shard": "params"}, jax.jit),
        nightly({"shard_tables": True, "tables": "w"}, lambda loss: loss),
    ],
)
def test_a_side_effect_of_a_mean_happens_once(wrap, options):
    seen = []

    def total(params, rows):
        jax.debug.callback(lambda x: seen.append(float(x)), jnp.sum(rows))
        return jnp.sum(params["w"][rows] ** 2)

    losses = [lambda p, rows: total(p, rows), lambda p, rows: Mean(total(p, rows), rows.size)]
    found = []
    for loss in losses:
        step = optfn.make_train_step(wrap(loss), adam(), mesh=mesh_of(8), **options)
        state, _ = step(step.init({"w": jnp.ones((64, 256))}), np.arange(16))
        jax.block_until_ready(state)
        jax.effects_barrier()
        found.append(sorted(seen))
        seen.clear()
    assert found[0] == found[1] == [4.0 * i + 1 for i in range(8)]


@pytest.mark.parametrize(
    "expression",
    [
        lambda mean: mean + mean,
        lambda mean: mean + 1.0,
        lambda mean: 0.5 * mean,
        lambda mean: jnp.float32(0.5) * mean,
        lambda mean: mean / 2,
        lambda mean: sum([mean, mean]),
    ],
)
def test_a_mean_has_no_arithmetic(expression):
    with pytest.raises(TypeError, match=r"a Mean has no arithmetic.*Mean\(0.5 \* total, weight\)"):
        expression(optfn.Mean(jnp.ones(()), 3))


@pytest.mark.parametrize(
    ("options", "means"),
    [
        ({"microbatches": 2}, [[2.5, None]]),
        ({"workers": 2}, [[2.5], [None]]),
        ({"workers": 2, "shard": "params"}, [[2.5], [None]]),
        ({"workers": 2, "shard": "state", "microbatches": 2}, [[1.5, 3.5], [None, None]]),
    ],
)
def test_statistics_of_no_examples_stay_as_they_were(options, means):
    """Of a worker or a microbatch without weight, whose mean is 0/0; the batch has weight."""

    def loss_fn(w, state, batch):
        x, mask = batch
        count = jnp.sum(mask)
        mean = 0.9 * state["mean"] + 0.1 * jnp.sum(mask * x) / count
        new = {"mean": mean, "sum": state["sum"] + jnp.sum(x), "seen": state["seen"] + 1}
        return optfn.Mean(jnp.sum(mask * (w * x - 1) ** 2), count), new

    options = dict(options)
    workers = options.pop("workers", None)
    mesh = workers and optfn.distributed.data_mesh(workers)
    step = optfn.make_train_step(loss_fn, optfn.sgd(0.01), model_state=True, mesh=mesh, **options)
    first = {"mean": jnp.float32(4.0), "sum": jnp.float32(0.0), "seen": jnp.int32(0)}
    batch = np.arange(1, 9, dtype=np.float32), np.float32([1, 1, 1, 1, 0, 0, 0, 0])
    state, _ = step(step.init(jnp.ones(()), first), batch)
    ends = []
    for of_worker in means:
        end = 4.0
        for mean in of_worker:
            end = end if mean is None else 0.9 * end + 0.1 * mean
        ends.append(end)
    np.testing.assert_allclose(state.model_state["mean"], np.mean(ends), rtol=1e-6)
    # A statistic that is finite counts, as without weights.
    np.testing.assert_allclose(state.model_state["sum"], 36 / len(means))
    assert int(state.model_state["seen"]) == len(means[0])
