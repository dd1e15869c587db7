"""How often Python runs a loss for one step: once, and once more for arrays of aux."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from grids import suite
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P

import optfn
from optfn.distributed import exchange, quantize, scan_layers, sharded

MESH = Mesh(np.array(jax.devices()).reshape(2, 4), ("slow", "fast"))
ON_MESH = {"mesh": MESH, "data_axis": ("slow", "fast")}
PARAMS = {"in": jnp.ones((256, 256)), "layers": jnp.ones((4, 256, 256)) / 256}
BATCH = jax.ShapeDtypeStruct((64, 256), jnp.float32)


def plain(params, x):
    return jnp.mean((x @ params["in"] @ params["layers"][0]) ** 2)


def scanned(params, x):
    x = scan_layers(lambda w, x: jnp.tanh(x @ w), params["layers"], x @ params["in"])
    return jnp.mean(x**2)


def mean(params, x):
    """A weight of floats, which has to be constant with microbatches."""
    return optfn.Mean(jnp.sum((x @ params["in"]) ** 2), 1.0 * jnp.sum(jnp.ones(len(x))))


def looked_up(params, x):
    return jnp.mean((x * params["in"][jnp.arange(len(x))]) ** 2)


def with_aux(loss_fn):
    return lambda params, x: (loss_fn(params, x), {"a": jnp.ones(3)})


WAYS = {
    "one device": {},
    "mesh": ON_MESH,
    "state": ON_MESH | {"shard": "state"},
    "params": ON_MESH | {"shard": "params"},
    "two levels": ON_MESH | {"shard": sharded("params", axis="fast")},
    "packets": ON_MESH | {"shard": sharded("params", axis="fast", gather=quantize(8))},
    "once": ON_MESH | {"shard": sharded("params", gather_once=True)},
    "compiler": ON_MESH | {"partitioner": "compiler"},
    "packed": {"packed": True},
    "local steps": ON_MESH | {"local_steps": 2},
}


def count(loss_fn, tx=None, **options):
    """Return how often a step runs its loss while it is traced."""
    traces = []

    def counted(params, x):
        traces.append(1)
        return loss_fn(params, x)

    step = optfn.make_train_step(counted, tx or optfn.adam(1e-3), **options)
    step.compiled.trace(*step.shapes(PARAMS, BATCH))
    return len(traces)


OFTEN = [(way, scanned, 4) for way in WAYS]
OFTEN += [(way, mean, 4) for way in ("mesh", "params", "local steps")]


@pytest.mark.parametrize(
    "way, loss_fn, microbatches",
    suite(itertools.product(WAYS, [plain, scanned, mean], [1, 4]), *OFTEN),
)
def test_a_loss_is_traced_once(way, loss_fn, microbatches):
    found = count(loss_fn, microbatches=microbatches, **WAYS[way])
    # Where nothing else has made equations of the loss, its weight is read by a trace of its own.
    is_read = (
        loss_fn is mean and microbatches > 1 and way not in ("params", "two levels", "packets")
    )
    assert found == 1 + is_read


@pytest.mark.parametrize(
    "way",
    suite(
        [way for way in WAYS if way != "packed"],
        "one device",
        "params",
        "once",
        "compiler",
        "local steps",
    ),
)
def test_arrays_of_aux_are_one_more(way):
    """It is traced for twice the examples, to see whether aux has an entry for each."""
    assert count(with_aux(scanned), has_aux=True, microbatches=2, **WAYS[way]) == 2


def test_other_abilities_add_none():
    attrs = {"tables": "in"}
    assert count(looked_up, optfn.sgd(0.1), **attrs) == 1
    assert count(looked_up, optfn.sgd(0.1), **ON_MESH, shard_tables=True, **attrs) == 1
    assert count(plain, optfn.accumulate(optfn.adam(1e-3), 2), **ON_MESH) == 1
    sent = optfn.chain(exchange(quantize(8), axis_name=("slow", "fast")), optfn.sgd(0.1))
    assert count(plain, sent, **ON_MESH) == 1
    assert count(plain, optfn.dynamic_loss_scale(optfn.sgd(0.1)), **ON_MESH) == 1


def test_constraints_along_the_workers_are_one_more():
    """They are refused by JAX in the first trace, and left out in the second."""
    auto = Mesh(MESH.devices, MESH.axis_names, axis_types=(AxisType.Auto,) * 2)

    def constrained(params, x):
        return plain(params, jax.lax.with_sharding_constraint(x, P("slow")))

    assert count(constrained, mesh=auto, data_axis=("slow", "fast")) == 2
