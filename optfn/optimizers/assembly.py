"""The decorator of optimizers: clip, regularize, then the optimizer's chain, behind one edge."""

import functools
import inspect
from collections.abc import Callable
from typing import ParamSpec

import optax

from optfn import checks, core
from optfn.leaves import leafwise
from optfn.wrappers.attributes import attributed, check_param_attrs, clip_and_regularize
from optfn.wrappers.master_weights import master_weights

P = ParamSpec("P")

# In this order, so that the penalty is not clipped; with the factory of the most common one.
BEFORE = {"grad_clip": "optfn.clip_by_global_norm", "regularization": "optfn.l2_decay"}
COMMON_DOC = """
    Arguments of every optimizer:
      grad_clip: a transform of the raw gradients, such as `clip_by_global_norm(1.0)`.
      regularization: a transform that adds the gradient of a penalty, such as `l2_decay(1e-4)`,
        after the clip, so that the penalty is not clipped.
      param_attrs: a mapping from regular expressions to `ParamAttr`. An expression must match the
        whole path of a leaf; the first match counts.
      multi_precision: whether to keep float32 masters of narrower parameters (`master_weights`).
"""


def optimizer(
    factory: Callable[P, optax.GradientTransformationExtraArgs],
) -> Callable[P, optax.GradientTransformationExtraArgs]:
    """Decorate a factory of transformations: the result is clip → regularize → what it makes.

    All of it stands behind one edge.

    The factory has the four common arguments in its signature; this decorator applies them. What
    it makes, most often a chain, computes in float32 or wider, and its update is rounded once to
    the dtype of the parameter.
    """
    signature = inspect.signature(factory)

    @core.named
    @functools.wraps(factory)
    def make(*args: P.args, **kwargs: P.kwargs) -> optax.GradientTransformationExtraArgs:
        made = factory(*args, **kwargs)
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        common = bound.arguments
        param_attrs = check_param_attrs(common["param_attrs"])
        before = [
            core.check_transform(name, common[name], usual)
            for name, usual in BEFORE.items()
            if common[name] is not None
        ]
        if param_attrs:
            before = clip_and_regularize(common["grad_clip"], common["regularization"], param_attrs)
        chain = core.chain(*before, *made.links)
        tx = core.behind_edge(factory.__name__, chain.rule, chain.needs_params, chain.real_only)
        if checks.flag("multi_precision", common["multi_precision"]):
            tx = master_weights(tx)
        return attributed(factory.__name__, tx, param_attrs)

    make.__doc__ = f"{(factory.__doc__ or '').rstrip()}\n{COMMON_DOC}"
    return make


@core.transform(complex_leaves=True)
def dense_rows(name: str) -> core.Rule:
    """Make row-sparse gradients dense, with a warning, for a rule that updates all rows."""
    warning = f"{name} updates all rows of a table, so a row-sparse gradient becomes dense"
    return core.stateless(lambda updates, params: leafwise.densify(updates, warning))
