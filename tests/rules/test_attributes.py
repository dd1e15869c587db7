"""Attributes of parameters: rates, decays, clips and frozen leaves by the path of a leaf."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import registry
from grids import by_entry
from problems import run, tree

import optfn


@by_entry(registry.OPTIMIZERS, "asgd_batches", "rmsprop", "adamw_int8", "ftrl_dense_rows", "muon")
def test_untrainable_leaves_are_left_alone_bit_for_bit(entry):
    """−0.0 stays −0.0; there is no state; the gradient may be anything, or missing."""
    held = {"a/.*": optfn.ParamAttr(trainable=False)}
    options = {"param_attrs": held, "grad_clip": optfn.clip_by_global_norm(1.0)}
    tx = entry.make(**options)
    params = tree(0)
    params["a"]["b"] = jnp.array([-0.0, 0.0, jnp.nan, jnp.inf])
    state = tx.init(params)
    only_c = jax.tree.leaves(tx.init({"c": params["c"]} | {"a": {"w": jnp.zeros(0)}}))
    assert sum(x.size for x in jax.tree.leaves(state)) == sum(x.size for x in only_c)
    for gradient in (tree(1)["a"], {"w": None, "b": jnp.full(4, jnp.nan)}):
        grads = {"a": gradient, "c": tree(1)["c"]}
        updates, _ = tx.update(grads, state, params)
        for new in (optax.apply_updates(params, updates), optfn.apply_updates(params, updates)):
            for before, after in zip(
                jax.tree.leaves(params["a"]), jax.tree.leaves(new["a"]), strict=True
            ):
                assert before.tobytes() == after.tobytes()
            assert np.isfinite(new["c"]).all()  # the held NaN is not in the global norm


@pytest.mark.parametrize(
    ("attrs", "error", "words"),
    [
        ({"x.*": optfn.ParamAttr()}, ValueError, "'x.*' matches no leaf.*'a/b', 'a/w', 'c'"),
        ({"a": optfn.ParamAttr()}, ValueError, "'a' matches no leaf"),
        ({"(": optfn.ParamAttr()}, ValueError, "not a regular expression"),
        ({"a/w": 0.5}, TypeError, "must be a ParamAttr; got 0.5"),
        ({3: optfn.ParamAttr()}, TypeError, "pattern must be a regular expression; got 3"),
        ([("a", optfn.ParamAttr())], TypeError, "must be a mapping"),
    ],
)
def test_bad_attributes(attrs, error, words):
    with pytest.raises(error, match=words.replace("(", r"\(")):
        optfn.sgd(0.1, param_attrs=attrs).init(tree(0))


def test_a_factor_of_a_scheduled_decay():
    attrs = {"a/.*": optfn.ParamAttr(weight_decay=0.5)}
    gradients = [tree(k) for k in (1, 2, 3)]
    got, _ = run(
        optfn.adamw(0.1, weight_decay=lambda i: 0.2 / (1 + i), param_attrs=attrs),
        tree(0),
        gradients,
    )
    want, _ = run(optfn.adamw(0.1, weight_decay=lambda i: 0.1 / (1 + i)), tree(0), gradients)
    chex.assert_trees_all_close(got[-1]["a"], want[-1]["a"], rtol=1e-6)


def test_an_optimizer_without_decay_refuses_a_factor_of_it():
    attrs = {"a/.*": optfn.ParamAttr(weight_decay=0.0)}
    dgc = {"rampup_begin_step": 0, "param_attrs": attrs}
    for make in (
        lambda: optfn.adam(0.1, param_attrs=attrs),
        lambda: optfn.sgd(0.1, regularization=optfn.l2_decay(0.1), param_attrs=attrs),
        lambda: optfn.dgc_momentum(0.1, 0.9, **dgc),
    ):
        with pytest.raises(ValueError, match=r"'a/\.\*'.*weight_decay=0 is a factor.*has none"):
            make()
    optfn.adam(0.1, param_attrs={"a/.*": optfn.ParamAttr(weight_decay=1.0)})


def test_python_scalars_beside_attributes_and_wrappers():
    """A frozen number does not move, a norm of numbers is one, and errors can be built of them."""
    params, grads = {"a": 2.0, "b": 1.0}, {"a": 3.0, "b": 4.0}
    tx = optfn.sgd(0.1, param_attrs={"a": optfn.ParamAttr(trainable=False)})
    updates, _ = tx.update(grads, tx.init(params), params)
    assert float(updates["a"]) == 0 and np.signbit(updates["a"])
    tx = optfn.record_metrics(optfn.sgd(0.1))
    _, state = tx.update(grads, tx.init(params), params)
    assert float(optfn.metrics(state)["grad_norm"]) == 5
    tx = optfn.accumulate(optfn.sgd(0.1), 2)
    with pytest.raises(ValueError, match=r"'a' has shape \(\); in the state it is \(2,\)"):
        tx.update({"a": 3.0}, tx.init({"a": jnp.ones(2)}))


def test_complex_leaves_beside_a_real_penalty_of_others():
    """Only the leaves that a penalty or a clip applies to must be real."""
    params = {"w": jnp.ones(2), "z": jnp.ones(2, jnp.complex64)}
    penalty = optfn.ParamAttr(regularization=optfn.l1_decay(0.5))
    tx = optfn.sgd(1.0, param_attrs={"w": penalty})
    updates, _ = tx.update(params, tx.init(params), params)
    np.testing.assert_array_equal(updates["w"], [-1.5, -1.5])
    np.testing.assert_array_equal(updates["z"], [-1, -1])
    tx = optfn.sgd(
        1.0, grad_clip=optfn.clip_by_value(0.5), param_attrs={"z": optfn.ParamAttr(need_clip=False)}
    )
    updates, _ = tx.update(params, tx.init(params), params)
    np.testing.assert_array_equal(updates["w"], [-0.5, -0.5])
    np.testing.assert_array_equal(updates["z"], [-1, -1])
    tx = optfn.sgd(1.0, param_attrs={"z": penalty})
    with pytest.raises(TypeError, match=r"l1_decay is not defined for complex leaves.*'z'"):
        tx.update(params, tx.init(params), params)
