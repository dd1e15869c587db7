"""make_train_step on a pipeline: 4 stages × 2 data workers."""

import functools
import re

import jax
import numpy as np
import pytest
from compilations import compilations
from grids import nightly
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from problems import STAGES, batch, block, blocks, mean_square, mesh_of, trained, whole

import optfn
from optfn.distributed import pipeline_value_and_grad, stack_stages


def optimizer():
    return optfn.adam(1e-2, grad_clip=optfn.clip_by_global_norm(1.0))


def train(step, params):
    return trained(step, step.init(params), map(batch, range(3)))


@functools.cache
def on_one_device():
    return train(optfn.make_train_step(whole, optimizer()), blocks())


def pipelined(stage_fn, mesh):
    f = pipeline_value_and_grad(
        stage_fn, mean_square, mesh=mesh, num_microbatches=3, data_axis="data"
    )
    return optfn.make_train_step(mean_square, optimizer(), value_and_grad=f)


@pytest.mark.parametrize("explicit", [nightly(False), True])
def test_state_stays_sharded_by_stage(explicit):
    """Losses as on one device; params and moments stay sharded; one compilation, no moves."""
    mesh = mesh_of(explicit)
    step = pipelined(block, mesh)
    params = stack_stages(blocks(), mesh=mesh)
    before = jax.tree.map(lambda x: x.sharding, step.init(params))
    by_stage = [s.spec[:1] == ("stage",) for s in jax.tree.leaves(before)]
    assert sum(by_stage) == 3 * 3  # params and two moments; the others are counters and the rate
    state, losses = train(step, params)
    for a, b in zip(jax.tree.leaves(state), jax.tree.leaves(before), strict=True):
        assert a.sharding.is_equivalent_to(b, a.ndim)
    assert compilations(step) == 1

    np.testing.assert_allclose(losses, on_one_device()[1], rtol=1e-6)


@pytest.mark.optimized
def test_no_parameter_leaves_its_stage():
    """The collectives of the step: activations between neighbours, sums of gradients and norms."""
    mesh = mesh_of(False)
    step = pipelined(block, mesh)
    state = step.init(stack_stages(blocks(), mesh=mesh))
    text = step.compiled.lower(state, batch(0)).compile().as_text()
    collectives = set(re.findall(r"= \S+ (all-\w+|collective-\w+|reduce-scatter)", text))
    assert collectives == {"all-reduce", "collective-permute"}


@pytest.mark.optimized
def test_heterogeneous_stages_on_every_device():
    """Params of heterogeneous stages are replicated; the step is compiled once and waited for."""
    mesh = mesh_of(False)
    step = pipelined([block] * STAGES, mesh)
    params = jax.device_put(blocks(), NamedSharding(mesh, P()))
    state, losses = train(step, params)
    assert compilations(step) == 1
    text = step.compiled.lower(state, batch(0)).compile().as_text()
    moves = re.findall(r"= .*(all-gather|all-to-all)\(", text)
    assert moves == ["all-gather"]  # of the gradients
    _, metrics = step(state, batch(3))
    assert metrics["loss"].is_ready()  # on CPU devices, where steps under way could hang
    np.testing.assert_allclose(losses, on_one_device()[1], rtol=1e-6)


def test_a_batch_is_a_pair_or_two_arguments():
    mesh = mesh_of(False)
    f = pipeline_value_and_grad(block, mean_square, mesh=mesh, num_microbatches=3)
    params, (x, target) = stack_stages(blocks()), batch(0)
    pair, two = f(params, (x, target)), f(params, x, targets=target)
    for a, b in zip(jax.tree.leaves(pair), jax.tree.leaves(two), strict=True):
        np.testing.assert_array_equal(a, b)
    with pytest.raises(
        TypeError, match=r"targets are missing.*pair.*got a single argument of type ndarray"
    ):
        f(params, x)


def test_recompute_in_the_stages_of_a_step():
    mesh = mesh_of(False)

    def named(w, x, *, rng):  # the pipeline looks for the parameter
        return checkpoint_name(block(w, x) + 0 * jax.random.uniform(rng), "y")

    f = pipeline_value_and_grad(
        optfn.recompute(named, checkpoints=("y",)),
        mean_square,
        mesh=mesh,
        num_microbatches=3,
        data_axis="data",
    )
    again = optfn.make_train_step(
        mean_square,
        optimizer(),
        value_and_grad=lambda params, batch: f(params, batch, rng=jax.random.key(0)),
    )
    _, losses = train(again, stack_stages(blocks()))
    assert compilations(again) == 2  # params on one device, then on the mesh
    np.testing.assert_allclose(losses, on_one_device()[1], rtol=1e-6)


def test_counters_go_where_the_parameters_are():
    """A state all on one device stays there."""
    step = optfn.make_train_step(whole, optimizer())
    assert {len(x.sharding.device_set) for x in jax.tree.leaves(step.init(blocks()))} == {1}
    assert jax.eval_shape(step.init, blocks()).step.shape == ()
