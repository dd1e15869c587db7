"""A pipeline inside `make_train_step(mesh=)`, which splits the batch over the other axes.

The reference is the run of as many workers of one device each, on the model without a pipeline.
"""

import re

import jax
import numpy as np
import pytest
from compilations import compilations
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from problems import STAGES, batch, block, blocks, equal, mean_square, mesh_of, trained, whole
from simulation import pipelined, unpipelined

import optfn
from optfn.distributed import (
    exchange,
    pipeline_value_and_grad,
    quantize,
    sharded,
    stack_stages,
    unstack_stages,
)

CLIP = optfn.clip_by_global_norm(1.0)


def adam():
    return optfn.adam(1e-2, grad_clip=CLIP)


def piped(tx, mesh, stages=block, virtual=1, **options):
    f = pipeline_value_and_grad(
        stages, mean_square, mesh=mesh, num_microbatches=2 if virtual > 1 else 3,
        virtual_stages=virtual,
    )  # fmt: skip
    return optfn.make_train_step(None, tx, value_and_grad=f, mesh=mesh, **options)


def on_two_workers(tx, **options):
    mesh = Mesh(np.array(jax.devices()[:2]), ("data",))
    return optfn.make_train_step(lambda p, x: whole(p, x), tx, mesh=mesh, **options)


def train(step, params, calls=3):
    return trained(step, step.init(params), map(batch, range(calls)))


def assert_close(got, want):
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-5)


def assert_same_run(found, expected, unstack):
    (state, losses), (want, of_want) = found, expected
    np.testing.assert_allclose(losses, of_want, rtol=1e-6)
    assert_close(unstack(state), want.params)


@pytest.mark.nightly
@pytest.mark.parametrize("explicit", [False, True])
@pytest.mark.parametrize("is_list", [False, True])
def test_it_trains_as_the_whole_model_on_each_worker(is_list, explicit):
    """In rounds of local steps: a list of stages, or two stages on each device."""
    mesh, stages, params = mesh_of(explicit), [block] * STAGES, blocks()
    virtual, options = 1, {"local_steps": 2}
    if not is_list:
        virtual, stages, options["shard"] = 2, block, {".*": P(None, "stage")}
        mesh = Mesh(mesh.devices[:, ::2], mesh.axis_names, axis_types=mesh.axis_types)
        params = stack_stages(params, virtual_stages=2)
    step = piped(adam(), mesh, stages, virtual, **options)
    assert_same_run(
        train(step, params),
        train(on_two_workers(adam(), local_steps=2), blocks()),
        lambda state: state.params if is_list else unstack_stages(state.params),
    )
    assert compilations(step) == 1


def test_params_and_moments_stay_on_their_stage():
    mesh = mesh_of(False)
    step = piped(adam(), mesh, shard={".*": P("stage")}, local_steps=2)
    state, _ = train(step, stack_stages(blocks()), calls=1)
    moment = state.opt_state.inner.inner_state[1].mu["in"].value
    assert moment.sharding.spec == P(("data", "stage"))
    assert moment.addressable_data(0).size == moment.size // mesh.size
    assert state.params["in"].sharding.spec == P("stage")


@pytest.mark.optimized
def test_no_parameter_leaves_its_stage():
    """Activations go to neighbours; of gradients and norms there are sums."""
    step = piped(adam(), mesh_of(False), shard={".*": P("stage")})
    state = step.init(stack_stages(blocks()))
    text = step.compiled.lower(state, batch(0)).compile().as_text()
    collectives = set(re.findall(r"= \S+ (all-\w+|collective-\w+|reduce-scatter)", text))
    assert collectives == {"all-reduce", "collective-permute"}


def linked(bits=8):
    # A stage is a leaf of its own in both runs: the chunks of a stage's part are those of a leaf.
    compressor = quantize(bits, chunk=9)
    return optfn.chain(exchange(compressor, min_size=9), optfn.sgd(0.1))


