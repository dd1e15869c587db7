"""A choice of leaves by their paths, also of those inside the buffers of a Packed."""

from collections.abc import Iterator
from typing import Any

import optax

from optfn.core import tree
from optfn.core.leafwise import PerLeaf
from optfn.core.types import PyTree
from optfn.leaves import packed, patterns
from optfn.leaves.layout import select_leaves
from optfn.leaves.nodes import Packed, is_packed
from optfn.leaves.packed import map_nodes
from optfn.leaves.patterns import Pattern
from optfn.leaves.tensors import PerTensor


class Selection:
    """The leaves of a tree that a pattern selects, and of all trees with the same paths.

    paths: the paths of the leaves.
    """

    def __init__(self, pattern: Pattern | None, params: PyTree, argument: str = "pattern") -> None:
        self.paths = patterns.match_names(pattern, params, argument)

    def keep(self, values: PyTree) -> PyTree:
        """Mask the leaves that are not selected; a Packed holds the selected leaves alone."""

        def keep(path: str, node: PyTree) -> PyTree:
            if is_packed(node):
                return packed.subset(node, self._numbers(path, node))
            return node if path in self.paths else optax.MaskedNode()

        return map_nodes(keep, values)

    def fill(self, kept: PyTree, whole: PyTree) -> PyTree:
        """Undo `keep`: replace the selected leaves of `whole` by the leaves of `kept`."""

        def fill(path: str, node: PyTree, selected: PyTree) -> PyTree:
            if is_packed(node):
                return packed.fill(node, selected, self._numbers(path, node))
            return selected if path in self.paths else node

        return map_nodes(fill, whole, kept)

    def keep_scalars(self, scalars: PerLeaf, values: PyTree) -> PerLeaf:
        """Return the scalars of the leaves that `keep(values)` keeps."""
        remaining = iter(scalars.values)

        def scalars_kept(path: str, node: PyTree) -> Iterator[Any]:
            if not is_packed(node):
                yield next(remaining)
                return
            layout = select_leaves(node.layout, self._numbers(path, node))
            selected = {buffer.dtype: buffer for buffer in layout.buffers}
            for buffer in node.layout.buffers:
                scalar = next(remaining)
                if buffer.dtype in selected:
                    is_split = isinstance(scalar, PerTensor)
                    yield scalar.restrict(selected[buffer.dtype]) if is_split else scalar
            for i in node.layout.frozen:
                scalar = next(remaining)
                if i in layout.frozen:
                    yield scalar

        found: list[Any] = []
        map_nodes(lambda path, node: found.extend(scalars_kept(path, node)), values)
        return PerLeaf(found)

    def _numbers(self, path: str, node: Packed) -> frozenset[int]:
        """Return the numbers of the selected leaves of a Packed."""
        names = enumerate(node.layout.paths)
        return frozenset(i for i, name in names if tree.join(path, name) in self.paths)
