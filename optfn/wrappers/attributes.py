"""Attributes of parameters, by path: fluid's ParamAttr, no_grad_set and parameter_list."""

import dataclasses
import re
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import optax

from optfn import checks, core
from optfn.leaves import leafwise, mismatch, packed, tree
from optfn.leaves.layout import BufferLayout
from optfn.leaves.tree import Flags
from optfn.leaves.types import Leaf, OptState, Params, PyTree, Updates


class _Inherit:
    def __repr__(self) -> str:
        return "<inherit>"


INHERIT = _Inherit()


@dataclasses.dataclass(frozen=True)
class ParamAttr:
    """How an optimizer treats a parameter.

    Args:
      learning_rate: a factor of the optimizer's rate, ≥ 0; exact for every rule, also where the
        rate is inside a recursion.
      regularization: a transform such as `l2_decay(1e-4)` that replaces the optimizer's own; None
        for no regularization.
      need_clip: whether the optimizer's `grad_clip` applies to the parameter; if not, it is left
        out of the global norm and is not scaled.
      trainable: False freezes the parameter: it never changes, bit for bit, and has no state.
      stacked: how many leading axes of the leaf count tensors, ≥ 0; 1 for layers that a model scans
        over. Rules with a norm per tensor (LAMB, LARS, `clip_by_norm`) then treat each layer as a
        separate leaf. The result of `optfn.distributed.stack_stages` needs no such attribute.

    Raises:
      TypeError: an argument of another type.
      ValueError: a learning_rate or stacked that is negative.
    """

    learning_rate: float = 1.0
    regularization: optax.GradientTransformation | _Inherit | None = INHERIT
    need_clip: bool = True
    trainable: bool = True
    stacked: int = 0

    def __post_init__(self) -> None:
        if not checks.is_host_number(self.learning_rate):
            raise TypeError(
                "ParamAttr: learning_rate must be a Python number, a factor of the optimizer's "
                f"rate; got {checks.shown(self.learning_rate)}"
            )
        checks.nonnegative("ParamAttr: learning_rate", self.learning_rate)
        checks.flag("ParamAttr: need_clip", self.need_clip)
        checks.flag("ParamAttr: trainable", self.trainable)
        checks.count("ParamAttr: stacked", self.stacked, low=0)
        if self.regularization is not None and self.regularization is not INHERIT:
            core.check_transform("ParamAttr: regularization", self.regularization, "optfn.l2_decay")

    def __repr__(self) -> str:
        given = (
            f"{field.name}={getattr(self, field.name)!r}"
            for field in dataclasses.fields(self)
            if getattr(self, field.name) != field.default
        )
        return f"ParamAttr({', '.join(given)})"


ParamAttrs = Mapping[str, ParamAttr]
DEFAULT = ParamAttr()


def check_param_attrs(param_attrs: object) -> ParamAttrs:
    """Return `param_attrs` if it maps patterns to ParamAttrs, and {} for None."""
    if param_attrs is None:
        return {}
    if not isinstance(param_attrs, Mapping):
        raise TypeError(
            "param_attrs must be a mapping from a pattern of paths to a ParamAttr; "
            f"got {checks.shown(param_attrs)}"
        )
    for pattern, attr in param_attrs.items():
        if not isinstance(pattern, str | re.Pattern):
            raise TypeError(f"param_attrs: a pattern must be a regular expression; got {pattern!r}")
        tree.check_pattern("param_attrs", pattern)
        if not isinstance(attr, ParamAttr):
            raise TypeError(f"param_attrs[{pattern!r}] must be a ParamAttr; got {attr!r}")
    return dict(param_attrs)


# For each leaf of a tree a tuple: its attributes, or for a buffer those of each leaf in it.
LeafAttrs = list[tuple[ParamAttr, ...]]


