"""Attributes of parameters, by path: fluid's ParamAttr, no_grad_set and parameter_list."""

import dataclasses
import functools
import re
from collections.abc import Callable, Mapping, Set
from functools import partial
from typing import Any, ParamSpec

import jax.numpy as jnp
import optax

from optfn import core
from optfn.core import checks, tree
from optfn.core.boundary import frozen_update
from optfn.core.printing import list_changed_fields
from optfn.core.types import Leaf, OptState, Params, PyTree, Stepped, Updates
from optfn.interop.calls import iterate_links
from optfn.leaves import contents, nodes, packed, patterns
from optfn.leaves.selection import Selection, list_others, restrict

P = ParamSpec("P")


class Inherit:
    """The default of an attribute that an argument of the optimizer gives."""

    def __repr__(self) -> str:
        return "<inherit>"


# Not None, which means no regularization.
INHERIT = Inherit()


@dataclasses.dataclass(frozen=True)
class ParamAttr:
    """How an optimizer treats a parameter: frozen, with another rate, without decay, and so on.

    Args:
      learning_rate: a factor of the optimizer's rate, ≥ 0. It is exact for every rule, even if the
        rate is part of a recursion.
      regularization: a transform such as `l2_decay(1e-4)` that replaces the optimizer's; None for
        no regularization.
      need_clip: whether the optimizer's `grad_clip` applies to the parameter. If not, its gradient
        does not count in the global norm and is not scaled.
      trainable: False freezes the parameter: it never changes and has no state.
      stacked: how many leading axes of the leaf count tensors, ≥ 0; 1 for layers that a model scans
        over. Rules with a norm per tensor (LAMB, LARS, `clip_by_norm`) then treat each layer as a
        separate leaf, and `shard=` of a training step divides an axis of each layer. The result of
        `optfn.distributed.stack_stages` does not need this.
      weight_decay: a factor of the optimizer's decay (`weight_decay`, `lars_weight_decay`, l1 and
        l2 of ftrl), ≥ 0; 0 for no decay. It does not affect `regularization`.

    Raises:
      TypeError: an argument has the wrong type.
      ValueError: learning_rate, weight_decay or stacked is negative. If weight_decay is not 1, an
        optimizer that has no decay raises it too.
    """

    learning_rate: float = 1.0
    regularization: optax.GradientTransformation | Inherit | None = INHERIT
    need_clip: bool = True
    trainable: bool = True
    stacked: int = 0
    weight_decay: float = 1.0

    def __post_init__(self) -> None:
        _check_factor("learning_rate", "rate", self.learning_rate)
        _check_factor("weight_decay", "own decay", self.weight_decay)
        checks.flag("ParamAttr: need_clip", self.need_clip)
        checks.flag("ParamAttr: trainable", self.trainable)
        checks.count("ParamAttr: stacked", self.stacked, low=0)
        if self.regularization is not None and self.regularization is not INHERIT:
            core.check_transform("ParamAttr: regularization", self.regularization, "optfn.l2_decay")

    def __repr__(self) -> str:
        return f"ParamAttr({', '.join(list_changed_fields(self))})"


def _check_factor(name: str, of: str, factor: object) -> None:
    """Raise a TypeError unless a factor is a Python number, and a ValueError unless it is ≥ 0 and
    finite."""
    if not checks.is_host_number(factor):
        raise TypeError(
            f"ParamAttr: {name} must be a Python number, a factor of the optimizer's {of}; "
            f"got {checks.show(factor)}"
        )
    checks.nonnegative(f"ParamAttr: {name}", factor)


ParamAttrs = Mapping[str, ParamAttr]
DEFAULT = ParamAttr()


def check_param_attrs(param_attrs: object) -> ParamAttrs:
    """Return `param_attrs` as a dict, {} for None, or raise a TypeError unless it maps patterns of
    paths to ParamAttrs."""
    if param_attrs is None:
        return {}
    wanted = "a mapping from a pattern of paths to a ParamAttr"
    given: ParamAttrs = checks.instance("param_attrs", param_attrs, Mapping, wanted)
    for pattern, attr in given.items():
        checks.instance("param_attrs: a pattern", pattern, str | re.Pattern, "a regular expression")
        patterns.check_pattern("param_attrs", pattern)
        checks.instance(f"param_attrs[{pattern!r}]", attr, ParamAttr, "a ParamAttr")
    return dict(given)


