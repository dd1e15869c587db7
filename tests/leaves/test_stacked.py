"""Layers stacked in one leaf are tensors of their own to rules with a norm per tensor."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from problems import STAGES, steps

import optfn
from optfn.distributed import stack_stages, unstack_stages

STEPS = 2


def layers(seed):
    rng = np.random.default_rng(seed)
    return [{"b": normal(rng, 3) * 2**k, "w": normal(rng, 4, 3) * (k + 1)} for k in range(STAGES)]


def normal(rng, *shape):
    return jnp.asarray(rng.standard_normal(shape), jnp.float32)


def trained(tx, params, gradients):
    """Return the updates of a few steps."""
    return [step.updates for step in steps(tx, params, gradients)]


def test_an_attribute_stacks_beside_packed_leaves_of_the_same_shape():
    """These are one tensor. tests/reference_run draws other rules and shapes."""
    attrs = {"layers/.*": optfn.ParamAttr(stacked=1)}
    trees = []
    for seed in range(1 + STEPS):
        alone = normal(np.random.default_rng(100 + seed), STAGES, 4, 3)
        trees.append({"layers": layers(seed), "w": alone})
    want = trained(optfn.lamb(0.1), trees[0], trees[1:])
    packed = [optfn.pack(t | {"layers": stack_stages(t["layers"]).layers}) for t in trees]
    got = trained(optfn.lamb(0.1, param_attrs=attrs), packed[0], packed[1:])
    for a, b in zip(map(optfn.unpack, got), want, strict=True):
        chex.assert_trees_all_close(unstack_stages(a["layers"]), b["layers"], rtol=2e-6)
        # Norms of packed leaves add up in another order, which shows where a difference is small.
        np.testing.assert_allclose(a["w"], b["w"], rtol=2e-6, atol=1e-8)


def test_too_many_stacked_axes_are_an_error():
    attrs = {"w": optfn.ParamAttr(stacked=2)}
    with pytest.raises(ValueError, match=r"stacked=2 for leaf 'w' must be at most 1, .*\(3,\)"):
        optfn.lamb(0.1, param_attrs=attrs).init({"w": jnp.ones(3)})
    with pytest.raises(ValueError, match="stacked must be >= 0; got -1"):
        optfn.ParamAttr(stacked=-1)


def test_the_mark_adds_no_word_and_reads_like_the_tree():
    params = stack_stages(layers(0), virtual_stages=2)
    assert params["w"].shape == (2, STAGES // 2, 4, 3)
    state = optfn.adam(0.1).init(params)
    assert "scale_by_adam/mu/w" in optfn.state_dict(state)
    with pytest.raises(KeyError):
        params["other"]
    assert "w" in params and "other" not in params
    pair = stack_stages([(jnp.ones((4, 3)), jnp.zeros(3)) for _ in range(STAGES)])
    assert pair[0].shape == (STAGES, 4, 3) and pair[-1].shape == (STAGES, 3)
    assert optfn.sgd(0.1).update(pair, optfn.sgd(0.1).init(pair), pair)[0][1].shape == (STAGES, 3)


@pytest.mark.parametrize("packed", [False, True])
def test_a_mark_of_leaves_without_gradient(packed):
    """An integer leaf and a frozen one may have the gradient None, marked or not."""
    attrs = {
        "frozen": optfn.ParamAttr(stacked=1, trainable=False),
        ".*": optfn.ParamAttr(stacked=1),
    }
    params = {"frozen": jnp.ones((2, 3)), "n": jnp.arange(3), "w": jnp.ones((2, 3))}
    grads = {"frozen": jnp.ones((2, 3)), "n": jnp.zeros(3, jnp.int32), "w": jnp.ones((2, 3))}
    if packed:
        params, grads = optfn.pack(params), optfn.pack(grads)
        grads = jax.tree.map(lambda g: None if g.dtype == jnp.int32 else g, grads)
    else:
        grads |= {"frozen": None, "n": None}
    tx = optfn.lamb(0.1, param_attrs=attrs)
    updates, _ = tx.update(grads, tx.init(params), params)
    moved = optfn.unpack(optfn.apply_updates(params, updates))
    np.testing.assert_array_equal(moved["frozen"], jnp.ones((2, 3)))
    np.testing.assert_array_equal(moved["n"], jnp.arange(3))
    assert float(jnp.max(moved["w"])) < 1
