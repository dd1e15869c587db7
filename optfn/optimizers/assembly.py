"""What every optimizer goes through: clip, then regularize, then its own chain."""

from typing import Any

import optax

from optfn import checks, core
from optfn.leaves import leafwise
from optfn.wrappers.attributes import (
    ParamAttrs,
    attributed,
    check_param_attrs,
    clipping,
    regularizing,
)
from optfn.wrappers.master_weights import master_weights


def optimizer(
    name: str,
    *rule: optax.GradientTransformation,
    grad_clip: optax.GradientTransformation | None,
    regularization: optax.GradientTransformation | None,
    param_attrs: ParamAttrs | None,
    multi_precision: bool,
) -> optax.GradientTransformationExtraArgs:
    """Return the chain clip → regularize → rule as one transform.

    The gradient is clipped before the regularizer adds its term, so that the term is never clipped.
    The whole chain runs in float32 or wider; the update is rounded to the dtype of the parameter
    once, at its end.

    Args:
      name: how the optimizer is called in errors.
      *rule: the transforms that make a step from a gradient.
      grad_clip: a transform of the raw gradients, such as `clip_by_global_norm(1.0)`.
      regularization: a transform that adds a penalty's gradient, such as `l2_decay(1e-4)`.
      param_attrs: a mapping from a pattern of paths to a ParamAttr.
      multi_precision: whether to keep float32 masters of narrower parameters.
    """
    attrs = check_param_attrs(param_attrs)
    chain = optax.chain(
        *clipping(grad_clip, attrs),
        *regularizing(regularization, attrs),
        *rule,
    )
    tx: Any = core.transform(name, chain.init, chain.update, complex_leaves=True)
    if checks.flag("multi_precision", multi_precision):
        tx = master_weights(tx)
    return attributed(name, tx, attrs)


def dense_rows(name: str) -> optax.GradientTransformationExtraArgs:
    """Make row-sparse gradients dense, with a warning: the rule is not defined for rows alone."""
    warning = f"{name} moves all rows of a table, so a row-sparse gradient becomes dense"
    return core.stateless(
        name, lambda updates, params: leafwise.densify(updates, warning), complex_leaves=True
    )
