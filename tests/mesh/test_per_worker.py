"""The protocol of per-worker state: a second scheme, written here, gets everything but its rule."""

import functools
from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P
from problems import state_after, trained
from simulation import stacked

import optfn
from optfn.compression.dgc import DeepGradientCompressionState
from optfn.core import tree
from optfn.core.traits import traits
from optfn.distributed import data_mesh, init_state, rescale_residuals, state_specs, top_k
from optfn.leaves import contents
from optfn.mesh.collectives.axes import to_axes
from optfn.mesh.collectives.gathers import all_gather
from optfn.mesh.state.per_worker import Exchanged, PerWorker, mark_exchanged, may_give_rows
from optfn.transforms.learning_rate import ScaleByLearningRateState

N = 4
BETA, CHUNK, K = 0.95, 64, 4
LARGEST = top_k(K / CHUNK, chunk=CHUNK, values="bfloat16")


class SparseLocoState(NamedTuple):
    """The number of workers, and what each of them has not sent yet, flat."""

    num_workers: jax.Array
    residual: PerWorker
    exchanged: Exchanged


def send(e, axis_name):
    """Return the mean over workers of the largest entries of a flat array, and what is left."""
    packet, _ = LARGEST.encode(e, ())
    packets = all_gather(packet, to_axes(axis_name))
    decoded = jax.vmap(lambda packet: LARGEST.decode(packet, e.shape))(packets)
    return jnp.mean(decoded, axis=0), e - LARGEST.decode(packet, e.shape)


def sparse_loco(axis_name="data"):
    """SparseLoCo (arXiv 2508.15706): e = βe + g; the largest of each chunk are sent in bfloat16."""

    def init(params):
        flat = jax.tree.map(lambda p: jnp.zeros(p.size), params)
        return SparseLocoState(jnp.int32(1), PerWorker(flat), mark_exchanged(params, axis_name))

    def update(updates, state, params=None, **extra):
        del params, extra
        gradients, structure = jax.tree.flatten(updates)
        e = [
            BETA * old + g.reshape(-1)
            for old, g in zip(jax.tree.leaves(state.residual), gradients, strict=True)
        ]
        means, e = zip(*(send(x, axis_name) for x in e), strict=True)
        directions = [mean.reshape(g.shape) for mean, g in zip(means, gradients, strict=True)]
        residual = PerWorker(structure.unflatten(e))
        return structure.unflatten(directions), state._replace(residual=residual)

    return optax.GradientTransformationExtraArgs(init, update)


def optimizer():
    return optfn.chain(
        sparse_loco(), optfn.scale_by_learning_rate(0.1), optfn.exponential_moving_average(0.9)
    )


RNG = np.random.default_rng(0)
BATCH = tuple(RNG.standard_normal((16, n)).astype(np.float32) for n in (40, 32))
PARAMS = {
    "w": 0.1 * RNG.standard_normal((40, 32)).astype(np.float32),
    "b": np.zeros(32, np.float32),
}


def loss_fn(params, batch):
    x, y = batch
    return jnp.mean((x @ params["w"] + params["b"] - y) ** 2)


@functools.cache
def made_step():
    return optfn.make_train_step(loss_fn, optimizer(), mesh=data_mesh(N))


def residuals(state):
    """Return the residuals of all workers, (N, n) each."""
    (found,) = (
        x for x in jax.tree.leaves(state, is_leaf=lambda x: isinstance(x, PerWorker))
        if isinstance(x, PerWorker)
    )  # fmt: skip
    return jax.tree.map(lambda x: np.asarray(x).reshape(N, -1), found.value)


def test_it_is_laid_out_over_the_mesh():
    mesh, tx = data_mesh(N), optimizer()
    state, specs = init_state(tx, PARAMS, mesh), state_specs(tx, PARAMS)
    assert jax.tree.structure(specs) == jax.tree.structure(state)
    for spec, leaf in zip(jax.tree.leaves(specs), jax.tree.leaves(state), strict=True):
        assert leaf.sharding.spec == spec
    assert specs[0].residual == PerWorker({"w": P(("data",)), "b": P(("data",))})
    assert int(state[0].num_workers) == N
    assert {k: x.shape for k, x in state[0].residual.value.items()} == {
        "w": (N * 1280,),
        "b": (N * 32,),
    }
    assert sum(spec != P() for spec in jax.tree.leaves(specs)) == 2


def test_it_trains_as_simulated_workers_do():
    step = made_step()
    state, losses = trained(step, step.init(PARAMS), [BATCH] * 12)
    assert losses[-1] < 0.9 * losses[0]

    def worker(params, state, part):
        updates, state = step.tx.update(jax.grad(loss_fn)(params, part), state, params)
        return optfn.apply_updates(params, updates), state

    simulated = jax.jit(jax.vmap(worker, axis_name="data"))
    p, s = stacked((PARAMS, step.tx.init(PARAMS)), N)
    parts = jax.tree.map(lambda x: x.reshape(N, -1, x.shape[1]), BATCH)
    for _ in range(12):
        p, s = simulated(p, s, parts)
    want = jax.tree.map(lambda x: np.asarray(x[0]), p)
    chex.assert_trees_all_close(jax.device_get(state.params), want, rtol=0, atol=1e-6)
    chex.assert_trees_all_close(residuals(state), residuals(s), rtol=0, atol=1e-6)
    average = optfn.averaged_params(state.opt_state, state.params)
    want = optfn.averaged_params(jax.tree.map(lambda x: np.asarray(x)[0], s), want)
    chex.assert_trees_all_close(jax.device_get(average), jax.device_get(want), rtol=0, atol=1e-6)


