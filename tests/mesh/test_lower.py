"""`TrainStep.lower` gives the program that a call runs, without arrays and without devices.

The reference is the step that runs: lowered for its first state and a batch.
"""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from grids import suite
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from pairs import ALTERNATIVES, EXAMPLES, FEATURES, PARAMS, impossible, made

import optfn
from optfn.distributed import data_mesh, sharded

PAIRS = [
    f"{a} + {b}"
    for a, b in itertools.combinations(FEATURES, 2)
    if not any({a, b} <= group for group in ALTERNATIVES) and not impossible((a, b))
]


def shapes(values):
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(jnp.shape(x), jnp.result_type(x)), values)


def lowered_to_run(step, state, batch):
    """Return the step lowered for the arrays that a call passes."""
    if step.layout is not None:
        split = NamedSharding(step.layout.mesh, P(step.layout.data_axes))
        batch = jax.tree.map(lambda x: jax.device_put(x, split), batch)
    return step.compiled.lower(state, batch)


TOGETHER = (
    "exchange + local_steps + specs",
    "dgc + pipeline + accumulate",
    "params + search + microbatches + rng",
)


@pytest.mark.filterwarnings("ignore:.*row-sparse gradient becomes dense")
@pytest.mark.filterwarnings("ignore:dgc_momentum. momentum masking")
@pytest.mark.parametrize("together", suite([*PAIRS, *TOGETHER], *TOGETHER))
def test_the_program_of_shapes_is_that_of_a_call(together):
    names = tuple(together.split(" + "))
    step, state = made(names)
    rng = np.random.default_rng(3)
    batch = rng.integers(0, 32, EXAMPLES).astype(np.int32), rng.normal(size=EXAMPLES).astype("f")
    found = step.lower(shapes(PARAMS), shapes(batch), shapes(state.model_state))
    assert found.as_text() == lowered_to_run(step, state, batch).as_text()
    assert step.lower(state, batch).as_text() == found.as_text()
    assert step.lower(shapes(state), shapes(batch)).as_text() == found.as_text()


def loss(params, x):
    return jnp.mean((x @ params["w"]["in"] @ params["w"]["out"] + params["b"]) ** 2)


WEIGHTS = {"w": {"in": np.ones((64, 128), "f"), "out": np.ones((128, 64), "f")}}
WEIGHTS |= {"b": np.zeros(64, "f"), "n": np.int32(3)}
OPTIONS = {
    "no mesh": {},
    "whole": {"mesh": True},
    "state": {"mesh": True, "shard": "state"},
    "params": {"mesh": True, "shard": "params"},
    "packets": {"mesh": True, "shard": sharded("params", gather=optfn.distributed.quantize(8))},
    "packed": {"mesh": True, "shard": "state", "packed": True},
    "microbatches": {"mesh": True, "shard": "params", "microbatches": 2},
    "rounds": {"mesh": True, "local_steps": 2},
}


@pytest.mark.parametrize("name", suite(OPTIONS, "rounds"))
def test_the_program_is_that_of_the_step_that_runs(name):
    options = dict(OPTIONS[name])
    if options.pop("mesh", False):
        options["mesh"] = data_mesh(8)
    step = optfn.make_train_step(loss, optfn.adam(1e-3), **options)
    x = np.ones((32, 64), np.float32)
    expected = lowered_to_run(step, step.init(WEIGHTS), x)
    assert step.lower(WEIGHTS, x).compile().as_text() == expected.compile().as_text()


def test_nothing_is_allocated():
    """Params of 64 TB on each device, which no machine here could hold."""
    params = jax.ShapeDtypeStruct((1 << 22, 1 << 22), jnp.float32)
    step = optfn.make_train_step(
        lambda p, x: jnp.mean(x @ p), optfn.adam(1e-3), mesh=data_mesh(8), shard="params"
    )
    found = step.lower(params, jax.ShapeDtypeStruct((8, 1 << 22), jnp.float32))
    state, batch = found.in_avals[0]
    assert state.params.shape == (1 << 22, 1 << 22) and batch.shape == (8, 1 << 22)


def test_arguments_are_checked_as_those_of_a_call():
    step = optfn.make_train_step(loss, optfn.adam(1e-3), mesh=data_mesh(8))
    with pytest.raises(ValueError, match="must be divisible by the 8 workers"):
        step.lower(WEIGHTS, np.ones((12, 64), np.float32))
    with pytest.raises(TypeError, match="got a model_state"):
        step.lower(WEIGHTS, np.ones((8, 64), np.float32), np.zeros(3))
    with pytest.raises(TypeError, match="a TrainState has its own model_state"):
        step.lower(step.init(WEIGHTS), np.ones((8, 64), np.float32), np.zeros(3))
    with pytest.raises(TypeError, match=r"TrainStep\.lower: .*must be a floating-point array"):
        step.lower({"w": "text"}, np.ones((8, 64), np.float32))
