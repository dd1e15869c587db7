"""What is rounded at random is right in the mean over steps, also if a gradient comes again."""

import dataclasses
import math
import pathlib

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from grids import suite
from jax.sharding import Mesh
from problems import state_after
from simulation import stacked

import optfn
from optfn.distributed import data_mesh, exchange, quantize, sharded
from optfn.transforms import codes

N, SHAPE, STEPS = 8, (64, 32), 64
GRADIENT = np.random.default_rng(0).normal(size=SHAPE).astype(np.float32)
Q4 = quantize(4, stochastic=True)
LEVELS = {
    "mesh": Mesh(np.array(jax.devices()[:N]).reshape(2, 4), ("slow", "fast")),
    "data_axis": ("slow", "fast"),
}


def of_gradient(p, x):
    return jnp.sum(p["w"] * GRADIENT) + 0 * jnp.mean(x)


def reduced(shard, tx=None, drifts=1, **options):
    """Return the mean update of a training run whose gradients are all GRADIENT."""
    step = optfn.make_train_step(
        of_gradient, tx or optfn.sgd(1.0), shard=shard, **{"mesh": data_mesh(N)} | options
    )

    def mean(steps):
        state = step.init({"w": np.zeros(SHAPE, np.float32)})
        for _ in range(steps):
            state, _ = step(state, np.zeros(N * drifts, np.float32))
        params = optfn.unpack(state.params) if options.get("packed") else state.params
        return -np.asarray(params["w"]) / steps / drifts

    return mean


def gathered(kind):
    """Return the mean of the params that a loss sees, which are GRADIENT in each step."""

    def seen(p, x):
        return jnp.sum(p["w"]) * jnp.mean(x), p["w"]

    step = optfn.make_train_step(
        seen, optfn.sgd(1.0), mesh=data_mesh(N), shard=sharded(kind, gather=Q4), has_aux=True
    )

    def mean(steps):
        state, found = step.init({"w": GRADIENT}), []
        for _ in range(steps):
            state, metrics = step(state, np.zeros(N, np.float32))
            found.append(np.asarray(metrics["aux"]))
        return np.mean(found, axis=0)

    return mean


def exchanged(route):
    """Return the mean direction of `exchange`."""
    tx = exchange(Q4, error_feedback=0.0, route=route)
    update = jax.jit(jax.vmap(tx.update, axis_name="data"))

    def mean(steps):
        g = np.broadcast_to(GRADIENT, (N, *SHAPE))
        state, found = stacked(tx.init(GRADIENT), N), []
        for _ in range(steps):
            direction, state = update(g, state)
            found.append(np.asarray(direction[0]))
        return np.mean(found, axis=0)

    return mean


def in_moments(dtype):
    """Return the mean of the gradients that a velocity v = v/2 + g has taken up, v − v/2 before."""
    tx = optfn.scale_by_momentum(0.5, moment_dtype=dtype)
    update = jax.jit(tx.update)

    def mean(steps):
        state, velocities = tx.init(GRADIENT), [np.zeros(SHAPE)]
        for _ in range(steps):
            velocity, state = update(GRADIENT, state)
            velocities.append(np.asarray(velocity))
        return (np.sum(velocities, axis=0) - np.sum(velocities[:-1], axis=0) / 2) / steps

    return mean


UNIT = 2.0**-15  # of a master of 24 bits in [1, 2)


def in_masters(steps):
    """Return the mean step of masters, in units of a hundredth of their last place."""
    tx = optfn.master_weights(optfn.sgd(UNIT / 100), bits=24)
    p = jnp.ones(SHAPE, jnp.bfloat16)
    state, update = tx.init(p), jax.jit(tx.update)
    for _ in range(steps):
        updates, state = update(GRADIENT - 4, state, p)
        p = optfn.apply_updates(p, updates)
    (remainder,) = (x for x in jax.tree.leaves(state) if x.shape == SHAPE)
    moved = np.asarray(codes.join_float32(p, remainder), np.float64) - 1
    return 4 - moved / steps / (UNIT / 100)


