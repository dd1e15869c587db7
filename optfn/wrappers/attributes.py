"""Attributes of parameters, by path: fluid's ParamAttr, no_grad_set and parameter_list."""

import dataclasses
import re
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from functools import partial
from typing import Any

import jax.numpy as jnp
import optax

from optfn import checks, numerics
from optfn.leaves import leafwise, tree
from optfn.leaves import packed as packing


class _Inherit:
    def __repr__(self) -> str:
        return "<inherit>"


INHERIT = _Inherit()


@dataclasses.dataclass(frozen=True)
class ParamAttr:
    """How an optimizer treats a parameter.

    Args:
      learning_rate: a factor of the optimizer's rate, ≥ 0; exact for every rule, also those that
        have the rate inside a recursion.
      regularization: a transform such as `l2_decay(1e-4)` in place of the optimizer's own; None for
        no regularization.
      need_clip: whether the parameter takes part in the optimizer's `grad_clip`; where it does not,
        it is left out of the global norm and is not scaled.
      trainable: False leaves the parameter alone bit for bit, without state.
    """

    learning_rate: float = 1.0
    regularization: Any = INHERIT
    need_clip: bool = True
    trainable: bool = True

    def __post_init__(self) -> None:
        if not checks.is_host_number(self.learning_rate):
            raise TypeError(
                "ParamAttr: learning_rate must be a Python number, a factor of the optimizer's "
                f"rate; got {self.learning_rate!r} of type {type(self.learning_rate).__name__}"
            )
        checks.nonnegative("ParamAttr: learning_rate", self.learning_rate)
        checks.flag("ParamAttr: need_clip", self.need_clip)
        checks.flag("ParamAttr: trainable", self.trainable)
        if self.regularization is not None and self.regularization is not INHERIT:
            check_transform("ParamAttr: regularization", self.regularization, "l2_decay(1e-4)")


ParamAttrs = Mapping[str, ParamAttr]
DEFAULT = ParamAttr()


def check_transform(argument: str, tx: Any, example: str) -> optax.GradientTransformation:
    """Return `tx` if it is a gradient transformation; raise an error that names `argument`."""
    if not isinstance(tx, optax.GradientTransformation):
        raise TypeError(
            f"{argument} must be a gradient transformation such as optfn.{example}; "
            f"got {tx!r} of type {type(tx).__name__}"
        )
    return tx


def check_param_attrs(param_attrs: Any) -> ParamAttrs:
    """Return `param_attrs` if it maps patterns to ParamAttrs; {} for None."""
    if param_attrs is None:
        return {}
    if not isinstance(param_attrs, Mapping):
        raise TypeError(
            "param_attrs must be a mapping from a pattern of paths to a ParamAttr; "
            f"got {param_attrs!r} of type {type(param_attrs).__name__}"
        )
    for pattern, attr in param_attrs.items():
        if not isinstance(pattern, str | re.Pattern):
            raise TypeError(f"param_attrs: a pattern must be a regular expression; got {pattern!r}")
        tree.check_pattern("param_attrs", pattern)
        if not isinstance(attr, ParamAttr):
            raise TypeError(f"param_attrs[{pattern!r}] must be a ParamAttr; got {attr!r}")
    return dict(param_attrs)


# The attributes of a leaf; for a buffer of a Packed, those of the leaves in it.
Attrs = ParamAttr | tuple[ParamAttr, ...]


def resolve(param_attrs: ParamAttrs, params: Any) -> list[Attrs]:
    """Return the attributes of the leaves of `params`; the first pattern that matches wins.

    Raises:
      ValueError: a pattern matches none of the paths.
    """
    names = tree.names(params)
    attrs: list[Attrs] = [(DEFAULT,) * len(n) if isinstance(n, tuple) else DEFAULT for n in names]
    # Backwards, so that an earlier pattern overwrites a later one.
    for pattern, attr in reversed(list(param_attrs.items())):
        for i, matched in enumerate(tree.select(pattern, params, "param_attrs")):
            old = attrs[i]
            if isinstance(matched, tuple) and isinstance(old, tuple):
                attrs[i] = tuple(attr if m else o for m, o in zip(matched, old, strict=True))
            elif matched:
                attrs[i] = attr
    return attrs


def _each(of: Callable[[Any], Any], attrs: Sequence[Any]) -> list[Any]:
    return [tuple(map(of, a)) if isinstance(a, tuple) else of(a) for a in attrs]


def _all(of: Callable[[Any], bool], attrs: Sequence[Any]) -> bool:
    return all(all(v) if isinstance(v, tuple) else v for v in _each(of, attrs))