def resolve(param_attrs: ParamAttrs, params: Params) -> dict[str, ParamAttr]:
    """Return by path the attributes of the first pattern that matches a leaf, else DEFAULT, and
    raise a ValueError for a pattern without effect.

    Raises:
      ValueError: a pattern matches none of the paths, or comes after a wider one.
    """
    attrs = dict.fromkeys(contents.all_names(params), DEFAULT)
    for names, attr in patterns.first_matches(param_attrs, params, "param_attrs"):
        attrs |= dict.fromkeys(names, attr)
    return attrs


def attributes_of(tx: optax.GradientTransformation, params: Params) -> dict[str, ParamAttr]:
    """Return by path the attributes that an optimizer, or one inside its wrappers and chains of
    optfn, gives to leaves of `params`, {} if there are none.

    It does not find optimizers inside wrappers that optfn did not make.
    """
    found: dict[str, ParamAttr] = {}
    if not isinstance(tx, core.Transform):
        return found
    for inner in tx.inner:
        found |= attributes_of(inner, params)
    return found | resolve(tx.param_attrs, params) if tx.param_attrs else found


def limit_to(
    tx: optax.GradientTransformation, param_attrs: ParamAttrs, choose: Callable[[ParamAttr], bool]
) -> optax.GradientTransformationExtraArgs:
    """Return `tx` limited to the leaves whose attributes `choose` selects. The remaining leaves
    have no state, and their updates are unchanged.

    If `tx` takes no complex leaves, only the selected ones must be real.
    """
    rule = restrict(
        core.strip_boundary(tx), partial(_paths, choose, param_attrs), optax.MaskedState
    )
    return core.Transform(*rule[:2], unchecked=rule._replace(real_only="", links=()))


def _paths(
    choose: Callable[[ParamAttr], bool], param_attrs: ParamAttrs, values: PyTree
) -> frozenset[str]:
    """Return the paths of the leaves whose attributes `choose` selects."""
    attrs = resolve(param_attrs, values)
    return frozenset(path for path, attr in attrs.items() if choose(attr))


def apply_to_trained(
    name: str, tx: optax.GradientTransformationExtraArgs, param_attrs: ParamAttrs
) -> optax.GradientTransformationExtraArgs:
    """Return `tx` with the frozen leaves, per-leaf rates and decays and stacked axes of
    `param_attrs`, or `tx` unchanged if there are no attributes.

    Frozen leaves are masked from `tx`. Their update is −0.0, which changes no bit of them. `tx`
    gets the factors of the rate and of the weight decay by path, as the extra arguments
    `rate_factors` and `decay_factors`, unless all factors are 1.

    Args:
      name: the optimizer's name in errors.
      tx: the optimizer.
      param_attrs: attributes by pattern.
    """
    if not param_attrs:
        return tx
    # From the inside: stacked axes are marked, then frozen leaves are masked.
    marked = _mark_stacked_leaves(tx, param_attrs)
    trained = _leave_out(partial(_find_untrained, param_attrs), marked)

    def update(updates: Updates, state: OptState, params: Params = None, **extra: Any) -> Stepped:
        if params is not None:
            tree.check_same_structure(name, "updates", updates, "params", params)
        attrs = resolve(param_attrs, updates)
        # Only where needed: transforms of optax do not take the argument.
        if any(attr.learning_rate != 1.0 for attr in attrs.values()):
            extra["rate_factors"] = {path: attr.learning_rate for path, attr in attrs.items()}
        if any(attr.weight_decay != 1.0 for attr in attrs.values()):
            extra["decay_factors"] = {path: attr.weight_decay for path, attr in attrs.items()}
        return trained.update(updates, state, params, **extra)

    return core.Transform(trained.init, update, param_attrs=param_attrs)


