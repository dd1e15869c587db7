"""The inventory of a state: an entry for each array, in the order of jax.tree.leaves."""

import jax
import numpy as np
import pytest
import registry
from jax.sharding import Mesh

import optfn
from optfn.core import tree
from optfn.distributed import data_mesh, exchange, init_state, quantize
from optfn.mesh.state.inventory import arrays_with_entries, inventory, map_entries

PARAMS = {"w": np.ones((6, 5), np.float32), "v": np.ones(10, np.float32)}
PATHS = tree.paths(PARAMS)


def exchanging(axis_name="data"):
    exchanged = exchange(quantize(8), route="parts", axis_name=axis_name, min_size=1)
    return optfn.chain(exchanged, optfn.adam(0.1, moment_dtype="int8"))


def test_it_says_whose_an_array_is_and_how_workers_keep_it():
    state = init_state(exchanging(), PARAMS, data_mesh(4))
    entries = {entry.name: entry for entry in inventory(state, PATHS)}
    assert {name: (x.param, x.kept, x.axes, x.size) for name, x in entries.items()} == {
        "exchange/num_workers": (None, "count", ("data",), 0),
        "exchange/step": (None, "shared", (), 0),
        "exchange/residual/v": ("v", "per_worker", ("data",), 0),
        "exchange/residual/w": ("w", "per_worker", ("data",), 0),
        "exchange/published/v": ("v", "sliced", ("data",), 10),
        "exchange/published/w": ("w", "sliced", ("data",), 30),
        "scale_by_int8_adam/step": (None, "shared", (), 0),
        "scale_by_int8_adam/mu/v": ("v", "shared", (), 0),
        "scale_by_int8_adam/mu/w": ("w", "shared", (), 0),
        "scale_by_int8_adam/nu/v": ("v", "shared", (), 0),
        "scale_by_int8_adam/nu/w": ("w", "shared", (), 0),
        "scale_by_int8_adam/mu_scale/v": ("v", "shared", (), 0),
        "scale_by_int8_adam/mu_scale/w": ("w", "shared", (), 0),
        "scale_by_int8_adam/nu_scale/v": ("v", "shared", (), 0),
        "scale_by_int8_adam/nu_scale/w": ("w", "shared", (), 0),
        "scale_by_learning_rate/step": (None, "shared", (), 0),
        "scale_by_learning_rate/learning_rate": (None, "shared", (), 0),
    }
    scales = {name: x.codes.scales for name, x in entries.items() if x.codes}
    assert scales == {
        f"scale_by_int8_adam/{moment}/{k}": f"scale_by_int8_adam/{moment}_scale/{k}"
        for moment in ("mu", "nu") for k in PATHS
    }  # fmt: skip


def test_without_paths_no_array_belongs_to_a_parameter():
    assert not any(entry.param for entry in inventory(optfn.adam(0.1).init(PARAMS)))


def test_a_slice_counts_its_row_where_devices_divide_the_leaf():
    """Published arrays have a row for each of the four devices of a worker."""
    mesh = Mesh(np.array(jax.devices()).reshape(2, 4), ("a", "b"))
    step = optfn.make_train_step(
        lambda p, x: (p["w"].sum() * x).sum(), exchanging("a"), mesh=mesh, data_axis=("a", "b"),
        shard=optfn.distributed.sharded("state", axis="b"),
    )  # fmt: skip
    state = step.init({"w": np.ones((32, 1024), np.float32)}).opt_state
    ((entry, x),) = [pair for pair in arrays_with_entries(state) if pair[0].kept == "sliced"]
    assert entry.axes == ("a",) and entry.size == 32 * 1024 // 4 and x.shape == (4, entry.size)


@pytest.mark.parametrize("name", ["adam", "accumulate", "master_weights", "muon", "param_attrs"])
def test_it_has_the_order_of_the_arrays(name):
    state = registry.EVERYTHING[name].make().init(PARAMS)
    named = {k: x for k, x in optfn.state_dict(state).items() if k != "version"}
    assert [entry.name for entry in inventory(state)] == list(named)
    arrays = map_entries(lambda entry, x: np.array_equal(x, named[entry.name]), state)
    assert all(jax.tree.leaves(arrays))
