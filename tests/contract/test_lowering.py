"""Every public transform lowers for GPU and TPU; nothing is compiled or run."""

from functools import partial

import jax
import jax.numpy as jnp
import pytest
import registry
from grids import nightly, suite
from jax.sharding import PartitionSpec

import optfn
from optfn.distributed import (
    data_mesh,
    init_state,
    pipeline_value_and_grad,
    select_top_k,
    stack_stages,
    state_specs,
)

PLATFORMS = ("cuda", "tpu")
SHAPES = {"w": (3, 300), "z": (5,), "equal": (5,), "scalar": ()}


def lowered(fn, *args, **options):
    """Return the program of a function for the platforms, lowered without their devices."""
    exported = jax.export.export(jax.jit(fn, **options), platforms=PLATFORMS)(*args)
    assert exported.platforms == PLATFORMS
    return exported.mlir_module()


SUITE = (
    "momentum_nesterov", "asgd", "decayed_adagrad", "rmsprop_centered", "adam_clip_l2", "adamax",
    "ftrl_dense_rows", "lamb_int8", "clip_by_global_norm_off", "reduce_on_plateau", "param_attrs",
    "accumulate", "dynamic_loss_scale", "model_average",
)  # fmt: skip


@pytest.mark.parametrize("name", suite(registry.EVERYTHING, *SUITE))
def test_an_update_lowers(name):
    """With leaves of several shapes, one of them narrow."""
    entry = registry.EVERYTHING[name]
    tx = entry.make()
    params = {k: jax.ShapeDtypeStruct(shape, jnp.float32) for k, shape in SHAPES.items()}
    params["narrow"] = jax.ShapeDtypeStruct((4,), jnp.bfloat16)
    state = jax.eval_shape(tx.init, params)

    def update(updates, state, params):
        return tx.update(updates, state, params, **dict(entry.extra))

    assert "stablehlo" in lowered(update, params, state, params)


@pytest.mark.parametrize(
    "name", [nightly("adam"), "lamb", "adamw_int8", nightly("param_attrs"), nightly("accumulate")]
)
def test_a_packed_update_lowers(name):
    tx = registry.EVERYTHING[name].make()
    params = {k: jnp.zeros(shape) for k, shape in SHAPES.items()}

    def update(params):
        packed = optfn.pack(params)
        updates, state = tx.update(packed, tx.init(packed), packed)
        return jax.tree.leaves((optfn.unpack(updates), state))

    assert "stablehlo" in lowered(update, params)


def test_row_sparse_updates_lower():
    rows = optfn.sparse.Rows(jnp.zeros(3, jnp.int32), jnp.ones((3, 4)), 7)
    table = jnp.zeros((7, 4))
    for lazy in (True, "exact"):
        tx = optfn.adam(0.1, lazy=lazy)

        def update(rows, table, tx=tx):
            return optfn.apply_updates(table, tx.update(rows, tx.init(table), table)[0])

        assert "stablehlo" in lowered(update, rows, table)


def test_selection_lowers():
    x = jax.ShapeDtypeStruct((10_000,), jnp.float32)
    assert "stablehlo" in lowered(partial(select_top_k, k=10), x)


def test_compressed_exchange_lowers():
    """Deep Gradient Compression between two workers, with what they send and receive."""
    mesh = data_mesh(2)
    tx = optfn.dgc_momentum(0.1, 0.9, rampup_begin_step=1, min_size=64)
    params = {"w": jnp.ones((16, 16)), "b": jnp.ones(3)}
    state, spec = init_state(tx, params, mesh), state_specs(tx, params)
    grads = {k: jnp.ones((2, *p.shape)) for k, p in params.items()}
    split, whole = PartitionSpec("data"), PartitionSpec()

    @partial(jax.shard_map, mesh=mesh, in_specs=(split, spec, whole), out_specs=(whole, spec))
    def update(grads, state, params):
        return tx.update(jax.tree.map(lambda g: g[0], grads), state, params)

    assert "all_gather" in lowered(update, grads, state, params)


def test_a_pipeline_lowers():
    mesh = jax.make_mesh((2,), ("stage",), devices=jax.devices()[:2])
    f = pipeline_value_and_grad(
        lambda w, x: jnp.tanh(x @ w["w"]),
        lambda y, target: jnp.mean((y - target) ** 2),
        mesh=mesh,
        num_microbatches=2,
    )
    params = stack_stages([{"w": jnp.ones((3, 3))}] * 2)
    x = jnp.ones((4, 3))
    assert "collective_permute" in lowered(f, params, x, x)