def find_frozen(tx: optax.GradientTransformation, params: Params) -> frozenset[str]:
    """Return the paths of the leaves that an optimizer freezes, also inside wrappers and chains of
    optfn."""
    attrs = [link.param_attrs for link in iterate_links(tx) if link.param_attrs]
    return frozenset[str]().union(*(_find_untrained(x, params) for x in attrs))


def mask_frozen(tx: optax.GradientTransformation, grads: Updates) -> Updates:
    """Return the gradients with the leaves masked that an optimizer freezes, or 0 in the buffers of
    a Packed, or unchanged if it freezes no leaf."""
    if not _freezes(tx):
        return grads
    trained = Selection(list_others(partial(find_frozen, tx), grads))
    kept = trained.keep(grads)
    if not nodes.is_packed(grads):
        return kept
    zeros = tree.map_arrays(lambda g: jnp.zeros_like(g) if tree.is_inexact(g) else g, grads)
    return trained.fill(kept, zeros)


def _freezes(tx: optax.GradientTransformation) -> bool:
    """Tell whether an optimizer may freeze leaves by an attribute, also inside wrappers and chains
    of optfn, whether or not the attribute fits a leaf."""
    attrs = (attr for link in iterate_links(tx) for attr in (link.param_attrs or {}).values())
    return not all(attr.trainable for attr in attrs)


def without_frozen(
    factory: Callable[P, optax.GradientTransformation],
) -> Callable[P, optax.GradientTransformation]:
    """Decorate a factory of wrappers or chains so that a leaf that a transformation inside freezes
    is frozen for the whole, with no effect if nothing inside freezes any.

    Such a leaf has no state, and its gradient may have any value. The calls of the factory must be
    recorded, as by `core.record_call`.
    """

    @functools.wraps(factory)
    def make(*args: P.args, **kwargs: P.kwargs) -> optax.GradientTransformation:
        made = factory(*args, **kwargs)
        if not _freezes(made):
            return made
        trained = _leave_out(partial(find_frozen, made), core.Unchecked(*made))
        return core.Transform(trained.init, trained.update, **vars(made))

    return make


# The public chain: a leaf that a link freezes is frozen for all links.
chain = without_frozen(core.chain)


def _find_untrained(param_attrs: ParamAttrs, values: PyTree) -> frozenset[str]:
    """Return the paths of the leaves that attributes freeze."""
    return _paths(lambda attr: not attr.trainable, param_attrs, values)


def _leave_out(find: Callable[[PyTree], Set[str]], tx: core.Unchecked) -> core.Unchecked:
    """Return `tx` without the leaves whose paths `find` returns, which get the update of a frozen
    leaf, −0.0 or integer zeros.

    A buffer of a Packed that has such a leaf is replaced as a whole.
    """

    def freeze(updates: Updates, params: Params) -> Updates:
        frozen, names = find(updates), contents.leaf_names(updates)

        def freeze_leaf(place: tree.Place, g: Leaf, p: Leaf) -> Leaf:
            is_trained = frozen.isdisjoint(names[place.number])
            return g if is_trained else frozen_update(g, g if p is None else p)

        return tree.map_named(freeze_leaf, updates, updates if params is None else params)

    return restrict(tx, partial(list_others, find), others=freeze)


def _mark_stacked_leaves(
    tx: optax.GradientTransformationExtraArgs, param_attrs: ParamAttrs
) -> core.Unchecked:
    """Return `tx` on trees whose leaves with `stacked` axes are put into a `Stacked`, while trees
    without such leaves reach `tx` unchanged."""

    def mark(values: PyTree) -> PyTree:
        return _mark_stacked(values, resolve(param_attrs, values))

    def update(updates: Updates, state: OptState, params: Params = None, **extra: Any) -> Stepped:
        marked = None if params is None else mark(params)
        return tx.update(mark(updates), state, marked, **extra)

    return core.Unchecked(lambda params: tx.init(mark(params)), update)


