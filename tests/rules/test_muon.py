"""Muon: the orthogonalized momentum of matrices, and another optimizer for the rest."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from problems import steps
from references import JORDAN

import optfn
from optfn.distributed import stack_stages
from optfn.leaves.packed import pack_like
from optfn.transforms.muon import COEFFICIENTS, orthogonalize

DION = COEFFICIENTS["dion"]


def normal(seed, *shape):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), jnp.float32)


def like(tree, seed):
    leaves, structure = jax.tree.flatten(tree)
    return structure.unflatten([normal(seed + i, *x.shape) for i, x in enumerate(leaves)])


def followed(tx, params, gradients):
    """Return the params after the gradients, and the state."""
    return steps(tx, params, gradients)[-1][1:]


@pytest.mark.parametrize(
    ("coefficients", "shape", "is_complex"),
    [
        (JORDAN, (3, 7), True),
        (JORDAN, (2, 5, 5), False),
        (DION, (7, 3), False),
        (DION, (4, 1), True),
    ],
)
def test_the_iteration_is_a_polynomial_of_the_singular_values(coefficients, shape, is_complex):
    """U·p(S/‖m‖)·Vᴴ, with the singular vectors of NumPy in float64."""
    m = normal(0, *shape) + (1j * normal(1, *shape) if is_complex else 0)
    found = jax.jit(functools.partial(orthogonalize, coefficients=coefficients, eps=1e-7))(m)
    wide = np.asarray(m, np.complex128 if is_complex else np.float64)
    u, s, vh = np.linalg.svd(wide, full_matrices=False)
    s = s / np.linalg.norm(wide, axis=(-2, -1))[..., None]
    for a, b, c in coefficients:
        s = a * s + b * s**3 + c * s**5
    assert found.dtype == m.dtype
    np.testing.assert_allclose(found, (u * s[..., None, :]) @ vh, atol=2e-5)


PARAMS = {"wide": normal(0, 4, 6), "tall": normal(1, 9, 3), "b": normal(2, 5), "s": normal(3)}


def test_without_nesterov_it_is_the_muon_of_optax():
    """With nesterov, optax corrects the bias of the moving average and of g by other factors."""
    ours = optfn.muon(0.05, nesterov=False, eps=1e-8, weight_decay=0.1, coefficients="dion")
    theirs = optax.contrib.muon(
        0.05, nesterov=False, weight_decay=0.1, adam_weight_decay=0.1, ns_coeffs="dion"
    )
    gradients = [like(PARAMS, 10 * k) for k in range(1, 5)]
    found, _ = followed(ours, PARAMS, gradients)
    want, _ = followed(theirs, PARAMS, gradients)
    chex.assert_trees_all_close(found, want, atol=2e-6)


LAYERS = [{"w": normal(k, 4, 6), "b": normal(k + 9, 6)} for k in range(3)]


def test_stacked_layers_are_among_the_matrices():
    """Without a mark a leaf of three axes is no matrix."""
    stacked = {"layers": stack_stages(LAYERS), "head": normal(20, 6, 2)}
    bare = stacked | {"layers": stack_stages(LAYERS).layers}
    marked, plain = (optfn.state_dict(optfn.muon(0.1).init(x)) for x in (stacked, bare))
    assert "matrices/scale_by_momentum/velocity/layers/w" in marked
    assert "others/scale_by_adam/mu/layers/w" in plain


def test_packed_params_are_those_of_the_tree():
    """Matrices of unlike shapes lie in one buffer, beside vectors with rates of their own."""
    params = {"layers": LAYERS, "head": normal(20, 6, 2), "n": jnp.arange(2)}
    params |= {"half": normal(21, 3).astype(jnp.bfloat16)}
    rates = {"layers/.*w": 0.5, "layers/1/b|head": 0.1}
    attrs = {k: optfn.ParamAttr(learning_rate=rate) for k, rate in rates.items()}
    tx = optfn.muon(0.1, matrices="layers/.*w|head", weight_decay=0.1, param_attrs=attrs)
    grads = like({k: v for k, v in params.items() if k != "n"}, 50)
    grads = [grads | {"n": np.zeros(2, jax.dtypes.float0)}] * 3
    want, state = followed(tx, params, grads)
    packed = optfn.pack(params)
    own = [pack_like(packed.layout, g) for g in grads]
    found, packed_state = followed(tx, packed, own)
    chex.assert_trees_all_close(optfn.unpack(found), want, atol=2e-6)
    assert optfn.state_dict(state).keys() == optfn.state_dict(packed_state).keys()
    assert optfn.summary(tx, packed) == optfn.summary(tx, params)


def test_a_pattern_says_which_matrices():
    """The rest, matrices among them, is adamw's; summary says which leaf is whose."""
    params = {"emb": normal(0, 8, 4), "w": normal(1, 4, 4), "b": normal(2, 4)}
    tx = optfn.muon(0.1, matrices="w", weight_decay=0.1)
    gradients = [like(params, 60), like(params, 70)]
    found, _ = followed(tx, params, gradients)
    adam, _ = followed(optfn.adamw(0.1, weight_decay=0.1), params, gradients)
    alone, _ = followed(
        optfn.muon(0.1, weight_decay=0.1), {"w": params["w"]}, [{"w": g["w"]} for g in gradients]
    )
    for k in ("emb", "b"):
        np.testing.assert_array_equal(found[k], adam[k])
    np.testing.assert_array_equal(found["w"], alone["w"])
    rows = {line.split()[0]: line for line in optfn.summary(tx, params).splitlines()[2:5]}
    assert [k for k, line in rows.items() if "orthogonalized" in line] == ["w"]


