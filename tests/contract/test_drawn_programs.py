"""Ordinary programs, drawn, train without a word: no judge warns, skips, refuses or changes a run.

A program is a model with its data, an optimizer with wrappers, and options of the step and the
loop: 200 steps of six programs in CI, 10,000 steps of 60 at night. Warnings are errors in tests.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from grids import nightly
from jax.sharding import Mesh

import optfn
from optfn.distributed import exchange, quantize, top_k

SHORT, LONG, BATCH, FEATURES, ROWS = 200, 10_000, 16, 8, 32
MESH = Mesh(np.array(jax.devices()[:2]), ("data",))
TRUTH = np.random.default_rng(0).normal(size=(FEATURES, 3)).astype(np.float32)


def is_guard(x):
    return hasattr(x, "skipped")


# Models: params, and a loss of (params, batch, key).
def dense(rng, *shape):
    return jnp.asarray(rng.normal(size=shape) / np.sqrt(shape[0]), jnp.float32)


def linear(rng):
    def loss(p, batch, key):
        x, y, _, _ = batch
        return jnp.mean((x.astype(p["w"].dtype) @ p["w"] + p["b"] - y).astype(jnp.float32) ** 2)

    return {"w": dense(rng, FEATURES, 3), "b": jnp.zeros(3)}, loss


def classifier(rng):
    def loss(p, batch, key):
        x, _, label, _ = batch
        h = jax.nn.relu(x.astype(p["in"].dtype) @ p["in"])
        h = h * jax.random.bernoulli(key, 0.9, h.shape).astype(h.dtype)
        logits = (h @ p["out"]).astype(jnp.float32)
        return optax.softmax_cross_entropy_with_integer_labels(logits, label).mean()

    return {"in": dense(rng, FEATURES, 16), "out": dense(rng, 16, 3)}, loss


def tokens(rng):
    """An embedding, and a mean over the tokens that are not padding."""

    def loss(p, batch, key):
        _, _, label, ids = batch
        x = p["table"][ids % ROWS]
        logits = (x @ p["out"]).astype(jnp.float32)
        labels = jnp.broadcast_to(label[:, None], ids.shape)
        nll = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
        mask = ids < 3 * ROWS // 4
        return optfn.Mean(jnp.sum(nll * mask), jnp.sum(mask))

    return {"table": dense(rng, ROWS, 8), "out": dense(rng, 8, 3)}, loss


MODELS = {"linear": linear, "classifier": classifier, "tokens": tokens}


def batches(seed, steps):
    rng = np.random.default_rng([seed, 1])
    for _ in range(steps):
        x = rng.normal(size=(BATCH, FEATURES)).astype(np.float32)
        y = x @ TRUTH + 0.1 * rng.normal(size=(BATCH, 3)).astype(np.float32)
        yield x, y, y.argmax(1), rng.integers(0, ROWS, (BATCH, 5))


# Rates, rules, wrappers.
def draw_rate(rng, steps):
    peak = float(10 ** rng.uniform(-4, -2))
    return [
        peak,
        optfn.schedules.warmup_cosine(peak, warmup_steps=steps // 10, total_steps=steps),
        optfn.schedules.step_decay(peak, steps // 4, 0.5),
        optax.cosine_decay_schedule(peak, steps, 0.1),
    ][rng.integers(4)]


RULES = {
    "sgd": lambda r, **k: optfn.sgd(r, **k),
    "momentum": lambda r, **k: optfn.momentum(r, 0.9, **k),
    "adam": lambda r, **k: optfn.adam(r, **k),
    "adamw": lambda r, **k: optfn.adamw(r, weight_decay=0.01, **k),
    "adamw int8": lambda r, **k: optfn.adamw(r, moment_dtype="int8", **k),
    "lamb": lambda r, **k: optfn.lamb(r, **k),
    "lars": lambda r, **k: optfn.lars(r, 0.9, **k),
    "adagrad": lambda r, **k: optfn.adagrad(r, **k),
    "rmsprop": lambda r, **k: optfn.rmsprop(r, **k),
    "ftrl": lambda r, **k: optfn.ftrl(r, **k),
    "muon": lambda r, **k: optfn.muon(r, **k),
    "optax adam": lambda r, **k: optax.adam(r),
    "optax lion": lambda r, **k: optax.lion(r),
}
AROUND = {
    "nothing": lambda tx: tx,
    "guards": lambda tx: optfn.skip_nonfinite(optfn.skip_spikes(tx)),
    "metrics": optfn.record_metrics,
    "average": lambda tx: optfn.chain(tx, optfn.exponential_moving_average(0.99)),
    "model average": lambda tx: optfn.chain(tx, optfn.model_average(0.15)),
    "accumulate": lambda tx: optfn.accumulate(tx, 3),
    "loss scale": optfn.dynamic_loss_scale,
    "exchange": lambda tx: optfn.chain(exchange(quantize(8), min_size=1), tx),
    "top_k": lambda tx: optfn.chain(exchange(top_k(0.25), min_size=1), tx),
}
WAYS = {
    "one device": {},
    "mesh": {"mesh": MESH},
    "state": {"mesh": MESH, "shard": "state"},
    "params": {"mesh": MESH, "shard": "params"},
    "compiler": {"mesh": MESH, "partitioner": "compiler"},
    "microbatches": {"microbatches": 2},
    "local steps": {"mesh": MESH, "local_steps": 2},
    "packed": {"packed": True},
}


def draw(seed):
    """Return the names of a drawn program; what excludes each other is drawn again."""
    rng = np.random.default_rng(seed)
    while True:
        case = {
            "model": rng.choice(list(MODELS)),
            "rule": rng.choice(list(RULES)),
            "around": rng.choice(list(AROUND)),
            "way": rng.choice(list(WAYS)),
            "masters": bool(rng.integers(2)),
            "clip": bool(rng.integers(2)),
        }
        foreign = case["rule"].startswith("optax")
        exchanges, way = case["around"] in ("exchange", "top_k"), case["way"]
        # The errors that say so have tests of their own.
        excluded = [
            foreign and case["masters"],
            exchanges and way != "mesh",
            way == "local steps"
            and (case["masters"] or case["around"] in ("average", "model average", "accumulate")),
            case["masters"] and case["around"] in ("average", "model average"),
            way == "packed" and case["rule"] in ("muon", "adamw int8"),
        ]
        if not any(excluded):
            return {k: x if isinstance(x, bool) else str(x) for k, x in case.items()}


def train(seed, steps):
    rng, case = np.random.default_rng([seed, 2]), draw(seed)
    params, loss = MODELS[case["model"]](rng)
    options = {}
    if case["masters"]:
        params = jax.tree.map(lambda x: x.astype(jnp.bfloat16), params)
        options["multi_precision"] = [True, 32, 24][rng.integers(3)]
    if case["clip"]:
        options["grad_clip"] = optfn.clip_by_global_norm(1.0)
    tx = AROUND[case["around"]](RULES[case["rule"]](draw_rate(rng, steps), **options))
    state, history = optfn.minimize(
        loss, tx, params, batches(seed, steps // WAYS[case["way"]].get("local_steps", 1)),
        rng=seed, progress=False, on_nonfinite="stop", **WAYS[case["way"]],
        evaluate=lambda p: float(sum(jnp.sum(jnp.abs(x)) for x in jax.tree.leaves(p))),
        evaluate_every=max(steps // 5, 2), keep_best=bool(rng.integers(2)), mode="min",
    )  # fmt: skip
    return state, history


CASES = [*range(6), *(nightly(seed) for seed in range(6, 60))]


@pytest.mark.parametrize("seed", CASES)
def test_a_drawn_program_trains_without_a_word(seed, request):
    steps = LONG if request.config.getoption("--nightly") else SHORT
    state, history = train(seed, steps)
    loss = history["loss"]
    assert np.isfinite(loss).all(), draw(seed)
    allowed = 20 + steps // 2000 if draw(seed)["around"] == "loss scale" else 0
    guards = [x for x in jax.tree.leaves(state.opt_state, is_leaf=is_guard) if is_guard(x)]
    assert all(np.max(x.skipped) <= allowed for x in guards), draw(seed)