def _only(
    tx: optax.GradientTransformation,
    param_attrs: ParamAttrs,
    choose: Callable[[ParamAttr], bool],
) -> optax.GradientTransformationExtraArgs:
    """Return `tx` for the leaves whose attributes `choose` selects; the others pass."""
    tx = optax.with_extra_args_support(tx)

    def chosen(updates: Any) -> list[Any]:
        return _each(choose, resolve(param_attrs, updates))

    def init(params: Any) -> optax.MaskedState:
        return optax.MaskedState(tx.init(packing.keep(params, chosen(params))))

    def update(updates: Any, state: Any, params: Any = None, **extra: Any) -> tuple[Any, Any]:
        flags = chosen(updates)
        kept = None if params is None else packing.keep(params, flags)
        new, inner = tx.update(packing.keep(updates, flags), state.inner_state, kept, **extra)
        return packing.fill(new, flags, updates), optax.MaskedState(inner)

    return optax.GradientTransformationExtraArgs(init, update)


def clipping(grad_clip: Any, param_attrs: ParamAttrs) -> list[optax.GradientTransformation]:
    """Return the transforms that clip the leaves that need it."""
    if grad_clip is None:
        return []
    check_transform("grad_clip", grad_clip, "clip_by_norm(1.0)")
    if all(attr.need_clip for attr in param_attrs.values()):
        return [grad_clip]
    return [_only(grad_clip, param_attrs, lambda attr: attr.need_clip)]


def regularizing(
    regularization: Any, param_attrs: ParamAttrs
) -> list[optax.GradientTransformation]:
    """Return the transforms that regularize each leaf by its own penalty or the common one."""
    if regularization is not None:
        check_transform("regularization", regularization, "l2_decay(1e-4)")
    own = {id(a.regularization): a.regularization for a in param_attrs.values()}
    if set(own) <= {id(INHERIT)}:
        return [] if regularization is None else [regularization]
    parts = []
    for each in {id(INHERIT): INHERIT, **own}.values():
        tx = regularization if each is INHERIT else each
        if tx is not None:
            parts.append(_only(tx, param_attrs, partial(_is_regularized_by, each)))
    return parts


def _is_regularized_by(regularization: Any, attr: ParamAttr) -> bool:
    return attr.regularization is regularization


# Who wants to know the attributes that an optimizer's init resolves; see `observe`.
_observer: ContextVar[Callable[[str, ParamAttr], None] | None] = ContextVar(
    "observer", default=None
)


def observe(tx: optax.GradientTransformation, params: Any) -> tuple[Any, dict[str, ParamAttr]]:
    """Return tx.init(params) and the attributes of the leaves, however deeply `tx` is wrapped."""
    seen: dict[str, ParamAttr] = {}
    token = _observer.set(seen.__setitem__)
    try:
        return tx.init(params), seen
    finally:
        _observer.reset(token)


def attributed(
    name: str, tx: optax.GradientTransformationExtraArgs, param_attrs: ParamAttrs
) -> optax.GradientTransformationExtraArgs:
    """Hold the leaves that are not trainable, and hand `tx` the rate factors of the others.

    `tx` sees a held leaf as a hole; its update is −0.0, the only number that leaves p + u = p bit
    for bit.
    """

    def init(params: Any) -> Any:
        attrs = resolve(param_attrs, params)
        notify = _observer.get()
        if notify is not None:
            for names, own in zip(tree.names(params), attrs, strict=True):
                pairs = zip(names, own, strict=True) if isinstance(own, tuple) else [(names, own)]
                for path, attr in pairs:
                    notify(str(path), attr)
        return tx.init(packing.keep(params, _trainable(attrs)))

    if not param_attrs:
        return optax.GradientTransformationExtraArgs(init, tx.update)

    def update(updates: Any, state: Any, params: Any = None, **extra: Any) -> tuple[Any, Any]:
        if params is not None:
            tree.check_same_structure(name, "updates", updates, "params", params)
        attrs = resolve(param_attrs, updates)
        flags = _trainable(attrs)
        kept = packing.keep(updates, flags)
        if not _all(lambda attr: attr.learning_rate == 1.0, attrs):
            rates = packing.kept_of(_each(lambda attr: attr.learning_rate, attrs), flags, updates)
            extra["rate_factors"] = leafwise.choose(lambda rate: rate, rates, kept)
        held = None if params is None else packing.keep(params, flags)
        new, state = tx.update(kept, state, held, **extra)
        gradients, structure = tree.flatten(updates)
        like = gradients if params is None else tree.flatten(params)[0]
        rest = [
            g if _all(bool, [flag]) else _held_update(p, g)
            for flag, p, g in zip(flags, like, gradients, strict=True)
        ]
        return packing.fill(new, flags, structure.unflatten(rest)), state

    return optax.GradientTransformationExtraArgs(init, update)


def _trainable(attrs: Sequence[Attrs]) -> list[Any]:
    return _each(lambda attr: attr.trainable, attrs)


def _held_update(p: Any, g: Any) -> Any:
    if tree.is_hole(p):
        return g
    if jnp.issubdtype(p.dtype, jnp.inexact):
        return jnp.full(p.shape, -0.0, p.dtype)
    return numerics.integer_zeros(p.shape, p.dtype)
