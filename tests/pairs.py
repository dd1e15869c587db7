"""The features of a training step that compose by pairs, and the few pairs that cannot be.

A feature changes the optimizer, the loss or the options. `trained` runs a step with some of them;
those that say where arrays lie, or how gradients are computed, leave the trajectory as it is.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P

import optfn
from optfn.distributed import (
    PipelineParams,
    exchange,
    pipeline_value_and_grad,
    scan_layers,
    sharded,
    top_k,
)
from optfn.tables.sharded_table import to_logical

SIZES = {"slow": 2, "fast": 2, "stage": 2}
WIDTH, LAYERS, ROWS, EXAMPLES = 16, 2, 32, 64


def normal(seed, *shape, scale=0.3):
    # `problems.normal`, which this file must not import: docs/tables.py imports it, without the
    # path that pytest gives to tests.
    return np.asarray(scale * np.random.default_rng(seed).normal(size=shape), np.float32)


POINTS = normal(5, ROWS, WIDTH, scale=1.0)
PARAMS = {
    "table": normal(0, ROWS, WIDTH),
    "layers": optfn.Stacked({"w": normal(1, LAYERS, WIDTH, WIDTH)}),
    "bias": np.zeros(WIDTH, np.float32),
}


def points(batch):
    return jnp.asarray(POINTS)[batch[0]]


def layer(w, x):
    return x + jnp.tanh(x @ w["w"])


def head(x, batch, table, bias):
    ids, target = batch
    return jnp.mean((jnp.mean(x + table[ids] + bias, -1) - target) ** 2)


def base_loss(params, batch):
    x = scan_layers(layer, params["layers"], points(batch))
    return head(x, batch, params["table"], params["bias"])


HALF = top_k(0.5, chunk=16)


def linked(tx, compressor=HALF):
    return optfn.chain(exchange(compressor, axis_name="slow", min_size=64), tx)


def linked_but_for_rows(tx):
    """The exchange of an optimizer whose table has row-sparse gradients: rows are sent whole."""
    return linked(tx, {"table": None, ".*": HALF})


def dgc(tx):
    return optfn.dgc_momentum(
        0.1, 0.5, rampup_begin_step=1, sparsity=(0.0,), momentum_masking=False, axis_name="slow",
        min_size=64,
    )  # fmt: skip


def searched(tx):
    return optfn.chain(tx, optax.scale_by_backtracking_linesearch(4, verbose=False))


@dataclasses.dataclass(frozen=True)
class Feature:
    """A feature of a step.

    asked: how a user asks for it, in Markdown.
    options: of `make_train_step`.
    optimizer: changes the optimizer.
    lays_out: whether the trajectory is that without it.
    outside: in a run of local steps, whether `optimizer` is around the outer optimizer.
    axis: a further mesh axis that it needs.
    """

    asked: str
    options: Mapping[str, object] = dataclasses.field(default_factory=dict)
    optimizer: Callable = lambda tx: tx
    lays_out: bool = False
    outside: bool = False
    axis: str | None = None


def laid_out(asked, axis=None, **options):
    return Feature(asked, options, lays_out=True, axis=axis)


def spread(asked, kind):
    return laid_out(asked, "fast", shard=sharded(kind, axis="fast"))


FEATURES = {
    "exchange": Feature("`exchange(...)` in the chain", optimizer=linked, outside=True),
    "dgc": Feature("`dgc_momentum(...)`", optimizer=dgc),
    "local_steps": Feature("`local_steps=`", {"local_steps": 2}),
    "state": spread('`shard="state"`', "state"),
    "params": spread('`shard="params"`', "params"),
    "specs": spread("`shard={pattern: PartitionSpec}`", {"layers/w": P(None, "fast")}),
    "pipeline": laid_out("`value_and_grad=pipeline_value_and_grad(...)`", "stage", pipeline=True),
    "tables": laid_out("`tables=`", tables="table"),
    "packed": laid_out("`packed=True`", packed=True),
    "value_and_grad": laid_out("`value_and_grad=`", value_and_grad=True),
    "microbatches": laid_out("`microbatches=`", microbatches=2),
    "model_state": Feature("`model_state=True`", {"model_state": True}),
    "aux": Feature("`has_aux=True`", {"has_aux": True}),
    "rng": Feature("`rng=`", {"rng": True}),
    "pass_step": Feature("`pass_step=True`", {"pass_step": True}),
    "accumulate": Feature("`accumulate(...)`", optimizer=lambda tx: optfn.accumulate(tx, 2)),
    "skip": Feature("`skip_nonfinite(...)`", optimizer=optfn.skip_nonfinite),
    "loss_scale": Feature(
        "`dynamic_loss_scale(...)`",
        optimizer=lambda tx: optfn.dynamic_loss_scale(tx, initial_scale=4.0),
    ),
    "spikes": Feature("`skip_spikes(...)`", optimizer=optfn.skip_spikes),
    "masters": Feature(
        "`master_weights(...)`, with `local_steps` in `outer`",
        optimizer=optfn.master_weights,
        outside=True,
    ),
    "average": Feature(
        "an average in the chain, with `local_steps` in `outer`",
        optimizer=lambda tx: optfn.chain(tx, optfn.exponential_moving_average(0.9)),
        outside=True,
    ),
    "search": Feature("optax's line searches in the chain", optimizer=searched),
    "explicit": laid_out("a mesh of explicit axes", explicit=True),
}
SHARDS = {"state", "params", "specs"}
# Features of which a step has one at most.
ALTERNATIVES = (SHARDS, {"exchange", "dgc"}, {"pipeline", "value_and_grad"})


@dataclasses.dataclass(frozen=True)
class Impossible:
    """Why a pair of features cannot be.

    words: of the error.
    why: the reason, for the documentation.
    """

    words: str
    why: str


_OF_LOSS = Impossible("it concerns loss_fn", "it concerns `loss_fn`, which is replaced")
IMPOSSIBLE = {
    frozenset({"dgc", "local_steps"}): Impossible(
        "tx must not exchange gradients", "workers train apart, and exchange through `outer`"
    ),
    frozenset({"tables", "packed"}): Impossible("has no rows", "a buffer of leaves has no rows"),
}
IMPOSSIBLE |= {
    frozenset({"loss_scale", other}): Impossible(
        "needs loss_fn", "it scales the loss of `loss_fn`, which is replaced"
    )
    for other in ("value_and_grad", "pipeline")
}
IMPOSSIBLE |= {
    frozenset({of_loss, other}): _OF_LOSS
    for of_loss in ("tables", "rng", "pass_step")
    for other in ("value_and_grad", "pipeline")
}


def impossible(names):
    """Return why features cannot be together; None where they can."""
    return next((why for pair, why in IMPOSSIBLE.items() if pair <= set(names)), None)


def reference_of(names):
    """Return the features without those that only lay out arrays."""
    return tuple(name for name in names if not FEATURES[name].lays_out)


def in_turn(loss_fn):
    """Return a loss with model state, of the halves of a batch one after the other."""

    def of_halves(params, state, batch):
        first, second = (jax.tree.map(lambda x: jnp.split(x, 2)[i], batch) for i in (0, 1))  # noqa: B023
        a, state = loss_fn(params, state, first)
        b, state = loss_fn(params, state, second)
        return (a + b) / 2, state

    return of_halves


def mesh_with(names, explicit):
    sizes = [SIZES[name] for name in names]
    devices = np.array(jax.devices()[: np.prod(sizes)]).reshape(sizes)
    kind = AxisType.Explicit if explicit else AxisType.Auto
    return Mesh(devices, names, axis_types=(kind,) * len(names))


def piped(mesh):
    """Return (params, batch) -> (loss, gradients), with one layer on each device of a stage."""
    f = pipeline_value_and_grad(
        layer, lambda x, batch, shared: head(x, batch, **shared), mesh=mesh, num_microbatches=2
    )

    def value_and_grad(params, batch):
        shared = {k: params[k] for k in ("table", "bias")}
        loss, grads = f(PipelineParams(params["layers"], shared), points(batch), batch)
        return loss, {"layers": grads.stages, **grads.shared}

    return value_and_grad


def with_results(value_and_grad, results):
    """Return a function that gives the further results of a loss beside its value."""

    def function(params, *rest):
        loss, grads = value_and_grad(params, rest[-1])
        extra = results(rest)
        return ((loss, *extra) if extra else loss), grads

    return function


def made(names, reference=False):
    """Return a step and its first state.

    Args:
      names: the features.
      reference: whether features that only lay out arrays are left out.
    """
    own = reference_of(names) if reference else names
    features = [FEATURES[name] for name in own]
    options: dict[str, Any] = {k: v for feature in features for k, v in feature.options.items()}
    with_state, with_aux = (bool(options.get(k)) for k in ("model_state", "has_aux"))

    def results(rest):
        """Return the model state and aux, where a loss has them, as one member of a pair."""
        target = rest[1 if with_state else 0][1]
        extra = ((0.9 * rest[0] + jnp.mean(target),) if with_state else ()) + (
            ({"mean": jnp.mean(target)},) if with_aux else ()
        )
        return (extra,) if len(extra) == 2 else extra

    def loss_fn(params, *rest):
        loss = base_loss(params, rest[1 if with_state else 0])
        if options.get("rng"):  # it is 1, whatever the key is
            key = rest[-2 if options.get("pass_step") else -1]
            loss = loss * jax.random.uniform(key, minval=1.0)
        if options.get("pass_step"):
            loss = loss * (1 + rest[-1]) / 2
        extra = results(rest)
        return (loss, *extra) if extra else loss

    inner, outer = optfn.momentum(0.1, 0.5), optfn.sgd(1.0)
    for name, feature in zip(own, features, strict=True):
        change = feature.optimizer
        if reference and name == "exchange" and "tables" in names:
            change = linked_but_for_rows
        if feature.outside and "local_steps" in options:
            outer = change(outer)
        else:
            inner = change(inner)
    if "local_steps" in options:
        options["outer"] = outer
    if reference and {"microbatches", "model_state"} <= set(names):
        loss_fn = in_turn(loss_fn)

    data = ("slow", *(f.axis for f in features if f.axis == "fast"))
    axes = (*data, *(f.axis for f in features if f.axis == "stage"))
    mesh = mesh_with(axes, options.pop("explicit", False))
    if options.pop("pipeline", False):
        options["value_and_grad"] = with_results(piped(mesh), results)
        if "shard" not in options and "packed" not in options:
            options["shard"] = {"layers/w": P("stage")}
        elif "specs" in names:
            options["shard"] = sharded({"layers/w": P("stage", "fast")}, axis="fast")
    elif options.get("value_and_grad"):
        has_aux = with_state or with_aux
        options["value_and_grad"] = jax.value_and_grad(loss_fn, has_aux=has_aux)
    loss = None if "value_and_grad" in options else loss_fn
    step = optfn.make_train_step(loss, inner, mesh=mesh, data_axis=data, **options)
    return step, step.init(PARAMS, *([jnp.zeros(())] if with_state else []))


@functools.cache
def trained(names, reference=False):
    """Return params, model state, loss and aux after three calls of a step; see `made`."""
    from compilations import compilations

    step, state = made(names, reference)
    rng = np.random.default_rng(3)
    for _ in range(3):
        batch = rng.integers(0, ROWS, EXAMPLES), rng.normal(size=EXAMPLES).astype(np.float32)
        state, metrics = step(state, batch)
    assert compilations(step) == 1
    params = optfn.unpack(state.params) if step.options.packed else to_logical(state.params)
    return jax.device_get((params, state.model_state, metrics["loss"], metrics.get("aux")))
