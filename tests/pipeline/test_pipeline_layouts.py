"""A state of one layout of a pipeline goes on in another: stages, virtual stages, workers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from problems import mean_square

import optfn
from optfn.distributed import pipeline_value_and_grad, stack_stages, unstack_stages

RNG = np.random.default_rng(0)
STAGES, WIDTH = 4, 8
X, Y = (RNG.normal(size=(16, WIDTH)).astype(np.float32) for _ in range(2))
PARAMS = [{"w": RNG.normal(size=(WIDTH, WIDTH)).astype(np.float32)} for _ in range(STAGES)]


def stage(params, x):
    return x + jnp.tanh(x @ params["w"])


def optimizer():
    return optfn.chain(
        optfn.lamb(0.01, grad_clip=optfn.clip_by_global_norm(0.5)),
        optfn.exponential_moving_average(0.9),
    )


def pipeline(devices, virtual, workers):
    """Return the step of a layout, and a state whose params are those of no training."""
    mesh = Mesh(
        np.array(jax.devices()[: devices * workers]).reshape(devices, workers), ("stage", "data")
    )
    value_and_grad = pipeline_value_and_grad(
        stage, mean_square, mesh=mesh, num_microbatches=4, virtual_stages=virtual, data_axis="data"
    )
    step = optfn.make_train_step(None, optimizer(), value_and_grad=value_and_grad)
    return step, step.init(stack_stages(PARAMS, virtual_stages=virtual, mesh=mesh))


@pytest.mark.nightly
def test_a_run_goes_on_without_a_pipeline(tmp_path):
    """By its checkpoint, on one device."""
    options = {"checkpoint": tmp_path, "progress": False}
    step, state = pipeline(2, 2, 2)
    state, _ = optfn.fit(step, state, [(X, Y)] * 3, **options)

    def loss_fn(params, batch):
        x, target = batch
        for s in range(STAGES):
            x = stage({"w": params.layers["w"][s]}, x)
        return mean_square(x, target)

    other = stack_stages(jax.tree.map(jnp.zeros_like, PARAMS))
    alone, _ = optfn.minimize(loss_fn, optimizer(), other, [(X, Y)] * 6, **options)
    whole, _ = optfn.fit(step, state, [(X, Y)] * 3, progress=False)
    got, want = (unstack_stages(alone.params), unstack_stages(whole.params, virtual_stages=2))
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a["w"], b["w"], rtol=1e-5, atol=1e-6)


def test_other_numbers_of_stages_stay_errors():
    tx, params = optfn.adam(1e-2), stack_stages(PARAMS)
    saved = optfn.state_dict(tx.init(stack_stages(PARAMS[:2])))
    with pytest.raises(ValueError, match=r"'scale_by_adam/mu/w' has shape \(2, "):
        optfn.load_state_dict(tx.init(params), saved)
    with pytest.raises(ValueError, match=r"'scale_by_adam/mu/w' has shape \(4, "):
        optfn.load_state_dict(
            tx.init({"w": jnp.zeros((2, 2, WIDTH, WIDTH))}), optfn.state_dict(tx.init(params))
        )


@pytest.mark.parametrize("virtual", [1, 2, 4])
def test_unstacking_knows_the_virtual_stages(virtual):
    """A list with another number of stages would broadcast, and be another model without a word."""
    stacked = stack_stages(PARAMS, virtual_stages=virtual)
    lead = (STAGES,) if virtual == 1 else (virtual, STAGES // virtual)
    assert [x.shape[:-2] for x in jax.tree.leaves(stacked)] == [lead]
    for found in (unstack_stages(stacked), unstack_stages(stacked, virtual_stages=virtual)):
        for a, b in zip(found, PARAMS, strict=True):
            np.testing.assert_array_equal(a["w"], b["w"])
    layers = [optfn.Stacked(p) for p in PARAMS]  # each stage a stack of its own
    one = unstack_stages(stack_stages(layers), virtual_stages=1)
    assert [x["w"].shape for x in one] == [x["w"].shape for x in PARAMS]