def test_the_others_may_have_an_optimizer_and_a_rate_of_their_own():
    params = {"w": normal(1, 4, 4), "b": normal(2, 4)}
    tx = optfn.muon(0.02, others=optfn.sgd(0.5))
    gradients = [like(params, 60)]
    found, state = followed(tx, params, gradients)
    np.testing.assert_allclose(found["b"], params["b"] - 0.5 * gradients[0]["b"], rtol=1e-6)
    assert float(optfn.get_learning_rate(state, "matrices")) == pytest.approx(0.02)
    assert float(optfn.get_learning_rate(state, "others")) == 0.5
    with pytest.raises(ValueError, match="several learning rates"):
        optfn.get_learning_rate(state)
    lower = optfn.set_learning_rate(state, 0.01, "matrices")
    assert float(optfn.get_learning_rate(lower, "matrices")) == pytest.approx(0.01)
    assert float(optfn.get_learning_rate(lower, "others")) == 0.5


def test_factors_of_the_decay_reach_packed_matrices_and_given_others():
    params = {"v": normal(1, 4, 6), "w": normal(2, 4, 6), "b": normal(3, 4)}
    zero = pack_like(optfn.pack(params).layout, jax.tree.map(jnp.zeros_like, params))
    attrs = {"w|b": optfn.ParamAttr(weight_decay=0.5)}
    others = optfn.adamw(0.1, weight_decay=0.1)
    tx = optfn.muon(0.1, weight_decay=0.1, others=others, param_attrs=attrs)
    found = optfn.unpack(followed(tx, optfn.pack(params), [zero])[0])
    for k, factor in {"v": 0.99, "w": 0.995, "b": 0.995}.items():
        np.testing.assert_allclose(found[k], factor * params[k], rtol=1e-6)


def test_products_in_bfloat16_are_near_those_in_float32():
    """Each product rounds by 2⁻⁹, and a later step multiplies what an earlier one has added."""
    m = {"w": normal(5, 64, 96)}
    found, want = (
        followed(optfn.muon(1.0, compute_dtype=dtype), m, [like(m, 90)])[0]["w"] - m["w"]
        for dtype in ("bfloat16", None)
    )
    error = float(jnp.linalg.norm(found - want) / jnp.linalg.norm(want))
    assert 1e-3 < error < 0.1


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"matrices": "b"}, r"'b' of shape \(4,\), which has 1 axis; a matrix has two.*Stacked"),
        ({"matrices": lambda path: True}, r"selects leaf 'b' of shape \(4,\)"),
        ({"matrices": "conv"}, r"'conv' of shape \(2, 3, 4\), which has 3 axes;"),
        ({"matrices": "none"}, "matrices: the pattern 'none' matches no leaf"),
        (
            {"matrices": "b", "param_attrs": {"b": optfn.ParamAttr(stacked=1)}},
            "has 0 axes besides the 1 stacked",
        ),
    ],
)
def test_what_is_no_matrix_is_refused_by_name(options, words):
    params = {"w": jnp.ones((3, 4)), "b": jnp.ones(4), "conv": jnp.ones((2, 3, 4))}
    with pytest.raises(ValueError, match=words):
        optfn.muon(0.1, **options).init(params)


def test_a_scale_and_coefficients_of_ones_own():
    """A function (rows, columns) of the matrix, and triples for as many steps."""
    params, grads = {"w": normal(1, 4, 6)}, {"w": normal(2, 4, 6)}
    run = functools.partial(followed, params=params, gradients=[grads])
    unit, _ = run(optfn.muon(0.1, scale=lambda rows, columns: 1.0))
    scaled, _ = run(optfn.muon(0.1, scale=lambda rows, columns: 10.0 * rows + columns))
    moved = (scaled["w"] - params["w"]) / (unit["w"] - params["w"])
    np.testing.assert_allclose(moved, 46.0, rtol=1e-4)
    chex.assert_trees_all_equal(
        run(optfn.muon(0.1, coefficients=JORDAN[0]))[0], run(optfn.muon(0.1))[0]
    )
    once, _ = run(optfn.muon(0.1, nesterov=False, coefficients=[(1.0, 0.0, 0.0)]))
    step = 0.1 * np.sqrt(1.5) * grads["w"] / jnp.linalg.norm(grads["w"])
    np.testing.assert_allclose(once["w"], params["w"] - step, atol=1e-6)
