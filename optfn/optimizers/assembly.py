"""The decorator of optimizers: it puts clip and regularization in front of an optimizer's chain."""

import functools
import inspect
from collections.abc import Callable
from typing import NamedTuple, ParamSpec

import optax

from optfn import core
from optfn.core import leafwise
from optfn.core.traits import traits
from optfn.wrappers.attributes import apply_attributes
from optfn.wrappers.master_weights import choose_masters

P = ParamSpec("P")

COMMON = "grad_clip", "regularization", "param_attrs", "multi_precision"
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
    factory: Callable[P, list[core.Unchecked] | optax.GradientTransformation],
) -> Callable[P, optax.GradientTransformationExtraArgs]:
    """Decorate a factory of links so that it returns one optimizer with the arguments that all
    share applied, and raise a TypeError if its signature lacks any.

    The factory has them in its signature, and its body does not use them: this decorator reads them
    from the call. All links are then one chain inside one boundary (`core.with_boundary`): it
    computes in float32 or wider, and rounds its update once, to the dtype of the parameter.
    """
    signature, name = inspect.signature(factory), factory.__name__
    if missing := [argument for argument in COMMON if argument not in signature.parameters]:
        raise TypeError(f"{name}: the signature of an optimizer needs {', '.join(missing)}")

    @functools.wraps(factory)
    def make(*args: P.args, **kwargs: P.kwargs) -> optax.GradientTransformationExtraArgs:
        links = core.links_of(core.call_factory(factory, args, kwargs))
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        fields = {"call": (name, args, kwargs), "module": factory.__module__}
        clip, penalty, attrs, masters = (bound.arguments[name] for name in COMMON)
        clip = _check_optional("grad_clip", clip, "optfn.clip_by_global_norm")
        penalty = _check_optional("regularization", penalty, "optfn.l2_decay")
        # Masters are inside: attributes freeze a parameter together with its master.
        with_masters = choose_masters(masters)

        def build(
            before: list[optax.GradientTransformation],
        ) -> optax.GradientTransformationExtraArgs:
            chain = core.chain_unchecked([*map(core.strip_boundary, before), *links])
            return with_masters(core.with_boundary(name, chain))

        decays = any(link.decays for link in links)
        return core.describe(apply_attributes(name, attrs, clip, penalty, build, decays), **fields)

    # Python 3.13 removes the indentation of docstrings, earlier versions don't.
    make.__doc__ = "\n\n".join(inspect.cleandoc(x) for x in (factory.__doc__ or "", COMMON_DOC))
    return core.returns_transformation(make)


def _check_optional(
    argument: str, tx: optax.GradientTransformation | None, usual: str
) -> optax.GradientTransformationExtraArgs | None:
    """Return `tx` as a gradient transformation, or None for None, and raise a TypeError that names
    the argument for anything else."""
    return None if tx is None else core.check_transform(argument, tx, usual)


@traits(link="pass")
class DenseRowsState(NamedTuple):
    """State of `dense_rows`: empty."""


@core.transform(complex_leaves=True)
def dense_rows(name: str) -> core.Unchecked:
    """Make row-sparse gradients dense, with a warning, for rules that update all rows, and return
    dense gradients unchanged.

    It is no public transform: optimizers begin their chain with it.
    """
    warning = f"{name} updates all rows of a table, so a row-sparse gradient becomes dense"

    return core.stateless(
        lambda updates, params: leafwise.densify_rows(updates, warning), DenseRowsState()
    )
