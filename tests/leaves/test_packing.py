"""Packed parameters: every optimizer gives on one buffer what it gives on the tree."""

import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import registry

import optfn
from optfn import sparse
from optfn.leaves.packed import pack_like


def normal(shape, seed, dtype=np.float32):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape).astype(dtype))


def params():
    """Shapes that repeat and that do not, of two depths, and a leaf that is held."""
    return {
        "a": {"w": normal((5, 4), 0), "b": normal(4, 1)},
        "c": {"w": normal((5, 4), 2), "b": normal(4, 3)},
        "d": [normal(7, 4), normal((), 5)],
        "n": jnp.int32(3),
    }


def gradients(seed):
    def one(i, p):
        held = p.dtype == jnp.int32
        return np.zeros((), jax.dtypes.float0) if held else normal(p.shape, 100 * seed + i)

    leaves, structure = jax.tree.flatten(params())
    return structure.unflatten([one(i, p) for i, p in enumerate(leaves)])


@pytest.mark.parametrize("jitted", [False, True])
def test_there_and_back(jitted):
    tree = params() | {
        "h": normal((3, 2), 6).astype(jnp.bfloat16),
        "z": normal(2, 7) + 1j,
        "empty": jnp.zeros((0, 3)),
        "none": None,
        "key": jax.random.key(0),
    }
    both = (jax.jit if jitted else lambda fn: fn)(lambda tree: optfn.unpack(optfn.pack(tree)))
    back = both(tree)
    assert jax.tree.structure(back) == jax.tree.structure(tree)
    for old, new in zip(jax.tree.leaves(tree), jax.tree.leaves(back), strict=True):
        assert (old.dtype, old.shape) == (new.dtype, new.shape)
        if not jnp.issubdtype(old.dtype, jax.dtypes.prng_key):
            np.testing.assert_array_equal(old, new)
    packed = optfn.pack(tree)
    assert [b.shape for b in packed.buffers] == [(6,), (2,), (56,)]
    assert repr(packed).startswith("Packed(bfloat16[6] of 1 leaves, complex64[2] of 1 leaves")


def test_gradients_go_through_unpack():
    tree = {k: v for k, v in params().items() if k != "n"}

    def loss(tree):
        return sum(jnp.sum(jnp.sin(x) * (i + 1)) for i, x in enumerate(jax.tree.leaves(tree)[1:]))

    def packed_loss(packed):
        return loss(optfn.unpack(packed))

    packed, want = optfn.pack(tree), jax.jit(jax.grad(loss))(tree)
    for f in (packed_loss, jax.checkpoint(packed_loss)):
        chex.assert_trees_all_close(optfn.unpack(jax.jit(jax.grad(f))(packed)), want, rtol=1e-6)
    twice = jax.grad(lambda p: jnp.sum(jax.grad(packed_loss)(p).buffers[0] ** 2))
    plain = jax.grad(lambda t: sum(jnp.sum(g**2) for g in jax.tree.leaves(jax.grad(loss)(t))))
    found = jax.jit(twice)(packed)
    chex.assert_trees_all_close(optfn.unpack(found), jax.jit(plain)(tree), rtol=1e-6)
    stacked = jax.tree.map(lambda x: jnp.stack([x, 2 * x]), packed)
    found = jax.vmap(packed_loss)(stacked)
    np.testing.assert_allclose(found[1], loss(jax.tree.map(lambda x: 2 * x, tree)), rtol=1e-6)


def loss_fn(tree, x):
    for k in ("a", "c"):
        x = x + jnp.tanh(x @ tree[k]["w"].T) @ tree[k]["w"] + tree[k]["b"]
    return jnp.mean((x * tree["d"][1] + tree["d"][0][:4]) ** 2)


@pytest.mark.optimized
def test_a_packed_step_is_in_place():
    tree = {f"layer{k}": {"w": normal((32, 32), k), "b": normal(32, k)} for k in range(8)}

    def loss_fn(tree, x):
        for layer in tree.values():
            x = x + jnp.tanh(x @ layer["w"] + layer["b"])
        return jnp.mean(x**2)

    tx = registry.OPTIMIZERS["adam_clip_l2"].make()
    step = optfn.make_train_step(loss_fn, tx, packed=True)
    optfn.assert_in_place(step, step.init(tree), jnp.ones((4, 32)))


@pytest.mark.optimized
def test_slices_of_one_shape_share_their_code():
    """On CPU no slice is compiled for its own offset, and the gradient is not padded."""
    tree = {f"w{k}": normal((3, 3), k) for k in range(40)}

    def loss(packed, x):
        for w in optfn.unpack(packed).values():
            x = jnp.tanh(x @ w)
        return jnp.sum(x)

    compiled = jax.jit(jax.grad(loss)).lower(optfn.pack(tree), jnp.ones((2, 3))).compile()
    text = compiled.as_text()
    assert not re.findall(r"= f32\[\S+ slice\(%?\S*f32\[360\]", text)
    assert len(re.findall(r" dynamic-slice\(", text)) >= 1
    assert not re.findall(r" pad\(", text)


def test_errors():
    packed = optfn.pack(params())
    rows = sparse.Rows(jnp.zeros(1, jnp.int32), jnp.ones((1, 4)), 5)
    with pytest.raises(TypeError, match="leaf 't' is row-sparse"):
        optfn.pack({"t": rows})
    with pytest.raises(TypeError, match="leaf 'w' must be an array; got 'x'"):
        optfn.pack({"w": "x"})
    with pytest.raises(ValueError, match="missing 'n'"):
        pack_like(packed.layout, {k: v for k, v in params().items() if k != "n"})
    wrong = params()
    wrong["a"]["w"] = jnp.zeros((4, 5))
    with pytest.raises(ValueError, match=r"leaf 'a/w' has shape \(4, 5\); .* shape \(5, 4\)"):
        pack_like(packed.layout, wrong)
    with pytest.raises(ValueError, match="leaf 'd/0' is missing"):
        pack_like(packed.layout, params() | {"d": [None, jnp.zeros(())]})
    tx = optfn.adamw(0.1, exclude="nothing")
    with pytest.raises(ValueError, match=r"matches no leaf.*'a/b', 'c/b', 'a/w'"):
        tx.update(pack_like(packed.layout, gradients(0)), tx.init(packed), packed)
    with pytest.raises(ValueError, match=r"tables=.* cannot be combined with packed=True"):
        optfn.make_train_step(loss_fn, optfn.sgd(0.1), tables="a/w", packed=True)
    with pytest.raises(TypeError, match="packed"):
        optfn.make_train_step(loss_fn, optfn.sgd(0.1), packed="yes")
