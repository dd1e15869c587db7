"""Every pair of features of a training step: it trains as without those that only lay out arrays.

A feature changes the optimizer, the loss or the options. The reference has two workers of one
device; the features that say where arrays lie, or how gradients are computed, are left out of it.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from grids import thinned
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import optfn
from optfn.distributed import exchange, scan_layers, sharded, top_k
from optfn.sparse.sharded_table import natural

SLOW, FAST, WIDTH, LAYERS, ROWS, EXAMPLES = 2, 2, 16, 2, 32, 32
AXES = ("slow", "fast")


def normal(seed, *shape, scale=0.3):
    return np.asarray(scale * np.random.default_rng(seed).normal(size=shape), np.float32)


PARAMS = {
    "table": normal(0, ROWS, WIDTH),
    "layers": optfn.Stacked({"w": normal(1, LAYERS, WIDTH, WIDTH)}),
    "bias": np.zeros(WIDTH, np.float32),
}


def base_loss(params, batch):
    ids, target = batch
    x = params["table"][ids] + params["bias"]
    x = scan_layers(lambda w, x: x + jnp.tanh(x @ w["w"]), params["layers"], x)
    return jnp.mean((jnp.mean(x, -1) - target) ** 2)


def linked(tx):
    return optfn.chain(exchange(top_k(0.5, chunk=16), axis_name="slow", min_size=64), tx)


def dgc(tx):
    return optfn.dgc_momentum(
        0.1, 0.5, rampup_begin_step=1, sparsity=(0.0,), momentum_masking=False, axis_name="slow",
        min_size=64,
    )  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Feature:
    """A feature of a step.

    options: of `make_train_step`.
    optimizer: changes the optimizer.
    lays_out: whether the trajectory is that without it.
    outside: in a run of local steps, whether `optimizer` is around the outer optimizer.
    """

    options: Mapping[str, object] = dataclasses.field(default_factory=dict)
    optimizer: Callable = lambda tx: tx
    lays_out: bool = False
    outside: bool = False


def laid_out(**options):
    return Feature(options, lays_out=True)


FEATURES = {
    "exchange": Feature(optimizer=linked, outside=True),
    "dgc": Feature(optimizer=dgc),
    "local_steps": Feature({"local_steps": 2}),
    "state": laid_out(shard=sharded("state", axis="fast")),
    "params": laid_out(shard=sharded("params", axis="fast")),
    "specs": laid_out(shard=sharded({"layers/w": P(None, "fast")}, axis="fast")),
    "tables": laid_out(tables="table"),
    "packed": laid_out(packed=True),
    "value_and_grad": laid_out(value_and_grad=True),
    "microbatches": laid_out(microbatches=2),
    "model_state": Feature({"model_state": True}),
    "aux": Feature({"has_aux": True}),
    "rng": Feature({"rng": True}),
    "accumulate": Feature(optimizer=lambda tx: optfn.accumulate(tx, 2)),
    "skip": Feature(optimizer=optfn.skip_nonfinite),
    "masters": Feature(optimizer=optfn.master_weights, outside=True),
    "average": Feature(
        optimizer=lambda tx: optfn.chain(tx, optfn.exponential_moving_average(0.9)), outside=True
    ),
    "compare": laid_out(compare_replicas_every=1),
}

# Pairs that cannot be, with the words of their error.
IMPOSSIBLE = {
    frozenset({"dgc", "local_steps"}): "tx that exchanges gradients",
    frozenset({"tables", "value_and_grad"}): "it concerns loss_fn",
    frozenset({"rng", "value_and_grad"}): "it concerns loss_fn",
    frozenset({"tables", "packed"}): "has no rows",
}


def reference_of(names):
    """Return the features without those that only lay out arrays."""
    # Rows are exchanged otherwise than arrays, and a model state goes through microbatches in turn.
    if set(names) in ({"exchange", "tables"}, {"microbatches", "model_state"}):
        return names
    return tuple(name for name in names if not FEATURES[name].lays_out)


def arguments(names):
    """Return loss, optimizer and options of a step with these features."""
    features = [FEATURES[name] for name in names]
    options = {k: v for feature in features for k, v in feature.options.items()}
    with_state, with_aux = (bool(options.get(k)) for k in ("model_state", "has_aux"))

    def loss_fn(params, *rest):
        rest = list(rest)
        state = rest.pop(0) if with_state else None
        batch, *keys = rest
        loss = base_loss(params, batch)
        if keys:
            loss = loss * jax.random.uniform(keys[0], minval=1.0)  # it is 1, whatever the key is
        aux = {"mean": jnp.mean(batch[1])}
        extra = ((0.9 * state + jnp.mean(batch[1]),) if with_state else ()) + (
            (aux,) if with_aux else ()
        )
        return (loss, extra[0] if len(extra) == 1 else extra) if extra else loss

    inner, outer = optfn.momentum(0.1, 0.5), optfn.sgd(1.0)
    for feature in features:
        if feature.outside and "local_steps" in options:
            outer = feature.optimizer(outer)
        else:
            inner = feature.optimizer(inner)
    if "local_steps" in options:
        options["outer"] = outer
    if options.get("value_and_grad"):
        has_aux = with_state or with_aux
        options["value_and_grad"] = jax.value_and_grad(loss_fn, has_aux=has_aux)
        loss_fn = None
    return loss_fn, inner, options


@functools.cache
def trained(names):
    """Return params, model state, loss and aux after three calls."""
    loss_fn, tx, options = arguments(names)
    devices = np.array(jax.devices()[: SLOW * FAST])
    if "shard" in options:
        mesh, axes = Mesh(devices.reshape(SLOW, FAST), AXES), AXES
    else:
        mesh, axes = Mesh(devices[:SLOW], ("slow",)), "slow"
    step = optfn.make_train_step(loss_fn, tx, mesh=mesh, data_axis=axes, **options)
    state = step.init(PARAMS, *([jnp.zeros(())] if options.get("model_state") else []))
    rng = np.random.default_rng(3)
    for _ in range(3):
        batch = rng.integers(0, ROWS, EXAMPLES), rng.normal(size=EXAMPLES).astype(np.float32)
        state, metrics = step(state, batch)
    assert step.compiled._cache_size() == 1
    params = optfn.unpack(state.params) if options.get("packed") else natural(state.params)
    return jax.device_get((params, state.model_state, metrics["loss"], metrics.get("aux")))


SHARDS = {"state", "params", "specs"}
PAIRS = [
    f"{a} + {b}"
    for a, b in itertools.combinations(FEATURES, 2)
    if not {a, b} <= SHARDS and {a, b} != {"exchange", "dgc"}
]


@pytest.mark.filterwarnings("ignore:.*row-sparse gradient becomes dense")
@pytest.mark.filterwarnings("ignore:dgc_momentum. momentum masking")
@pytest.mark.parametrize("pair", thinned(PAIRS, every=12))
def test_each_pair_trains_or_says_why_not(pair):
    names = tuple(pair.split(" + "))
    if words := IMPOSSIBLE.get(frozenset(names)):
        with pytest.raises(ValueError, match=words):
            trained(names)
        return
    expected, found = trained(reference_of(names)), trained(names)
    for x, y in zip(jax.tree.leaves(expected), jax.tree.leaves(found), strict=True):
        np.testing.assert_allclose(y, x, atol=2e-6, rtol=2e-6)
