"""A state is made of NamedTuples, dicts, tuples and arrays, so that the tools of all take it.

What is static about it is the type of a NamedTuple. Its structure, types and dtypes never change.
"""

import copy
import functools
import importlib.util
import pickle
from collections.abc import Callable
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import registry
from catalogue import Entry
from grids import by_entry
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from problems import spec

import optfn
from optfn.distributed import exchange, quantize, sharded, top_k


def bare(make: Callable[[], Any]) -> Entry:
    """An entry without a name, of a transform that exchanges, on a mesh of one worker."""

    def on_mesh() -> Any:
        tx, mesh = make(), Mesh(np.array(jax.devices()[:1]), "data")
        update = jax.shard_map(tx.update, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False)
        return optax.GradientTransformation(tx.init, update)

    return Entry("", on_mesh)


def to_top(**options: Any) -> Any:
    return exchange(top_k(0.5, chunk=4), min_size=4, **options)


# What the registry lacks: everything that declares axes, sizes or traffic, and wrappers around it.
EXCHANGING = {
    "exchange_mean": bare(lambda: exchange(None)),
    "exchange_parts": bare(lambda: to_top(route="parts")),
    "exchange_frozen": bare(lambda: to_top(param_attrs={".*w": optfn.ParamAttr(trainable=False)})),
    "exchange_by_pattern": bare(lambda: exchange({".*w": quantize(8), ".*": None}, min_size=1)),
    "dgc_momentum": bare(
        lambda: optfn.dgc_momentum(0.1, 0.9, rampup_begin_step=0, min_size=4, sparsity=(0.99,))
    ),
    "accumulate_exchange": bare(
        lambda: optfn.accumulate(optfn.chain(to_top(), optfn.adam(0.1)), 2)
    ),
    "accumulate_partition": bare(
        lambda: optfn.accumulate(
            optax.partition(
                {"a": optfn.chain(to_top(), optfn.sgd(0.1)), "b": optfn.adam(0.1)},
                {"layers": [{"w": "a", "b": "a"}], "scale": "b"},
            ),
            2,
        )
    ),
    "skip_nonfinite_exchange": bare(
        lambda: optfn.skip_nonfinite(optfn.chain(to_top(), optfn.adam(0.1)), axis_name="data")
    ),
}
STATES = registry.ALL | EXCHANGING
SUITE = {*registry.SUITE, *registry.WRAPPERS, *registry.EXCHANGES, *EXCHANGING}


def tree_of(seed: int) -> dict[str, Any]:
    w, scale = (np.random.default_rng(seed + i).normal(size=n) for i, n in enumerate([(3, 4), ()]))
    of_layer = {"w": jnp.asarray(w, jnp.bfloat16), "b": None}
    return {"layers": [of_layer], "scale": jnp.asarray(scale, jnp.float32)}


@functools.cache
def after_a_step(entry: Entry) -> tuple[Any, Any]:
    """Return the states of an entry at first and after an update.

    What exchanges is traced only: compiling it takes long, and its trace has the types.
    """
    tx, params = entry.make(), tree_of(0)
    state = tx.init(params)
    if "exchange" in entry.name or not entry.name:
        traced = jax.eval_shape(tx.update, tree_of(1), state, params)[1]
        return state, jax.tree.map(lambda x: jnp.ones(x.shape, x.dtype), traced)
    return state, tx.update(tree_of(1), state, params, **dict(entry.extra))[1]


def check_nodes(x: Any, path: str = "state") -> None:
    """Raise unless every node is a plain container and every leaf is an array of JAX."""
    if isinstance(x, tuple) and hasattr(x, "_fields"):
        children = x._asdict()
    elif type(x) is dict:
        children = x
    elif type(x) in (tuple, list):
        children = dict(enumerate(x))
    else:
        assert x is None or isinstance(x, jax.Array), f"{path} is a {type(x).__name__}: {x!r}"
        return
    for key, child in children.items():
        check_nodes(child, f"{path}/{key}")


def check_round_trips(like: Any, state: Any) -> None:
    """Raise unless a state of the type of `like` goes through pickle, copies and flax."""
    results = [pickle.loads(pickle.dumps(state)), copy.deepcopy(state)]
    if importlib.util.find_spec("flax") is not None:
        from flax import serialization

        through_flax = serialization.from_bytes(like, serialization.to_bytes(state))
        results.append(jax.tree.map(jnp.asarray, through_flax))
    for again in results:
        assert spec(again) == spec(state)
        chex.assert_trees_all_equal(again, state)


@by_entry(STATES, *SUITE)
def test_a_state_is_arrays_in_plain_containers_of_the_same_types_after_an_update(entry):
    """Also of a traced one; and it goes through flax, pickle and copies."""
    first, second = after_a_step(entry)
    check_nodes(first)
    check_nodes(second)
    check_round_trips(first, second)
    tx, params = entry.make(), tree_of(0)

    def step(state, g):
        return tx.update(g, state, params, **dict(entry.extra))[1]

    traced = jax.eval_shape(tx.init, params)
    for state in (second, traced, jax.eval_shape(step, traced, tree_of(1))):
        assert spec(state) == spec(first)


# The states of training steps, of which optimizers see only some.
STEPS = {
    "padded": {"shard": sharded("state", whole="layers/w")},
    "local_steps": {
        "local_steps": 2,
        "outer": optfn.chain(exchange(quantize(8), min_size=1), optfn.sgd(1.0)),
    },
}


@pytest.mark.parametrize("options", STEPS.values(), ids=STEPS)
def test_the_state_of_a_training_step_too(options):
    def loss(p, x):
        return jnp.mean(x) * (jnp.sum(p["layers"]["w"] ** 2) + p["b"] ** 2)

    mesh = Mesh(np.array(jax.devices()[:2]), "data")
    step = optfn.make_train_step(loss, optfn.momentum(0.1, 0.9), mesh=mesh, **options)
    first = step.init({"layers": optfn.Stacked({"w": jnp.ones((3, 2, 2))}), "b": jnp.ones(())})
    template = jax.tree.map(jnp.copy, first)
    check_nodes(first)
    second, _ = step(first, jnp.ones(4))
    check_nodes(second)
    check_round_trips(template, second)


def test_states_go_through_orbax(tmp_path):
    """All in one checkpoint, since each checkpoint takes a while."""
    ocp = pytest.importorskip("orbax.checkpoint")
    pairs = {name: after_a_step(entry) for name, entry in STATES.items() if name in SUITE}
    first, second = ({name: pair[i] for name, pair in pairs.items()} for i in range(2))
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "states", second)
        checkpointer.wait_until_finished()
        again = checkpointer.restore(tmp_path / "states", first)
    assert spec(again) == spec(second)
    chex.assert_trees_all_equal(again, second)
