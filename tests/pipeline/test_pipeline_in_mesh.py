"""A pipeline inside `make_train_step(mesh=)`, which splits the batch over the other axes.

The reference is the run of as many workers of one device each, on the model without a pipeline.
"""

import itertools
import re

import jax
import numpy as np
import pytest
from compilations import compilations
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from problems import STAGES, batch, block, blocks, mean_square, mesh_of, whole

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


def trained(step, params, calls=3, batches=batch):
    state, losses = step.init(params), []
    for k in range(calls):
        state, metrics = step(state, batches(k))
        losses.append(float(metrics["loss"]))
    return state, losses


def assert_same_run(found, expected, unstack):
    (state, losses), (want, of_want) = found, expected
    np.testing.assert_allclose(losses, of_want, rtol=1e-6)
    for a, b in zip(jax.tree.leaves(unstack(state)), jax.tree.leaves(want.params), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-5)


KINDS = {
    "stacked": (1, block, {"shard": {".*": P("stage")}}),
    "virtual": (2, block, {"shard": {".*": P(None, "stage")}}),
    "list": (1, [block] * STAGES, {}),
}


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("kind", "local_steps", "explicit"),
    [*itertools.product(KINDS, [1, 2], [False, True])],
)
def test_it_trains_as_the_whole_model_on_each_worker(kind, local_steps, explicit):
    virtual, stages, options = KINDS[kind]
    mesh = mesh_of(explicit)
    if virtual > 1:
        mesh = Mesh(mesh.devices[:, ::virtual], mesh.axis_names, axis_types=mesh.axis_types)
    step = piped(adam(), mesh, stages, virtual, local_steps=local_steps, **options)
    is_list = kind == "list"
    params = blocks() if is_list else stack_stages(blocks(), virtual_stages=virtual)

    def unstack(state):
        if is_list:
            return state.params
        return unstack_stages(state.params, virtual_stages=virtual)

    assert_same_run(
        trained(step, params),
        trained(on_two_workers(adam(), local_steps=local_steps), blocks()),
        unstack,
    )
    assert compilations(step) == 1


def test_params_and_moments_stay_on_their_stage():
    mesh = mesh_of(False)
    step = piped(adam(), mesh, shard={".*": P("stage")}, local_steps=2)
    state, _ = trained(step, stack_stages(blocks()), calls=1)
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
    found = trained(step, stack_stages(blocks()))
    expected = trained(on_two_workers(linked()), blocks())
    assert_same_run(found, expected, lambda state: unstack_stages(state.params))
    residual = found[0].opt_state[0].residual["in"]
    assert residual.addressable_data(0).size == residual.size // 8


def test_nan_in_one_stage_of_one_worker_stops_all():
    step = piped(optfn.skip_nonfinite(linked()), mesh_of(False), shard={".*": P("stage")})
    params = stack_stages(blocks())
    state, _ = trained(step, params, calls=1)
    kept = jax.device_get((state.params, state.opt_state.inner_state))
    bad = batch(1)
    bad[1][0, 0] = np.nan  # the gradient of the first example, which the first worker has
    state, _ = step(state, bad)
    after = jax.device_get((state.params, state.opt_state.inner_state))
    for a, b in zip(jax.tree.leaves(kept), jax.tree.leaves(after), strict=True):
        np.testing.assert_array_equal(a, b)


def test_params_are_divided_inside_a_stage():
    """FSDP over the data inside each stage: the training step gathers what a stage needs."""
    shard = sharded({"in|out": P("stage", None, "data"), "bias": P("stage")})
    narrow = [{k: v[..., :6] if k != "out" else v[:6] for k, v in w.items()} for w in blocks()]
    narrow = [w | {"bias": w["bias"][:6]} for w in narrow]
    step = piped(adam(), mesh_of(False), shard=shard)
    found = trained(step, stack_stages(narrow))
    expected = trained(on_two_workers(adam()), narrow)
    assert_same_run(found, expected, lambda state: unstack_stages(state.params))
    weight = found[0].params["in"]
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
