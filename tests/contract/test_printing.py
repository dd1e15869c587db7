"""What a user prints says what it is: a transform or schedule reads like the call that made it."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import registry

import optfn

CALLS = [
    "adam(0.001, grad_clip=clip_by_global_norm(1.0))",
    "adamw(noam(512, 4000), weight_decay=0.1, exclude='.*bias')",
    "chain(clip_by_norm(1.0), scale_by_adam(b2=0.99), scale_by_learning_rate(0.1))",
    "lamb(linear_warmup(cosine(0.1, 10, 90), 5, 0.0, 0.1), regularization=l2_decay(0.0001))",
    "momentum(0.1, 0.9, nesterov=True, multi_precision=True)",
    "sgd(piecewise([10, 20], [1.0, 0.1, 0.01]))",
    "accumulate(skip_nonfinite(adam(), max_consecutive=3), 4)",
    "chain(rmsprop(0.1), exponential_moving_average(0.9), model_average(0.5))",
    "record_metrics(master_weights(ftrl(0.1, l1=0.01)))",
    "dgc_momentum(0.1, 0.9, rampup_begin_step=5)",
    "adam(param_attrs={'.*/b': ParamAttr(regularization=None, need_clip=False), 'w': ParamAttr()})",
]


@pytest.mark.parametrize("call", CALLS)
def test_a_repr_is_the_call(call):
    names = vars(optfn) | vars(optfn.schedules)
    assert repr(eval(call, names)) == call


@pytest.mark.parametrize("name", registry.ALL)
def test_every_transform_names_its_factory(name):
    entry = registry.ALL[name]
    shown = repr(entry.make())
    outer = {"exponential_moving_average": "chain", "model_average": "chain"}
    outer |= {"stack": "record_metrics"}
    factory = outer.get(name, entry.name).split(".")[-1]
    assert shown.startswith(f"{factory}(") and shown.endswith(")")
    assert "<function" not in shown and " object at 0x" not in shown


def test_a_traced_hyper_parameter_is_named():
    shown = []

    @jax.jit
    def trace(rate):
        shown.append(repr(optfn.sgd(rate)))
        return rate

    trace(jnp.float32(0.1))
    assert shown == ["sgd(<traced float32[]>)"]


def test_a_training_step():
    def loss(params, batch):
        return jnp.sum(params * batch)

    step = optfn.make_train_step(loss, optfn.adam(0.1))
    assert repr(step).endswith("loss, adam(0.1))") and repr(step).startswith("TrainStep(")


def test_parts_of_optax_keep_their_own():
    tx = optfn.chain(optax.scale(2.0), optfn.sgd(0.1))
    assert repr(tx).endswith("sgd(0.1))")
    updates, _ = tx.update(np.ones(2), tx.init(np.ones(2)), np.ones(2))
    np.testing.assert_allclose(updates, [-0.2, -0.2], rtol=1e-6)