OUTER = optfn.chain(exchange(Q4, error_feedback=0.0), optfn.sgd(1.0))
SLOW = optfn.chain(exchange(Q4, error_feedback=0.0, axis_name="slow"), optfn.sgd(1.0))
# From steps to the mean of what has arrived of so many times GRADIENT.
ROUNDED = {
    "reduced params": reduced(sharded("params", reduce=Q4)),
    "reduced state": reduced(sharded("state", reduce=Q4)),
    "reduced once": reduced(sharded("params", reduce=Q4, gather_once=True)),
    "reduced packed": reduced(sharded("params", reduce=Q4), packed=True),
    "reduced on two levels": reduced(sharded("params", axis="fast", reduce=Q4), SLOW, **LEVELS),
    "gathered params": gathered("params"),
    "gathered state": gathered("state"),
    "exchanged": exchanged("gather"),
    "exchanged by parts": exchanged("parts"),
    "exchanged on two levels": reduced(sharded("params", axis="fast"), SLOW, **LEVELS),
    "drifts": reduced(None, outer=OUTER, drifts=2, local_steps=2),
    "bfloat16 moments": in_moments("bfloat16"),
    "int8 moments": in_moments("int8"),
    "masters of 24 bits": in_masters,
}


def error(mean):
    return np.sqrt(np.mean((mean - GRADIENT) ** 2))


@pytest.mark.parametrize(
    "name",
    suite(ROUNDED, "reduced on two levels", "exchanged by parts", "drifts", "masters of 24 bits"),
)
@pytest.mark.filterwarnings("ignore:.*all workers have the same gradient")
def test_equal_gradients_are_right_in_the_mean(name):
    """After 64 steps the error is about an eighth of that after one, as of independent numbers."""
    after_one = error(ROUNDED[name](1))
    assert 0 < error(ROUNDED[name](STEPS)) <= after_one / 4


def test_equal_microbatches_are_right_in_the_mean():
    """Gradients that are reduced in each of 64 microbatches."""
    errors = []
    for count in (1, STEPS):
        step = optfn.make_train_step(
            of_gradient, optfn.sgd(1.0), mesh=data_mesh(N), shard=sharded("params", reduce=Q4),
            microbatches=count,
        )  # fmt: skip
        state, _ = step(
            step.init({"w": np.zeros(SHAPE, np.float32)}), np.zeros(N * STEPS, np.float32)
        )
        errors.append(error(-np.asarray(state.params["w"])))
    assert 0 < errors[1] <= errors[0] / 4


def test_all_that_is_rounded_at_random_is_among_them():
    """A further module that draws random bits needs a row in ROUNDED."""
    root = pathlib.Path(optfn.__file__).parent
    users = {
        str(path.relative_to(root))
        for path in root.rglob("*.py")
        if "random_bits(" in path.read_text() and path.name != "codes.py"
    }
    assert users == {
        "compression/quantize.py",
        "transforms/stored.py",
        "wrappers/master_weights.py",
    }


def test_a_resumed_run_rounds_as_an_uninterrupted_one(tmp_path):
    shard = sharded("params", gather=quantize(8, stochastic=True), reduce=Q4)
    runs = []
    for stops in (False, True):
        step = optfn.make_train_step(of_gradient, optfn.sgd(1.0), mesh=data_mesh(N), shard=shard)
        state = step.init({"w": GRADIENT})
        for i in range(4):
            state, _ = step(state, np.zeros(N, np.float32))
            if stops and i == 1:
                optfn.save_checkpoint(tmp_path / "run", state)
                state, _ = optfn.restore_checkpoint(tmp_path / "run", step.init({"w": GRADIENT}))
        runs.append(np.asarray(state.params["w"]))
    np.testing.assert_array_equal(*runs)


@dataclasses.dataclass(frozen=True)
class Counting:
    """Sends an array in bfloat16, plus the number of encodings before."""

    def init(self, shape):
        return jnp.zeros((), jnp.int32)

    def encode(self, x, count):
        return (x.astype(jnp.bfloat16), count), count + 1

    def decode(self, packet, shape):
        return packet[0].astype(jnp.float32).reshape(shape) + packet[1]

    def num_bytes(self, shape):
        return 2 * math.prod(shape) + 4


def test_a_compressor_of_your_own_counts_the_steps():
    """The integer of its state, which `sharded` does not keep, is the number of the step."""
    step = optfn.make_train_step(
        lambda p, x: jnp.sum(p["w"]) + 0 * jnp.mean(x), optfn.sgd(1.0), mesh=data_mesh(N),
        shard=sharded("params", reduce=Counting()),
    )  # fmt: skip
    first = step.init({"w": np.zeros(SHAPE, np.float32)})
    state = state_after(step, first, [np.zeros(N, np.float32)] * 4)
    chex.assert_trees_all_equal(jax.device_get(state.params["w"]), np.full(SHAPE, -10.0, "f"))