def test_workers_exchange_the_parts_of_their_stages():
    step = piped(linked(), mesh_of(False), shard={".*": P("stage")})
    found = train(step, stack_stages(blocks()))
    expected = train(on_two_workers(linked()), blocks())
    assert_same_run(found, expected, lambda state: unstack_stages(state.params))
    residual = found[0].opt_state[0].residual["in"]
    assert residual.addressable_data(0).size == residual.size // 8


def test_nan_in_one_stage_of_one_worker_stops_all():
    step = piped(optfn.skip_nonfinite(linked()), mesh_of(False), shard={".*": P("stage")})
    params = stack_stages(blocks())
    state, _ = train(step, params, calls=1)
    kept = jax.device_get((state.params, state.opt_state.inner_state))
    bad = batch(1)
    bad[1][0, 0] = np.nan  # the gradient of the first example, which the first worker has
    state, _ = step(state, bad)
    equal(kept, (state.params, state.opt_state.inner_state))


def test_params_are_divided_inside_a_stage():
    """FSDP over the data inside each stage: the training step gathers what a stage needs."""
    shard = sharded({"in|out": P("stage", None, "data"), "bias": P("stage")})
    narrow = [{k: v[..., :6] if k != "out" else v[:6] for k, v in w.items()} for w in blocks()]
    narrow = [w | {"bias": w["bias"][:6]} for w in narrow]
    step = piped(adam(), mesh_of(False), shard=shard)
    state, _ = train(step, stack_stages(narrow), calls=1)
    weight = state.params["in"]
    assert weight.addressable_data(0).size == weight.size // 8


def test_the_step_alone_splits_the_batch():
    mesh = mesh_of(False)
    twice = pipeline_value_and_grad(
        block, mean_square, mesh=mesh, num_microbatches=3, data_axis="data"
    )
    specs = pipeline_value_and_grad(
        block, mean_square, mesh=mesh, num_microbatches=3,
        param_specs={"in": P(), "bias": P(), "out": P(None, "data")},
    )  # fmt: skip
    params = stack_stages(blocks())
    for f, words in ((twice, "without data_axis"), (specs, "param_specs: .*shard={")):
        step = optfn.make_train_step(
            None, adam(), value_and_grad=f, mesh=mesh, shard={".*": P("stage")}
        )
        with pytest.raises(ValueError, match=words):
            step(step.init(params), batch(0))


def compressing(nesterov):
    """Dense, then a ramp of two steps; matrices are compressed, the 36 biases are not."""
    with pytest.warns(UserWarning, match="little momentum remains"):
        return optfn.dgc_momentum(
            0.05, 0.9, rampup_begin_step=2, rampup_step=2, sparsity=(0.5, 0.9), min_size=40,
            nesterov=nesterov,
        )  # fmt: skip


@pytest.mark.nightly
@pytest.mark.parametrize(("explicit", "nesterov"), [(False, True), (True, False)])
def test_stacked_stages_train_as_two_simulated_workers(explicit, nesterov):
    """Losses, params and the residuals of each worker's stages, through the full ramp."""
    tx, mesh = compressing(nesterov), mesh_of(explicit)
    batches = [batch(k) for k in range(6)]
    params = stack_stages(blocks(), mesh=mesh)
    losses, state = pipelined(tx, block, params, batches, mesh, P("stage"))
    want, want_params, want_state = unpipelined(tx, blocks(), batches)
    np.testing.assert_allclose(losses, want, rtol=0, atol=1e-5)
    assert_close(unstack_stages(state.params), want_params)

    got, expected = state.opt_state[0], want_state[0]
    assert int(got.num_workers) == 2 and int(got.step) == 6
    for name in ("in", "out"):  # flat, worker by worker, in it stage by stage
        kept = got.residual.value[name].reshape(2, STAGES, -1)
        assert_close(kept, np.stack([v[name] for v in expected.residual.value], axis=1))
        assert got.residual.value[name].sharding.spec == P(("data", "stage"))
    assert np.abs(got.residual.value["in"]).max() > 1e-3  # something was not sent
