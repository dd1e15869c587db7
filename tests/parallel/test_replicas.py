"""Params that should be the same on all devices are compared by checksums."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import optfn
from optfn.distributed import data_mesh, sharded

N = 4
X = np.random.default_rng(0).normal(size=(8, 6)).astype(np.float32)
PARAMS = {"w": np.ones(6, np.float32), "v": np.ones((8, 6), np.float32)}
OPTIONS = {
    "data parallel": {},
    "local steps": {"local_steps": 2},
    "sharded state": {"shard": "state"},
    "some sharded": {"shard": {"v": P("data")}},
}


def loss_fn(params, x):
    return jnp.mean((x @ params["w"]) ** 2 + jnp.mean(params["v"]))


def damaged(state, mesh, device):
    """Return the state with one bit of w flipped on one device, under the same sharding.

    It is not the last one, which the rounding of an update may make equal again.
    """
    w = np.asarray(state.params["w"])
    flipped = w.copy()
    flipped.view(np.uint32)[3] ^= 1 << 12
    parts = [
        jax.device_put(flipped if k == device else w, d) for k, d in enumerate(mesh.devices.flat)
    ]
    placement = NamedSharding(mesh, P())
    w = jax.make_array_from_single_device_arrays(w.shape, placement, parts)
    return state._replace(params=state.params | {"w": w})


def steps(every, **options):
    mesh = data_mesh(N)
    step = optfn.make_train_step(
        loss_fn, optfn.adam(0.1), mesh=mesh, compare_replicas_every=every, **options
    )
    return step, step.init(PARAMS), mesh


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_one_flipped_bit_on_one_device_is_found(options):
    step, state, mesh = steps(4, **options)
    per_call = step.local_steps
    for _ in range(4 // per_call + 1):
        state, metrics = step(state, X)
    assert {"loss", "learning_rate"} <= set(metrics) <= {"loss", "learning_rate", "bytes_sent"}
    state = damaged(state, mesh, device=2)
    while int(state.step) < 8:
        state, _ = step(state, X)  # not compared, or only after the call
    with pytest.raises(
        RuntimeError, match=r"differ between devices after step 8, since a step .* 4"
    ):
        step(state, X)


def test_params_that_differ_from_the_start():
    step, state, mesh = steps(1)
    state, _ = step(damaged(state, mesh, device=0), X)
    with pytest.raises(RuntimeError, match="after step 1, perhaps from the start"):
        step.check(state)


def test_minimize_ends_with_the_error_and_a_good_run_does_not():
    options = {"mesh": data_mesh(N), "progress": False, "compare_replicas_every": 2}
    state, _ = optfn.minimize(loss_fn, optfn.adam(0.1), PARAMS, [X] * 5, **options)
    assert int(state.step) == 5


def test_bad_arguments():
    with pytest.raises(ValueError, match="compare_replicas_every=1 needs mesh"):
        optfn.make_train_step(loss_fn, optfn.sgd(0.1), compare_replicas_every=1)
    with pytest.raises(ValueError, match="compare_replicas_every must be"):
        steps(0)


def test_one_flipped_bit_in_a_part_that_two_groups_of_devices_have_is_found():
    """On two levels a device compares its part with those of the same part in other groups."""
    mesh = Mesh(np.array(jax.devices()[:N]).reshape(2, 2), ("slow", "fast"))
    step = optfn.make_train_step(
        loss_fn, optfn.adam(0.1), mesh=mesh, data_axis=("slow", "fast"),
        shard=sharded("params", axis="fast"), compare_replicas_every=2,
    )  # fmt: skip
    state = step.init(PARAMS)
    for _ in range(3):
        state, _ = step(state, X)
    v = state.params["v"]
    assert v.sharding.spec == P(("fast",)) and v.addressable_shards[0].data.shape == (4, 6)
    parts = [np.array(shard.data) for shard in v.addressable_shards]
    parts[1].view(np.uint32)[0, 3] ^= 1 << 12
    arrays = [
        jax.device_put(part, s.device) for part, s in zip(parts, v.addressable_shards, strict=True)
    ]
    v = jax.make_array_from_single_device_arrays(v.shape, v.sharding, arrays)
    state, _ = step(state._replace(params=state.params | {"v": v}), X)
    with pytest.raises(RuntimeError, match="after step 4, since a step after 2"):
        step.check(state)
