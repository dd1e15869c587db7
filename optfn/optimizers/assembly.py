"""What every optimizer goes through: clip, then regularize, then its own chain."""

from typing import Any

import optax

from optfn import core


def optimizer(
    name: str,
    *rule: optax.GradientTransformation,
    grad_clip: optax.GradientTransformation | None = None,
    regularization: optax.GradientTransformation | None = None,
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
    """
    before = [
        _check(argument, tx)
        for argument, tx in (("grad_clip", grad_clip), ("regularization", regularization))
        if tx is not None
    ]
    chain = optax.chain(*before, *rule)
    return core.transform(name, chain.init, chain.update, complex_leaves=True)


def _check(argument: str, tx: Any) -> optax.GradientTransformation:
    if not isinstance(tx, optax.GradientTransformation):
        example = {"grad_clip": "clip_by_norm(1.0)", "regularization": "l2_decay(1e-4)"}[argument]
        raise TypeError(
            f"{argument} must be a gradient transformation such as optfn.{example}; "
            f"got {tx!r} of type {type(tx).__name__}"
        )
    return tx
