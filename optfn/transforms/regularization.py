"""Weight decay: penalties added to the gradient, and decay decoupled from it."""

import jax
import jax.numpy as jnp
import optax

from optfn import checks, core
from optfn.checks import Number, Scalar
from optfn.leaves import leafwise, numerics, tree
from optfn.leaves.tree import Pattern
from optfn.leaves.types import Params, Updates

_DENSE = "a regularizer changes all rows, so a row-sparse gradient becomes dense"


def l1_penalty(g: jax.Array, p: jax.Array, *, coeff: Scalar) -> jax.Array:
    """Return g + coeff·sign(p), with sign(0) = 0."""
    return g + numerics.scalar(coeff, g) * jnp.sign(p)


def l2_penalty(g: jax.Array, p: jax.Array, *, coeff: Scalar) -> jax.Array:
    """Return g + coeff·p."""
    return g + numerics.scalar(coeff, g) * p


def decay_of_leaves(exclude: Pattern | None, coeff: Scalar, updates: Updates) -> leafwise.PerLeaf:
    """Return the coefficient of each leaf: 0 where `exclude` selects the leaf, else `coeff`."""
    excluded = tree.select(exclude, updates, "exclude")
    return leafwise.per_leaf(lambda flag: 0.0 if flag else coeff, excluded, updates)


@core.transform(needs_params=True)
def l1_decay(coeff: Number) -> optax.GradientTransformationExtraArgs:
    """Add the gradient of coeff·‖p‖₁: g = g + coeff·sign(p), sign(0) = 0.

    Args:
      coeff: the coefficient, ≥ 0.

    No state. Needs params; real leaves.

    Source: fluid.regularizer.L1Decay.
    """
    coeff = checks.nonnegative("coeff", coeff)
    return core.stateless(
        lambda updates, params: leafwise.apply(
            l1_penalty, leafwise.densify(updates, _DENSE), params=params, coeff=coeff
        )
    )


@core.transform(needs_params=True, complex_leaves=True)
def l2_decay(coeff: Number) -> optax.GradientTransformationExtraArgs:
    """Add the gradient of coeff/2·‖p‖₂²: g = g + coeff·p.

    Args:
      coeff: the coefficient, ≥ 0.

    No state. Needs params; real and complex leaves.

    Source: fluid.regularizer.L2Decay.
    """
    coeff = checks.nonnegative("coeff", coeff)
    return core.stateless(
        lambda updates, params: leafwise.apply(
            l2_penalty, leafwise.densify(updates, _DENSE), params=params, coeff=coeff
        )
    )


@core.transform(needs_params=True)
def add_decayed_weights(
    weight_decay: Number, *, exclude: Pattern | None = None
) -> optax.GradientTransformationExtraArgs:
    """Add decoupled weight decay to a direction: u = u + weight_decay·p.

    Unlike `l2_decay` it follows the moments, so that they do not scale the decay. Where the
    direction is row-sparse (Adam's lazy mode), only the rows in it decay.

    Args:
      weight_decay: the coefficient, ≥ 0.
      exclude: the leaves without decay: a regular expression that matches their whole path, or a
        function path -> bool.

    No state. Needs params; real leaves.

    Source: Loshchilov & Hutter 2019, arXiv 1711.05101, algorithm 2.
    """
    coeff = checks.nonnegative("weight_decay", weight_decay)
    exclude = tree.check_pattern("exclude", exclude)

    def update(updates: Updates, params: Params) -> Updates:
        coeffs = decay_of_leaves(exclude, coeff, updates)
        return leafwise.apply(l2_penalty, updates, params=params, rows="touched", coeff=coeffs)

    return core.stateless(update)
