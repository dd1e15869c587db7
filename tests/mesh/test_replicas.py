"""Arrays that should be the same on all devices are compared by checksums."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import optfn
from optfn.distributed import compare_replicas, data_mesh, exchange, sharded, top_k

N = 4
X = np.random.default_rng(0).normal(size=(8, 6)).astype(np.float32)
PARAMS = {"w": np.ones(6, np.float32), "v": np.ones((8, 6), np.float32)}
LINKED = optfn.chain(exchange(top_k(0.5), min_size=8), optfn.momentum(0.1, 0.5))
CASES = {
    "local steps": (optfn.adam(0.1), {"local_steps": 2}),
    "some sharded": (optfn.adam(0.1), {"shard": {"v": P("data")}}),
    "residuals of each worker": (LINKED, {}),
}


def loss_fn(params, x):
    return jnp.mean((x @ params["w"]) ** 2 + jnp.mean(params["v"]))


def flipped(x, device):
    """Return an array with one bit flipped on one device, under the same sharding."""
    parts = [np.array(shard.data) for shard in x.addressable_shards]
    parts[device].view(np.uint32).flat[3] ^= 1 << 12
    arrays = [
        jax.device_put(part, shard.device)
        for part, shard in zip(parts, x.addressable_shards, strict=True)
    ]
    return jax.make_array_from_single_device_arrays(x.shape, x.sharding, arrays)


@pytest.mark.parametrize(("tx", "options"), CASES.values(), ids=CASES)
def test_one_flipped_bit_on_one_device_is_found(tx, options):
    mesh = data_mesh(N)
    step = optfn.make_train_step(loss_fn, tx, mesh=mesh, **options)
    state = step.init(PARAMS)
    compare_replicas(state, mesh)
    for _ in range(2):
        state, _ = step(state, X)
    compare_replicas(state, mesh)  # arrays of a worker are no copies
    damaged = state._replace(params=state.params | {"w": flipped(state.params["w"], 2)})
    with pytest.raises(RuntimeError, match="the copies of 'params/w' differ between the devices"):
        compare_replicas(damaged, mesh)


def test_a_run_ends_with_the_error_of_a_callback():
    mesh = data_mesh(N)
    step = optfn.make_train_step(loss_fn, optfn.adam(0.1), mesh=mesh)
    state, found = step.init(PARAMS), []

    def compare(n, state, metrics):
        found.append(n)
        compare_replicas(state, mesh)

    state, _ = optfn.fit(step, state, [X] * 3, callback=compare, progress=False)
    state = state._replace(params=state.params | {"w": flipped(state.params["w"], 0)})
    with pytest.raises(RuntimeError, match="'params/w'"):
        optfn.fit(step, state, [X] * 3, callback=compare, progress=False)
    assert found == [1, 2, 3, 4]


def test_a_flipped_bit_in_the_state_is_found():
    mesh = data_mesh(N)
    state = optfn.make_train_step(loss_fn, optfn.adam(0.1), mesh=mesh).init(PARAMS)
    changed = jax.tree.map(lambda x: flipped(x, 3) if x.shape == (6,) else x, state.opt_state)
    with pytest.raises(RuntimeError, match=r"the copies of 'opt_state/.*mu/w' differ"):
        compare_replicas(state._replace(opt_state=changed), mesh)


def test_one_flipped_bit_in_a_shard_that_two_groups_of_devices_have_is_found():
    """On two levels a device compares its shard with the same shard in other groups."""
    mesh = Mesh(np.array(jax.devices()[:N]).reshape(2, 2), ("slow", "fast"))
    step = optfn.make_train_step(
        loss_fn, optfn.adam(0.1), mesh=mesh, data_axis=("slow", "fast"),
        shard=sharded("params", axis="fast"),
    )  # fmt: skip
    state, _ = step(step.init(PARAMS), X)
    v = state.params["v"]
    assert v.sharding.spec == P(("fast",)) and v.addressable_shards[0].data.shape == (4, 6)
    compare_replicas(state, mesh)
    state = state._replace(params=state.params | {"v": flipped(v, 1)})
    with pytest.raises(RuntimeError, match="'params/v'"):
        compare_replicas(state, mesh)


def test_arrays_without_copies_pass():
    mesh = data_mesh(N)
    x = jax.device_put(np.arange(8.0), jax.sharding.NamedSharding(mesh, P("data")))
    compare_replicas({"x": x, "host": np.ones(3), "one": jnp.ones(2)}, mesh)