def resolve(param_attrs: ParamAttrs, params: Params) -> LeafAttrs:
    """Return the attributes of the leaves of `params`; the first pattern that matches counts.

    Raises:
      ValueError: a pattern matches none of the paths.
    """
    attrs = [(DEFAULT,) * len(names) for names in tree.names(params)]
    # Backwards, so that an earlier pattern overwrites a later one.
    for pattern, attr in reversed(list(param_attrs.items())):
        flags = tree.select(pattern, params, "param_attrs")
        attrs = [
            tuple(attr if chosen else before for chosen, before in zip(*pair, strict=True))
            for pair in zip(flags, attrs, strict=True)
        ]
    return attrs


def attributes_of(tx: optax.GradientTransformation, params: Params) -> dict[str, ParamAttr]:
    """Return the attributes that an optimizer gives to the leaves of `params`, by path.

    Optimizers inside wrappers and chains of optfn are included, those inside wrappers of other
    libraries are not.
    """
    found: dict[str, ParamAttr] = {}
    for part in getattr(tx, "parts", []):
        found |= attributes_of(part, params)
    param_attrs = getattr(tx, "param_attrs", None)
    if param_attrs:
        pairs = zip(tree.names(params), resolve(param_attrs, params), strict=True)
        found |= {name: attr for leaf in pairs for name, attr in zip(*leaf, strict=True)}
    return found


def for_leaves(
    tx: optax.GradientTransformation, param_attrs: ParamAttrs, choose: Callable[[ParamAttr], bool]
) -> optax.GradientTransformationExtraArgs:
    """Return `tx` for the leaves whose attributes `choose` selects; the others pass unchanged.

    Only the selected leaves must be real where `tx` takes no complex leaves.
    """
    rule = optax.with_extra_args_support(core.rule_of(tx))
    real_only = getattr(tx, "real_only", "")

    def chosen(updates: Updates) -> Flags:
        return [tuple(map(choose, leaf)) for leaf in resolve(param_attrs, updates)]

    def init(params: Params) -> optax.MaskedState:
        selected = packed.keep(params, chosen(params))
        mismatch.check_params(real_only, selected, real_only)
        return optax.MaskedState(rule.init(selected))

    def update(
        updates: Updates, state: OptState, params: Params | None = None, **extra: Any
    ) -> tuple[Updates, OptState]:
        flags = chosen(updates)
        selected_params = None if params is None else packed.keep(params, flags)
        selected = packed.keep(updates, flags)
        mismatch.check_params(real_only, selected, real_only, "gradient")
        selected, inner = rule.update(selected, state.inner_state, selected_params, **extra)
        return packed.fill(selected, flags, updates), optax.MaskedState(inner)

    made = core.Transform(init, update)
    made.rule = core.rule(init, update)
    made.needs_params = getattr(tx, "needs_params", False)
    return made


def attributed(
    name: str, tx: optax.GradientTransformationExtraArgs, param_attrs: ParamAttrs
) -> optax.GradientTransformationExtraArgs:
    """Return `tx` with frozen leaves, per-leaf rates and stacked axes as `param_attrs` says.

    To `tx` a frozen leaf is masked. Its update is −0.0, which does not change a bit of it. The
    factors of the rate reach `tx` as the extra argument `rate_factors`.

    Args:
      name: the optimizer's name in errors.
      tx: the optimizer.
      param_attrs: attributes by pattern.
    """
    if not param_attrs:
        return tx

    def init(params: Params) -> OptState:
        return tx.init(_trained(params, resolve(param_attrs, params)))

    def update(
        updates: Updates, state: OptState, params: Params | None = None, **extra: Any
    ) -> tuple[Updates, OptState]:
        if params is not None:
            tree.check_same_structure(name, "updates", updates, "params", params)
        attrs = resolve(param_attrs, updates)
        gradients, structure = tree.flatten(updates)
        parameters = [None] * len(gradients) if params is None else tree.flatten(params)[0]
        frozen = [
            g if all(attr.trainable for attr in leaf) else _frozen_update(g, p)
            for leaf, g, p in zip(attrs, gradients, parameters, strict=True)
        ]
        trained = _trained(updates, attrs)
        if any(attr.learning_rate != 1.0 for leaf in attrs for attr in leaf):
            rates = [tuple(attr.learning_rate for attr in leaf) for leaf in attrs]
            rates = packed.filter_per_leaf(rates, _trainable(attrs), updates)
            extra["rate_factors"] = leafwise.per_leaf(lambda rate: rate, rates, trained)
        trained_params = None if params is None else _trained(params, attrs)
        updated, state = tx.update(trained, state, trained_params, **extra)
        return packed.fill(updated, _trainable(attrs), structure.unflatten(frozen)), state

    made = core.Transform(init, update)
    made.param_attrs = param_attrs
    return made


