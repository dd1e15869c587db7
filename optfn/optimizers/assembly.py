"""What every optimizer goes through: clip, then regularize, then its own chain, behind one edge."""

import functools
import inspect
from collections.abc import Callable
from functools import partial
from typing import Any, ParamSpec

import optax

from optfn import checks, core
from optfn.leaves import leafwise
from optfn.wrappers.attributes import (
    INHERIT,
    ParamAttr,
    ParamAttrs,
    attributed,
    check_param_attrs,
    for_leaves,
)
from optfn.wrappers.master_weights import master_weights

P = ParamSpec("P")

COMMON = """
    Arguments of every optimizer:
      grad_clip: a transform of the raw gradients, such as `clip_by_global_norm(1.0)`.
      regularization: a transform that adds the gradient of a penalty, such as `l2_decay(1e-4)`,
        after the clip, so that the penalty is not clipped.
      param_attrs: a mapping from regular expressions, which must match whole paths of leaves, to
        `ParamAttr`; the first match counts.
      multi_precision: whether to keep float32 masters of narrower parameters (`master_weights`).
"""


def optimizer(
    factory: Callable[P, optax.GradientTransformationExtraArgs],
) -> Callable[P, optax.GradientTransformationExtraArgs]:
    """Decorate the factory of an optimizer's own chain: clip → regularize → chain, behind one edge.

    The factory has the four common arguments in its signature, and leaves them to this decorator.
    The whole chain runs in float32 or wider; the update is rounded to the dtype of the parameter
    once, at its end.
    """
    signature = inspect.signature(factory)

    @core.named
    @functools.wraps(factory)
    def make(*args: P.args, **kwargs: P.kwargs) -> optax.GradientTransformationExtraArgs:
        chain = factory(*args, **kwargs)
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        given = bound.arguments
        attrs = check_param_attrs(given["param_attrs"])
        parts = core.chain(
            *clipping(given["grad_clip"], attrs),
            *regularizing(given["regularization"], attrs),
            *chain.parts,
        )
        tx = core.behind_edge(
            factory.__name__, parts.rule, parts.needs_params, parts.complex_leaves
        )
        if checks.flag("multi_precision", given["multi_precision"]):
            tx = master_weights(tx)
        return attributed(factory.__name__, tx, attrs)

    make.__doc__ = f"{(factory.__doc__ or '').rstrip()}\n{COMMON}"
    return make


def clipping(grad_clip: Any, attrs: ParamAttrs) -> list[optax.GradientTransformation]:
    """Return the transforms that clip the leaves that need it."""
    if grad_clip is None:
        return []
    core.check_transform("grad_clip", grad_clip, "clip_by_norm(1.0)")
    if all(attr.need_clip for attr in attrs.values()):
        return [grad_clip]
    return [for_leaves(grad_clip, attrs, lambda attr: attr.need_clip)]


def regularizing(regularization: Any, attrs: ParamAttrs) -> list[optax.GradientTransformation]:
    """Return the transforms that regularize each leaf by its own penalty or the common one."""
    if regularization is not None:
        core.check_transform("regularization", regularization, "l2_decay(1e-4)")
    penalties = {id(a.regularization): a.regularization for a in attrs.values()}
    if set(penalties) <= {id(INHERIT)}:
        return [] if regularization is None else [regularization]
    parts = []
    for penalty in {id(INHERIT): INHERIT, **penalties}.values():
        tx = regularization if penalty is INHERIT else penalty
        if tx is not None:
            parts.append(for_leaves(tx, attrs, partial(_is_regularized_by, penalty)))
    return parts


def _is_regularized_by(penalty: Any, attr: ParamAttr) -> bool:
    return attr.regularization is penalty


@core.transform(complex_leaves=True)
def dense_rows(name: str) -> core.Rule:
    """Make row-sparse gradients dense, with a warning: the rule is not defined for rows alone."""
    warning = f"{name} moves all rows of a table, so a row-sparse gradient becomes dense"
    return core.stateless(lambda updates, params: leafwise.densify(updates, warning))
