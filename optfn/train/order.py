"""Warnings of links whose position in a chain defeats their purpose.

Such a link does not fail, but does something else than intended: an average averages the wrong
params, a decay grows params, a rate counts twice or not at all, gradients are exchanged a second
time.

We follow a chain as its state shows it. Between two links the update of each leaf has a form
(`optfn.train.forms`), and we report a link that does not take the form before it. A state shows
every link of optfn, and optax's links that have a state, inside optax's chains, masks, partitions
and wrappers too.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from optfn import core
from optfn.core import checks, tree
from optfn.core.traits import traits_of
from optfn.core.types import OptState, Params
from optfn.interop.calls import show_transform
from optfn.interop.closures import find_closed_over, find_marked, find_update
from optfn.leaves import contents
from optfn.mesh.state.inventory import inventory
from optfn.mesh.state.names import is_state, state_word
from optfn.train import forms
from optfn.transforms import learning_rate as rates
from optfn.transforms.rates import take_largest
from optfn.wrappers.loss_scale import has_scale


class UpdateForm(NamedTuple):
    """The update of a leaf between two links, as far as we know it.

    form: one of `optfn.train.forms`.
    by: the link that gave it this form, as the user wrote it.
    marks: the marks that links left, each with its link.
    rate: the learning rate in it, if that is a number; else None.
    """

    form: str = forms.UNKNOWN
    by: str = ""
    marks: tuple[tuple[str, str], ...] = ()
    rate: float | None = None

    @property
    def is_uphill(self) -> bool:
        """Whether the update lacks a rate, or an average or masters have taken such an update."""
        return self.form in forms.UPHILL or "uphill" in dict(self.marks)


FormsByPath = dict[str, UpdateForm]  # by the path of the leaf


def warn_of_order(
    argument: str, tx: optax.GradientTransformation, opt_state: OptState, params: Params
) -> None:
    """Warn of links at the wrong position in a chain or wrapper, or else of steps that go uphill,
    and raise a ValueError if a link changes the update of masters.

    Args:
      argument: the name of `tx` in messages, "tx" or "outer".
      tx: the optimizer. It has the links as the user wrote them, for messages.
      opt_state: its state, which shows the links.
      params: the params.

    Raises:
      ValueError: a link changes the update of an optimizer that keeps masters.
    """
    walk = _Walk(params)
    form = forms.SCALED if has_scale(opt_state) else forms.GRADIENT
    by = "" if form == forms.GRADIENT else "dynamic_loss_scale"
    after = walk.follow(opt_state, dict.fromkeys(walk.paths, UpdateForm(form, by)), tx)
    for message in walk.warnings:
        checks.warn(message)
    uphill = [path for path, x in after.items() if x.is_uphill]
    # A link at the wrong position is then the likely cause: one warning is enough.
    if uphill and not walk.warnings:
        some = "" if len(uphill) == len(after) else f" to {tree.list_names(uphill)}"
        checks.warn(
            f"{argument}={show_transform(tx)} applies no learning rate{some}, so its steps go "
            "uphill: end it with one, as in chain(exchange(...), sgd(1.0)) or "
            "chain(scale_by_adam(), scale_by_learning_rate(1e-3))"
        )


class Member(NamedTuple):
    """A transformation among several that share the leaves out among them.

    state: its state.
    tx: the transformation, where it is known.
    paths: its leaves, where they are known.
    """

    state: OptState
    tx: Any = None
    paths: frozenset[str] | None = None


class _Walk:
    """A walk along the links of a state, with the UpdateForm of each leaf.

    params: the params.
    paths: the leaves that are trained.
    warnings: the messages so far, each once, in order.
    """

    def __init__(self, params: Params) -> None:
        self.params = params
        self.paths = [path for path, x in contents.leaves_with_names(params) if tree.is_inexact(x)]
        self.warnings: dict[str, None] = {}

    def follow(
        self, state: OptState, before: FormsByPath, tx: Any = None, text: str = ""
    ) -> FormsByPath:
        """Return the forms of updates after a transformation, and record the problems inside it.

        Chains, partitions and wrappers are followed link by link; an unknown transformation gives
        unknown updates.

        Args:
          state: the state.
          before: the updates before it.
          tx: the transformation, where a factory of optfn shows it.
          text: the optimizer that the state belongs to, as the user wrote it.
        """
        after = self._follow_state(state, before, tx, text)
        # A function of the user's may change the updates of a known state, such as their sign.
        if after != before and _is_users(tx):
            return dict.fromkeys(after, UpdateForm())
        return after

    def _follow_state(
        self, state: OptState, before: FormsByPath, tx: Any, text: str
    ) -> FormsByPath:
        """Return the forms after a transformation as its state shows it, as `follow` does."""
        # The links of an optimizer are unknown to its user: messages show the optimizer instead.
        if isinstance(tx, core.Transform) and tx.call[0] != "chain" and not _is_wrapper(tx, state):
            tx, text = None, text or _show_call(tx)
        inner = _find_links(tx)
        if type(state) is tuple or isinstance(state, dict):
            links = list(state.values()) if isinstance(state, dict) else list(state)
            known = inner if len(inner) == len(links) else [None] * len(links)
            after = before
            for link, link_tx in zip(links, known, strict=True):
                after = self.follow(link, after, link_tx, text)
            return {path: _mark_optimized(x) for path, x in after.items()}
        if isinstance(state, optax.transforms.PartitionState):
            return self._follow_each(self._find_members(tx, state), before, text)
        if traits_of(state).labels:
            # Inner and outer optimizer of local steps, which see different updates.
            return self._follow_each([Member(x) for x in state], before, text)
        if wrapper := _find_wrapper(state):
            return self._follow_wrapper(wrapper, state, before, tx, text)
        is_stateless = type(state) is optax.EmptyState
        name = traits_of(state).link or forms.OPTAX.get(type(state), "")
        if is_stateless:
            name, text = _find_stateless_kind(tx, before), text or f"optax.{_find_factory(tx)}(…)"
        if kind := forms.KINDS.get(name):
            return self._follow_link(kind, state, before, text)
        is_averaged = any(x.form == forms.AVERAGED for x in before.values())
        if is_averaged and _is_identity(tx, state, before):
            return before
        return self._follow_unknown(state, before)

    def _follow_link(
        self, kind: forms.LinkKind, state: OptState, before: FormsByPath, text: str
    ) -> FormsByPath:
        """Return the forms after a link of a known kind, and report each form that it cannot
        take."""
        link = text or _show_link(state)
        rate, sets_rate = _find_rate(state), kind is forms.KINDS["rate"]
        after = {}
        for path, x in before.items():
            wrong = _find_problem(kind, x, bool(text))
            # Beside a rate of 1, as in a partition, the remaining rates are fractions of the
            # plateau's.
            if all(other.rate != 1 for other in before.values()):
                wrong = wrong or _find_rate_before_plateau(state, x)
            if wrong:
                self._report(wrong[0].format(link=link, by=wrong[1]), x.form)
            # Nothing is reported of an unknown form, but the link may decide the form behind it.
            gives = kind.of_unknown if x.form == forms.UNKNOWN else kind.takes.get(x.form, "")
            marks = dict(x.marks) | dict.fromkeys(kind.marks, link)
            if gives == forms.AVERAGED and x.is_uphill:
                marks |= {"uphill": link}
            by = x.by if gives == x.form else link
            after[path] = UpdateForm(gives, by, (*marks.items(),), rate if sets_rate else x.rate)
        return after

    def _report(self, message: str, form: str) -> None:
        """Record a warning, or raise it as an error if the update is the difference to masters."""
        if form == forms.DIFFERENCE:
            raise ValueError(message)
        self.warnings[message] = None

    def _follow_wrapper(
        self, wrapper: tuple[str, str], state: OptState, before: FormsByPath, tx: Any, text: str
    ) -> FormsByPath:
        """Return the forms of updates after a wrapper: the forms after its inner transformation,
        changed by the wrapper's effect.

        Args:
          wrapper: the effect, such as "masked" or "sometimes", and the field of the inner state.
          state: the state of the wrapper.
          before: the updates before it.
          tx: the wrapper, where it is known.
          text: the optimizer that the state belongs to, as the user wrote it.
        """
        way, field = wrapper
        inner, name = getattr(state, field), text or _show_link(state)
        if way in forms.KINDS:  # the wrapper reads the update, so it must take its form
            self._follow_link(forms.KINDS[way], state, before, text)
        if way == "loss_scale":
            before = {path: x._replace(form=forms.GRADIENT, by="") for path, x in before.items()}
        if way == "masked":
            closed = find_closed_over(tx)
            paths = find_marked(closed["mask"], self.params) if "mask" in closed else None
            member = Member(inner, closed.get("inner"), paths)
            return before | self._follow_each([member], before, text)
        inside = _find_links(tx)
        after = self.follow(inner, before, inside[0] if inside else None, text)
        if isinstance(state, optax.transforms.ApplyIfFiniteState):
            self._check_dtypes(after)
        if way == "sometimes":
            same = {path for path, x in after.items() if x.form == before[path].form}
            return {path: x if path in same else UpdateForm() for path, x in after.items()}
        if way == "accumulate":
            mark = ((forms.PAUSED, name),)
            return {path: x._replace(marks=x.marks + mark) for path, x in after.items()}
        if way == "masters":
            named = contents.leaves_with_names(state[0])
            with_master = {path for path, x in named if not tree.is_masked(x)}
            for path in with_master.intersection(after):
                after[path] = _mark_mastered(after[path], name)
        return after

    def _check_dtypes(self, after: FormsByPath) -> None:
        """Raise a ValueError if `optax.apply_if_finite` is around an optimizer with masters."""
        kept = [x.by for x in after.values() if x.form == forms.DIFFERENCE]
        if kept:
            raise ValueError(
                f"optax.apply_if_finite is around {kept[0]}, which keeps masters, so that updates "
                "are float32: it takes none but those of the gradients' dtype. Use "
                "optfn.skip_nonfinite"
            )

    def _follow_each(self, members: list[Member], before: FormsByPath, text: str) -> FormsByPath:
        """Return the forms after each transformation on its leaves. Forms of the remaining leaves
        are unchanged, but unknown if the leaves of any member are not known.

        If the leaves of a member are unknown, the arrays of its state tell them.
        """
        owned = [self._find_leaves(x.state) if x.paths is None else x.paths for x in members]
        after = dict(before)
        if any(x.paths is None and not paths for x, paths in zip(members, owned, strict=True)):
            after |= dict.fromkeys(set(before).difference(*owned), UpdateForm())
        for member, paths in zip(members, owned, strict=True):
            chosen = {path: before[path] for path in paths if path in before}
            after |= self.follow(member.state, chosen, member.tx, text) if chosen else {}
        return after

    def _find_members(self, tx: Any, state: optax.transforms.PartitionState) -> list[Member]:
        """Return the members of a partition, with their leaves where `tx` shows the labels."""
        closed = find_closed_over(tx)
        known, labels = closed.get("transforms", {}), closed.get("param_labels")
        return [
            Member(
                masked.inner_state,
                known.get(label),
                None if labels is None else find_marked(labels, self.params, label),
            )
            for label, masked in state.inner_states.items()
        ]

    def _find_leaves(self, state: OptState) -> set[str]:
        """Return the paths of the leaves that a state has arrays for."""
        return {entry.param for entry in inventory(state, self.paths) if entry.param is not None}

    def _follow_unknown(self, state: OptState, before: FormsByPath) -> FormsByPath:
        """Return unknown forms for all leaves, and report an unknown link behind an average and the
        problems of states inside it.

        A link behind an average probably changes the update. About a further form nothing can be
        said.
        """
        link = type(state).__name__
        link = "a link without a state" if link == "EmptyState" else f"the link of {link}"
        for x in before.values():
            if x.form == forms.AVERAGED:
                self._report(forms.REFUSED[x.form].format(link=link, by=x.by), x.form)
        unknown = dict.fromkeys(before, UpdateForm())
        if is_state(state):
            for child in state:
                if isinstance(child, tuple | dict):
                    self.follow(child, unknown)
        return unknown


def _find_problem(
    kind: forms.LinkKind, x: UpdateForm, is_of_optimizer: bool
) -> tuple[str, str] | None:
    """Return the warning of a link that cannot take an update and the earlier link that caused it,
    or None if it can, as with every unknown form.

    Args:
      kind: the kind of the link.
      x: the update.
      is_of_optimizer: whether the link is part of an optimizer, which also has a rate.
    """
    if x.form == forms.UNKNOWN:
        return None
    if x.form not in kind.takes:
        why = {**forms.REFUSED, **kind.why}
        if is_of_optimizer and kind.of_unknown:
            why |= forms.TWO_RATES
        return why.get(x.form, forms.OTHERWISE.replace("{form}", x.form)), x.by
    marks = dict(x.marks)
    refused = ((reason, marks[mark]) for mark, reason in kind.refuses.items() if mark in marks)
    return next(refused, None)


def _find_rate_before_plateau(state: OptState, x: UpdateForm) -> tuple[str, str] | None:
    """Return the warning of `reduce_on_plateau` behind a learning rate that is not 1 and the link
    with that rate, or None otherwise.

    A schedule before it is no problem: its rate may be multiplied.
    """
    is_plateau = isinstance(getattr(state, "rate", None), rates.PlateauLearningRateState)
    if not is_plateau or x.form != forms.STEP or x.rate in (None, 1):
        return None
    return (
        "{link} multiplies updates by its own rate, but {by} before it has already applied a "
        f"learning rate of {x.rate:g}: give that optimizer the rate 1, as in adam(1.0)",
        x.by,
    )


def _mark_optimized(x: UpdateForm) -> UpdateForm:
    """Mark an update OPTIMIZED if it is a step and was adapted."""
    if x.form != forms.STEP or forms.ADAPTED not in dict(x.marks):
        return x
    return x._replace(marks=(*x.marks, (forms.OPTIMIZED, x.by)))


def _mark_mastered(x: UpdateForm, link: str) -> UpdateForm:
    """Return the form that masters give, a difference, marked as uphill if the update inside
    was."""
    marks = dict(x.marks) | ({"uphill": link} if x.is_uphill else {})
    return UpdateForm(forms.DIFFERENCE, link, (*marks.items(),))


def _find_links(tx: Any) -> list[Any]:
    """Return the links of a chain, or the transformation inside a wrapper, or an empty list where
    `tx` does not show them."""
    if isinstance(tx, core.Transform):
        return tx.inner
    updates = find_closed_over(tx).get("update_fns", ())
    return [optax.GradientTransformation(lambda params: (), fn) for fn in updates]


def _is_identity(tx: Any, state: OptState, before: FormsByPath) -> bool:
    """Tell whether a link returns the updates that it gets, as `optax.identity` does, with False if
    it is unknown or cannot be traced."""
    if tx is None:
        return False
    arrays = {path: jnp.zeros(()) for path in before}
    try:
        jaxpr = jax.make_jaxpr(lambda u: tx.update(u, state, arrays)[0])(arrays).jaxpr
    except Exception:  # of any kind: the link is another library's, and reads its arguments
        return False
    return list(jaxpr.outvars) == list(jaxpr.invars)


def _is_users(tx: Any) -> bool:
    """Tell whether the update of a transformation was written outside of optfn and optax, with
    False where it is unknown."""
    update = find_update(tx)
    return update is not None and checks.package(update.__module__) not in ("optfn", "optax")


def _find_stateless_kind(tx: Any, before: FormsByPath) -> str:
    """Return the kind of a link of optax without a state, or "" for an unknown link, or one whose
    effect depends on a sign."""
    kind, closed = forms.OPTAX_STATELESS.get(_find_factory(tx), ""), find_closed_over(tx)
    if kind not in ("decay", "rate"):
        return kind
    number = closed.get("weight_decay" if kind == "decay" else "step_size")
    if not checks.is_host_number(number):
        return ""
    directions = {forms.DIRECTION, forms.COMPRESSED}
    is_rate = number < 0 and directions.issuperset(x.form for x in before.values())
    return kind if (number > 0 if kind == "decay" else is_rate) else ""


def _find_factory(tx: Any) -> str:
    """Return the name of the factory of optax that made a link, or ""."""
    update = None if _is_users(tx) else find_update(tx)
    return "" if update is None else update.__qualname__.partition(".")[0]


def _find_wrapper(state: OptState) -> tuple[str, str] | None:
    """Return the effect of a wrapper and the field with its inner state, or None for a link."""
    if traits_of(state).link in forms.WRAPPERS and "inner_state" in state._fields:
        return traits_of(state).link, "inner_state"
    return forms.OPTAX_WRAPPERS.get(type(state))


def _is_wrapper(tx: core.Transform, state: OptState) -> bool:
    """Tell whether `tx` is the call of the wrapper that keeps `state`, not of an optimizer."""
    is_of_wrapper = type(state) is not tuple and _find_wrapper(state) is not None
    return is_of_wrapper and state_word(type(state)).startswith(tx.call[0])


def _show_call(tx: core.Transform) -> str:
    """Return a call as the user wrote it, or "name(…)" if it is long or has arguments without
    repr."""
    text = repr(tx)
    return text if "<" not in text and len(text) < 80 else f"{tx.call[0]}(…)"


def _show_link(state: OptState) -> str:
    """Return the call of the link that keeps a state as its name and its rate, or "…" in place of a
    rate that is no number."""
    rate = _find_rate(state)
    word = state_word(type(state)).removesuffix("_by_number")
    return f"{word}({'…' if rate is None else f'{rate:g}'})"


def _find_rate(state: OptState) -> float | None:
    """Return the learning rate that a link keeps as a number, the largest of several, or None for a
    schedule, a traced rate, or no rate."""
    rate = getattr(state, "rate", None)
    if type(rate) is not rates.LearningRateState or checks.is_traced(rate.learning_rate):
        return None
    return float(take_largest(jax.tree.leaves(rate.learning_rate)[0]))
