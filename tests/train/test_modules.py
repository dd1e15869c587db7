"""A model of flax or equinox given whole: an error with the line that splits it.

Also the warning of `lazy` in a step whose gradients are all dense.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import optfn

eqx = pytest.importorskip("equinox")
linen = pytest.importorskip("flax.linen")
nnx = pytest.importorskip("flax.nnx")

X = np.random.default_rng(0).normal(size=(4, 8, 3)).astype(np.float32)
TX = optfn.adamw(1e-2, weight_decay=0.1)


class NnxNet(nnx.Module):
    def __init__(self):
        rngs = nnx.Rngs(0)
        self.linear = nnx.Linear(3, 2, rngs=rngs)
        self.bn = nnx.BatchNorm(2, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x):
        return self.dropout(self.bn(self.linear(x)))


class Unregistered(nnx.Module, pytree=False):
    def __init__(self):
        self.linear = nnx.Linear(3, 2, rngs=nnx.Rngs(0))


class LinenNet(linen.Module):
    @linen.compact
    def __call__(self, x):
        return linen.BatchNorm(use_running_average=False)(linen.Dense(2)(x))


def error_of(params, loss_fn=lambda params, batch: 0.0):
    """Return the text of the TypeError with which `minimize` refuses these params."""
    with pytest.raises(TypeError) as caught:
        optfn.minimize(loss_fn, TX, params, X, progress=False)
    return str(caught.value)


def test_variables_of_nnx_that_are_no_params_are_named_by_their_type():
    model = NnxNet()
    for params in (model, nnx.state(model), {"net": [nnx.state(model)]}):
        text = error_of(params)
        for words in ("bn/mean' of type BatchStat", "bn/var' of type BatchStat", "type RngKey"):
            assert words in text
        assert "graphdef, params, rest = nnx.split(model, nnx.Param, ...)" in text
        assert "bn/scale" not in text
    assert "'' of type Unregistered" in error_of(Unregistered())


def test_a_model_of_nnx_with_params_only_is_taken_whole():
    class Lora(nnx.Module):
        def __init__(self):
            self.a = nnx.Param(jnp.ones(3))
            self.b = nnx.LoRAParam(jnp.ones(3))

    step = optfn.make_train_step(lambda m, x: jnp.mean((x @ (m.a + m.b)) ** 2), optfn.sgd(0.1))
    state, _ = step(step.init(Lora()), X[0])
    expected = 1 - 0.1 * 2 / 8 * X[0].T @ (X[0] @ np.full(3, 2.0))
    np.testing.assert_allclose(state.params.a[...], expected, rtol=1e-4)


def test_the_collections_of_linen_beside_params_are_named():
    variables = LinenNet().init(jax.random.key(0), X[0])
    text = error_of(variables)
    assert 'with batch_stats beside "params"' in text
    assert 'variables["params"]' in text and 'variables["batch_stats"]' in text
    step = optfn.make_train_step(lambda p, x: 0.0, TX)
    step.init({"params": variables["params"]})
    step.init(variables["params"])
    step.init({"params": jnp.ones(2), "scale": jnp.ones(2)})  # no collections


def test_fields_of_an_equinox_module_that_are_no_arrays_are_named():
    key = jax.random.key(0)
    model = eqx.nn.Sequential([eqx.nn.Linear(3, 2, key=key), eqx.nn.Dropout(), jnp.tanh])
    text = error_of({"net": model})
    assert "'net/layers/1/p' of type float" in text
    assert "'net/layers/1/inference' of type bool" in text and "net/layers/2' of type" in text
    assert "params, static = eqx.partition(model, eqx.is_inexact_array)" in text
    assert "weight" not in text
    assert "axis_name' of type str" in error_of(eqx.nn.BatchNorm(2, axis_name="batch"))


def test_text_in_a_module_has_the_hint_at_the_transform_too():
    with pytest.raises(TypeError, match=r"type str\. A text is not a parameter.*eqx\.partition\("):
        optfn.sgd(0.1).init({"axis_name": "batch"})


TABLE = {"t": jnp.ones((4, 2))}


def first_state(tx, params=TABLE, **options):
    def loss_fn(params, ids):
        return jnp.mean(params["t"][ids] ** 2)

    if "value_and_grad" in options:
        loss_fn = None
    return optfn.make_train_step(loss_fn, tx, **options).init(params)


FROZEN = {".*": optfn.ParamAttr(trainable=False)}


@pytest.mark.parametrize(
    "tx",
    [
        optfn.adam(0.1, param_attrs=FROZEN),
        optfn.sgd(0.1, param_attrs={"t": optfn.ParamAttr(learning_rate=0.0)}),
        optfn.skip_nonfinite(
            tx=optfn.chain(optfn.l2_decay(0.1), optfn.adam(0.1, param_attrs=FROZEN))
        ),
    ],
    ids=["trainable", "rate", "wrapped"],
)
def test_a_step_that_trains_nothing_is_said_at_the_users_line(tx):
    with pytest.warns(UserWarning, match="no parameter is trained, because .* freezes") as caught:
        first_state(tx, packed=True)
    assert [entry.filename for entry in caught] == [__file__]


def test_a_step_that_trains_something_is_not_mentioned():
    params = {"a": jnp.ones((2, 2)), "b": jnp.ones(2)}
    some = {"a": optfn.ParamAttr(trainable=False)}
    others = optfn.adamw(0.1, param_attrs=FROZEN)
    for tx in (optfn.sgd(0.1, param_attrs=some), optfn.muon(0.1, others=others)):
        optfn.make_train_step(lambda p, x: jnp.sum(p["b"] * x), tx).init(params)


def test_params_without_leaves_are_said():
    with pytest.warns(UserWarning, match="no parameter is trained, because params have no leaves"):
        optfn.make_train_step(lambda p, x: jnp.sum(x), optfn.sgd(0.1)).init({})


def test_lazy_without_tables_is_said_at_the_users_line():
    inside = optfn.chain(optfn.skip_nonfinite(optfn.adam(0.1, lazy=True)))
    words = r"adam\(lazy=True\) has no effect without tables="
    with pytest.warns(UserWarning, match=words) as caught:
        first_state(inside)
    assert [entry.filename for entry in caught] == [__file__]
    with pytest.warns(UserWarning, match=r"adamw\(lazy='exact'\) has no effect"):
        first_state(optfn.adamw(0.1, lazy="exact"))


def test_lazy_is_not_mentioned_where_rows_may_come_or_where_nothing_is_asked():
    tx = optfn.adam(0.1, lazy=True)
    first_state(tx, tables="t")
    first_state(tx, value_and_grad=optfn.sparse.value_and_grad(lambda p, x: p["t"][x].sum(), "t"))
    first_state(tx, {"t": jnp.ones(4)})  # no table
    first_state(optfn.ftrl(0.1))  # lazy by default
    first_state(optfn.adam(0.1, lazy=False))


def planned(params):
    return optfn.distributed.plan_memory(TX, params, optfn.distributed.data_mesh())


@pytest.mark.parametrize("look", [lambda params: optfn.summary(TX, params), planned])
def test_summary_and_plan_refuse_what_the_step_refuses(look):
    """And take what it takes, also as shapes."""
    variables = LinenNet().init(jax.random.key(0), X[0])
    models = (NnxNet(), variables, eqx.nn.MLP(3, 1, 4, 1, key=jax.random.key(0)))
    lines = ("nnx.split(model, nnx.Param, ...)", 'variables["params"]', "eqx.partition(model, ")
    for model, line in zip(models, lines, strict=True):
        with pytest.raises(TypeError) as caught:
            look(model)
        assert line in str(caught.value) and line in error_of(model)
    of_nnx = nnx.split(models[0], nnx.Param, ...)[1]
    arrays, _ = eqx.partition(models[2], eqx.is_inexact_array)
    for params in (of_nnx, variables["params"], arrays, nnx.Linear(3, 2, rngs=nnx.Rngs(0))):
        assert str(look(params)) == str(look(jax.eval_shape(lambda x: x, params)))