def _mark_stacked(values: PyTree, attrs: Mapping[str, ParamAttr]) -> PyTree:
    """Return the tree with each leaf that has `stacked` axes put into a `Stacked`, or unchanged
    without any, and raise a ValueError for more axes than a leaf has."""
    if not any(attr.stacked for attr in attrs.values()):
        return values
    for path, run in contents.runs_by_name(values).items():
        if (stacked := attrs[path].stacked) > len(run.shape) > 0:
            raise ValueError(
                f"param_attrs: stacked={stacked} for leaf {path!r} must be at most "
                f"{len(run.shape)}, the number of its axes; its shape is {run.shape}"
            )
    # The layout of a Packed still has the paths of leaves that are not selected.
    return packed.mark_stacked(values, lambda path: attrs.get(path, DEFAULT).stacked)


def mark_stacked_params(tx: optax.GradientTransformation | None, params: Params) -> Params:
    """Return the params with each leaf that an optimizer's attributes call stacked put into a
    `Stacked`, or unchanged if `tx` is None or they are packed.

    The leaves, their order and their paths do not change. Shards of packed params are parts of a
    buffer, and not of layers.
    """
    if tx is None or nodes.is_packed(params):
        return params
    return _mark_stacked(params, attributes_of(tx, params))


def refuse_decay_factors(name: str, attrs: ParamAttrs) -> None:
    """Raise a ValueError if attributes have factors of a weight decay that are not 1, because the
    optimizer `name` has no decay."""
    for pattern, attr in attrs.items():
        if attr.weight_decay != 1.0:
            raise ValueError(
                f"param_attrs[{pattern!r}]: weight_decay={attr.weight_decay:g} is a factor of the "
                f"optimizer's own decay, but {name} has none. Give the leaf a penalty, "
                "regularization=optfn.l2_decay(coeff), or use an optimizer such as adamw"
            )


def apply_attributes(
    name: str,
    param_attrs: object,
    grad_clip: optax.GradientTransformation | None,
    regularization: optax.GradientTransformation | None,
    build: Callable[[list[optax.GradientTransformation]], optax.GradientTransformationExtraArgs],
    decays: bool = False,
) -> optax.GradientTransformationExtraArgs:
    """Return the optimizer that `build` makes, with clips, penalties, rates and frozen leaves by
    attributes, and raise a ValueError for decay factors unless it `decays`.

    Args:
      name: the optimizer's name in errors.
      param_attrs: the argument of the optimizer.
      grad_clip: the argument of the optimizer.
      regularization: the argument of the optimizer.
      build: makes the optimizer from the transforms that precede its chain.
      decays: whether that chain has a weight decay.
    """
    attrs = check_param_attrs(param_attrs)
    if not decays:
        refuse_decay_factors(name, attrs)
    clips = [] if grad_clip is None else [grad_clip]
    if not all(attr.need_clip for attr in attrs.values()):
        # Leaves with need_clip=False are masked, so they do not count in a global norm either.
        clips = [limit_to(clip, attrs, lambda attr: attr.need_clip) for clip in clips]
    return apply_to_trained(
        name, build([*clips, *penalties_of_leaves(regularization, attrs)]), attrs
    )


def penalties_of_leaves(
    regularization: optax.GradientTransformation | None, attrs: ParamAttrs
) -> list[optax.GradientTransformation]:
    """Return a transform for each distinct penalty, limited to its leaves, which is
    `regularization` for leaves that inherit it, or [] if there is no penalty.

    A leaf whose attribute `regularization` is None has no penalty.
    """

    def has(penalty: object, attr: ParamAttr) -> bool:
        return attr.regularization is penalty

    # By identity: transformations are functions, which have no equality.
    penalties = {id(a.regularization): a.regularization for a in attrs.values()}
    if set(penalties) <= {id(INHERIT)}:
        return [] if regularization is None else [regularization]
    found = []
    for penalty in {id(INHERIT): INHERIT, **penalties}.values():
        tx = regularization if penalty is INHERIT else penalty
        if penalty is not None and penalty is not INHERIT:
            tx = core.check_transform("ParamAttr: regularization", tx)
        if tx is not None:
            found.append(limit_to(tx, attrs, partial(has, penalty)))
    return found