def test_a_checkpoint_goes_on_bit_for_bit(tmp_path):
    step = made_step()
    state = state_after(step, step.init(PARAMS), [BATCH] * 3)
    optfn.save_checkpoint(tmp_path, state)
    whole = state_after(step, state, [BATCH] * 3)
    restored, _ = optfn.restore_checkpoint(tmp_path, step.init(PARAMS))
    resumed = state_after(step, restored, [BATCH] * 3)
    chex.assert_trees_all_equal(jax.device_get(whole), jax.device_get(resumed))
    assert all(np.any(x) for x in jax.tree.leaves(residuals(resumed)))
    mapping = optfn.state_dict(resumed)
    assert mapping["per_worker"].tolist() == ["sparse_loco/residual/b", "sparse_loco/residual/w"]
    assert mapping["sparse_loco/residual/w"].shape == (N * 1280,)
    assert int(mapping["sparse_loco/num_workers"]) == N


class OtherState(NamedTuple):
    """Per-worker arrays of several kinds, below a dict."""

    num_workers: jax.Array
    parts: dict


def other(dtype=jnp.int32):
    def init(params):
        del params
        matrix = jnp.arange(6.0).reshape(3, 2)
        arrays = {"matrix": matrix, "code": jnp.arange(3, dtype=jnp.int8)}
        return OtherState(jnp.ones((), dtype), {"own": PerWorker(arrays), "step": jnp.int32(5)})

    return optax.GradientTransformation(init, lambda u, s, p=None: (u, s))


def test_arrays_of_any_kind_are_laid_out_and_rescaled():
    """Means of floating-point arrays, worker 0's part of others, along the first axis."""
    state = init_state(other(), {}, data_mesh(2))
    assert state.parts["own"].value["matrix"].shape == (6, 2) and int(state.num_workers) == 2
    matrix = jnp.concatenate([jnp.zeros((3, 2)), jnp.full((3, 2), 3.0)])
    code = jnp.asarray([1, 2, 3, 7, 8, 9], jnp.int8)
    own = PerWorker({"matrix": matrix, "code": code})
    state = state._replace(parts={"own": own, "step": jnp.int32(5)})
    saved, template = optfn.state_dict(state), init_state(other(), {}, data_mesh(3))
    # As a machine of another byte order has saved them.
    swapped = {k: x.astype(x.dtype.newbyteorder()) if x.ndim > 1 else x for k, x in saved.items()}
    for scaled in (
        rescale_residuals(state, 3),
        optfn.load_state_dict(template, rescale_residuals(saved, 3)),
        optfn.load_state_dict(template, rescale_residuals(swapped, 3)),
    ):
        arrays = scaled.parts["own"].value
        np.testing.assert_array_equal(arrays["matrix"], np.full((9, 2), 1.5))
        np.testing.assert_array_equal(arrays["code"], [1, 2, 3] * 3)
        assert arrays["code"].dtype == jnp.int8
        assert int(scaled.num_workers) == 3 and int(scaled.parts["step"]) == 5


def test_the_number_of_workers_must_be_known():
    mesh = data_mesh(2)
    state = init_state(other(), {}, mesh)
    for broken, match in (
        (init_state(other(jnp.float32), {}, mesh), r"none \(no field num_workers\)"),
        ((state, state._replace(num_workers=jnp.int32(3))), r"different ones: \[2, 3\]"),
    ):
        with pytest.raises(ValueError, match=match):
            rescale_residuals(broken, 1)
    with pytest.raises(ValueError, match=r"different ones: \[2, 3\]"):
        rescale_residuals(optfn.state_dict((state, state._replace(num_workers=jnp.int32(3)))), 1)


def test_a_parameter_named_num_workers_is_no_count():
    tx = optfn.dgc_momentum(0.1, 0.9, rampup_begin_step=0, min_size=1)
    state = init_state(tx, {"num_workers": jnp.ones((2, 4))}, data_mesh(N))
    rescaled = rescale_residuals(optfn.state_dict(state), 2)
    assert rescaled["deep_gradient_compression/num_workers"] == 2
    assert rescaled["deep_gradient_compression/residual/num_workers"].shape == (16,)


def test_a_transparent_node_adds_no_word():
    assert tree.paths({"a": PerWorker({"w": 0, "v": None}), "b": 1}) == ["a/v", "a/w", "b"]
    assert tree.paths(PerWorker(3)) == [""]
    packed = optfn.pack({"w": np.ones(3), "v": np.ones(2)})
    assert [sorted(n) for n in contents.leaf_names({"a": PerWorker(packed)})] == [["a/v", "a/w"]]


@traits(passes_rows=True)
class PassingState(NamedTuple):
    inner_state: object


class OpaqueState(NamedTuple):
    inner_state: object


def test_the_state_answers_whether_updates_may_be_rows():
    tx = optfn.dgc_momentum(0.1, 0.9, rampup_begin_step=0)
    state = tx.init(PARAMS)
    compression, rate = state
    assert isinstance(compression, DeepGradientCompressionState)
    assert isinstance(rate, ScaleByLearningRateState)
    unknown = optax.adam(0.1).init(PARAMS)
    for yes in (
        state,
        compression,
        (state,),
        PassingState(state),
        (rate, PassingState(state)),
        (state, PassingState(rate)),
        (PassingState((compression,)), rate),
    ):
        assert may_give_rows(yes)
    for no in (
        rate,
        (rate,),
        (),
        {"a": state},
        [state],
        OpaqueState(state),
        PassingState(OpaqueState(state)),
        (state, optax.EmptyState()),
        (state, unknown),
        (state, OpaqueState(rate)),
        (state, PassingState(unknown)),
        (state, OpaqueState(state)),
        sparse_loco().init(PARAMS),
        optfn.adam().init(PARAMS),
    ):
        assert not may_give_rows(no)
