"""A choice of leaves by their paths, also of those inside the buffers of a Packed."""

import dataclasses
from collections.abc import Callable, Collection, Set
from typing import Any

import optax

from optfn import core
from optfn.core import errors, tree
from optfn.core.types import OptState, Params, PyTree, Stepped, Updates
from optfn.leaves import contents, packed
from optfn.leaves.nodes import Packed, is_packed


@dataclasses.dataclass(frozen=True)
class Selection:
    """The leaves at some paths, of each tree that has these paths.

    paths: the paths of the leaves; a path that a tree lacks selects nothing.
    """

    paths: Collection[str]

    def keep(self, values: PyTree) -> PyTree:
        """Mask the leaves that are not selected, and replace a Packed by a Packed of its selected
        leaves alone."""

        def keep(path: str, node: PyTree) -> PyTree:
            if is_packed(node):
                return packed.take_subset(node, self._numbers(path, node))
            return node if path in self.paths else optax.MaskedNode()

        return packed.map_nodes(keep, values)

    def fill(self, kept: PyTree, whole: PyTree) -> PyTree:
        """Undo `keep`, by returning `whole` with its selected leaves replaced by the leaves of
        `kept`."""

        def fill(path: str, node: PyTree, selected: PyTree) -> PyTree:
            if is_packed(node):
                return packed.fill(node, selected, self._numbers(path, node))
            return selected if path in self.paths else node

        return packed.map_nodes(fill, whole, kept)

    def _numbers(self, path: str, node: Packed) -> frozenset[int]:
        """Return the indices of the selected leaves in a Packed, which has the path `path`."""
        # By the layout of the whole tree, also if leaves have been taken out since.
        names = enumerate(node.layout.paths)
        return frozenset(i for i, name in names if tree.join(path, name) in self.paths)


def list_others(find: Callable[[PyTree], Set[str]], values: PyTree) -> frozenset[str]:
    """Return the paths of the leaves that `find` does not return."""
    return frozenset(contents.all_names(values)) - find(values)


def restrict(
    rule: core.Unchecked,
    choose: Callable[[PyTree], Collection[str]],
    state_type: Callable[[OptState], OptState] | None = None,
    others: Callable[[Updates, Params], Updates] = lambda updates, params: updates,
) -> core.Unchecked:
    """Return a rule that applies `rule` to the leaves that `choose` selects, and gives the rest the
    updates of `others`, by default the given ones.

    The rule meets trees with the unselected leaves masked, and so keeps no state for them.

    Args:
      rule: init and update.
      choose: returns the paths of the selected leaves of a tree. Params and updates have the same
        paths; leaves that are masked already have paths too.
      state_type: a NamedTuple of one field, which keeps the state of the rule; None keeps the state
        as it is.
      others: (updates, params) -> a tree; its leaves that are not selected are the updates.

    Raises, at init and update:
      TypeError: a selected leaf is complex, and the rule is not defined for complex leaves.
    """

    def init(params: Params) -> OptState:
        chosen = Selection(choose(params)).keep(params)
        _check_real(rule, chosen, "parameter")
        state = rule.init(chosen)
        return state if state_type is None else state_type(state)

    def update(updates: Updates, state: OptState, params: Params = None, **extra: Any) -> Stepped:
        selection = Selection(choose(updates))
        chosen = selection.keep(updates)
        _check_real(rule, chosen, "gradient")
        chosen_params = None if params is None else selection.keep(params)
        inner = state if state_type is None else state[0]
        chosen, inner = rule.update(chosen, inner, chosen_params, **extra)
        updates = selection.fill(chosen, others(updates, params))
        return updates, inner if state_type is None else state_type(inner)

    # docs/tables.py names the rule by `links`, which is no chain here.
    return rule._replace(init=init, update=update, reads_state=True, links=(rule,), name="")


def _check_real(rule: core.Unchecked, values: PyTree, kind: str) -> None:
    """Raise a TypeError if a leaf is complex and the rule is not defined for complex leaves."""
    if rule.real_only:
        errors.check_params(rule.real_only, values, rule.real_only, kind)