def _trainable(attrs: LeafAttrs) -> Flags:
    return [tuple(attr.trainable for attr in leaf) for leaf in attrs]


def _trained(values: PyTree, attrs: LeafAttrs) -> PyTree:
    """Return a tree like params with frozen leaves masked and stacked leaves in a `Stacked`."""
    # A gradient may be missing where nothing is trained, so no mark may be there either.
    stacked = [tuple(attr.stacked * attr.trainable for attr in leaf) for leaf in attrs]
    if any(axes for leaf in stacked for axes in leaf):
        pairs = zip(tree.names(values), tree.layouts(values), stacked, strict=True)
        for names, layout, leaf in pairs:
            _check_axes(names, layout, leaf)
        values = packed.mark_stacked(values, stacked)
    return packed.keep(values, _trainable(attrs))


def _check_axes(names: tuple[str, ...], layout: BufferLayout, stacked: tuple[int, ...]) -> None:
    shapes = [run.shape for run in layout.runs for _ in run.leaves]
    for name, shape, axes in zip(names, shapes, stacked, strict=True):
        if axes > len(shape) and shape:
            raise ValueError(
                f"param_attrs: stacked={axes} for leaf {name!r} of shape {shape}; it must be at "
                f"most the number of axes, {len(shape)}"
            )


def _frozen_update(g: Leaf, p: Leaf) -> Leaf:
    return core.frozen_update(g, g if p is None else p)


def clip_and_regularize(
    grad_clip: optax.GradientTransformation | None,
    regularization: optax.GradientTransformation | None,
    param_attrs: ParamAttrs,
) -> list[optax.GradientTransformation]:
    """Return the transforms that precede the optimizer's own chain, each for its leaves."""
    attrs = check_param_attrs(param_attrs)
    return [*_clipping(grad_clip, attrs), *regularizing(regularization, attrs)]


def _clipping(
    grad_clip: optax.GradientTransformation | None, attrs: ParamAttrs
) -> list[optax.GradientTransformation]:
    """Return `grad_clip` for the leaves with need_clip; nothing if it is None."""
    if grad_clip is None:
        return []
    if all(attr.need_clip for attr in attrs.values()):
        return [grad_clip]
    return [for_leaves(grad_clip, attrs, lambda attr: attr.need_clip)]


def regularizing(
    regularization: optax.GradientTransformation | None, attrs: ParamAttrs
) -> list[optax.GradientTransformation]:
    """Return transforms that regularize each leaf by its own penalty, else by the optimizer's."""
    penalties = {id(a.regularization): a.regularization for a in attrs.values()}
    if set(penalties) <= {id(INHERIT)}:
        return [] if regularization is None else [regularization]
    parts = []
    for penalty in {id(INHERIT): INHERIT, **penalties}.values():
        tx = regularization if penalty is INHERIT else penalty
        if tx is not None:
            parts.append(for_leaves(tx, attrs, partial(_is_regularized_by, penalty)))
    return parts


def _is_regularized_by(penalty: object, attr: ParamAttr) -> bool:
    return attr.regularization is penalty
