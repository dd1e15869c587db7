"""A choice of leaves by their paths, also of those inside the buffers of a Packed."""

import optax

from optfn.leaves import packed, tree
from optfn.leaves.nodes import Packed, is_packed
from optfn.leaves.packed import map_nodes
from optfn.leaves.tree import Pattern
from optfn.leaves.types import PyTree


class Selection:
    """The leaves of a tree that a pattern selects, and of all trees with the same paths.

    paths: the paths of the leaves.
    """

    def __init__(self, pattern: Pattern | None, params: PyTree, argument: str = "pattern") -> None:
        self.paths = tree.matching(pattern, params, argument)

    def keep(self, values: PyTree) -> PyTree:
        """Mask the leaves that are not selected; a Packed holds the selected leaves alone."""

        def keep(path: str, node: PyTree) -> PyTree:
            if is_packed(node):
                return packed.part(node, self._numbers(path, node))
            return node if path in self.paths else optax.MaskedNode()

        return map_nodes(keep, values)

    def fill(self, part: PyTree, whole: PyTree) -> PyTree:
        """Undo `keep`: return `whole` with its selected leaves replaced by those of `part`."""

        def fill(path: str, node: PyTree, selected: PyTree) -> PyTree:
            if is_packed(node):
                return packed.filled(node, selected, self._numbers(path, node))
            return selected if path in self.paths else node

        return map_nodes(fill, whole, part)

    def _numbers(self, path: str, node: Packed) -> frozenset[int]:
        """Return the numbers of the selected leaves of a Packed."""
        names = enumerate(node.layout.paths)
        return frozenset(i for i, name in names if tree.join(path, name) in self.paths)
