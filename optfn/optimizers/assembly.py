"""The decorator of optimizers: it puts clip and regularization in front of an optimizer's chain."""

import functools
import inspect
from collections.abc import Callable, Sequence
from functools import partial
from typing import ParamSpec

import numpy as np
import optax

from optfn import checks, core
from optfn.leaves import leafwise
from optfn.wrappers.attributes import with_attributes
from optfn.wrappers.master_weights import master_weights

P = ParamSpec("P")

COMMON_DOC = """
    Arguments of every optimizer:
      grad_clip: a transform that clips the raw gradients, such as `clip_by_global_norm(1.0)`.
      regularization: a transform that adds the gradient of a penalty, such as `l2_decay(1e-4)`. It
        comes after the clip, so that the penalty is not clipped.
      param_attrs: a mapping from regular expressions to `ParamAttr`, to freeze parameters or to
        give them another rate. An expression must match the whole path of a leaf; the first match
        counts.
      multi_precision: whether to keep float32 masters of narrower parameters, so that small updates
        are not rounded away (`master_weights`). True keeps copies; 32 or 24 keeps only remainders
        of 16 or 8 bits for bfloat16 parameters.
"""


def optimizer(
    factory: Callable[P, optax.GradientTransformationExtraArgs],
) -> Callable[P, optax.GradientTransformationExtraArgs]:
    """Decorate a factory of chains: apply the four arguments that all optimizers share.

    The factory has these arguments in its signature, and this decorator applies them. The chain
    computes in float32 or wider, and its update is rounded once, to the dtype of the parameter.
    """
    signature = inspect.signature(factory)

    @core.named
    @functools.wraps(factory)
    def make(*args: P.args, **kwargs: P.kwargs) -> optax.GradientTransformationExtraArgs:
        own = core.rule_of(factory(*args, **kwargs))
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        common = bound.arguments
        masters = _masters(common["multi_precision"])

        def built(
            before: Sequence[optax.GradientTransformation],
        ) -> optax.GradientTransformationExtraArgs:
            links = [*(core.rule_of(tx) for tx in before), *(own.links or [own])]
            tx = core.behind_edge(factory.__name__, core.chained(links))
            return masters(tx)

        clip = _optional("grad_clip", common["grad_clip"], "optfn.clip_by_global_norm")
        penalty = _optional("regularization", common["regularization"], "optfn.l2_decay")
        if common["param_attrs"] is None:
            return built([tx for tx in (clip, penalty) if tx is not None])
        return with_attributes(
            factory.__name__, common["param_attrs"], clip, penalty, built, own.decays
        )

    # Python 3.13 removes the indentation of docstrings, earlier versions don't.
    make.__doc__ = "\n\n".join(inspect.cleandoc(x) for x in (factory.__doc__ or "", COMMON_DOC))
    return make


def _masters(
    multi_precision: object,
) -> Callable[[optax.GradientTransformation], optax.GradientTransformation]:
    """Return the wrapper that adds masters to an optimizer."""
    if isinstance(multi_precision, bool | np.bool_):
        return master_weights if multi_precision else lambda tx: tx
    if isinstance(multi_precision, int) and multi_precision in (32, 24):
        return partial(master_weights, bits=multi_precision)
    raise TypeError(
        f"multi_precision must be True, False, 32 or 24; got {checks.shown(multi_precision)}"
    )


def _optional(
    argument: str, tx: optax.GradientTransformation | None, usual: str
) -> optax.GradientTransformationExtraArgs | None:
    return None if tx is None else core.check_transform(argument, tx, usual)


@core.transform(complex_leaves=True)
def dense_rows(name: str) -> core.Rule:
    """Make row-sparse gradients dense, with a warning, for rules that update all rows."""
    warning = f"{name} updates all rows of a table, so a row-sparse gradient becomes dense"
    return core.stateless(lambda updates, params: leafwise.to_dense(updates, warning))
