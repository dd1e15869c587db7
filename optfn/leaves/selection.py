"""A choice of leaves by their paths, also of those inside the buffers of a Packed."""

import itertools
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
import optax
from jax.tree_util import PyTreeDef

from optfn.leaves import tree
from optfn.leaves.layout import BufferLayout
from optfn.leaves.nodes import Packed, Stacked, is_packed
from optfn.leaves.tree import Pattern
from optfn.leaves.types import Leaf, PyTree


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
                return _part(node, self._numbers(path, node))
            return node if path in self.paths else optax.MaskedNode()

        return _map_nodes(keep, values)

    def fill(self, part: PyTree, whole: PyTree) -> PyTree:
        """Undo `keep`: return `whole` with its selected leaves replaced by those of `part`."""

        def fill(path: str, node: PyTree, selected: PyTree) -> PyTree:
            if is_packed(node):
                return _filled(node, selected, self._numbers(path, node))
            return selected if path in self.paths else node

        return _map_nodes(fill, whole, part)

    def _numbers(self, path: str, node: Packed) -> frozenset[int]:
        """Return the numbers of the selected leaves of a Packed."""
        names = enumerate(node.layout.paths)
        return frozenset(i for i, name in names if tree.join(path, name) in self.paths)


def mark_stacked(values: PyTree, axes: Callable[[str], int]) -> PyTree:
    """Return the tree in which axes(path) leading axes of each leaf count tensors.

    See `Stacked`; the axes that the tree already marks are included in the numbers.
    """
    runs = tree.runs(values)

    def mark(path: str, node: PyTree) -> PyTree:
        if is_packed(node):
            counts = tuple(axes(tree.join(path, name)) for name in node.layout.paths)
            return Packed(node.buffers, node.frozen, node.layout.stacked(counts))
        for _ in range(axes(path) - runs[path].stacked):
            node = Stacked(node) if tree.is_inexact(node) else node
        return node

    return _map_nodes(mark, values)


def _map_nodes(fn: Callable[..., PyTree], values: PyTree, *others: PyTree) -> PyTree:
    """Map fn(path, node, *nodes of the others), where a Packed counts as one node."""

    def is_node(x: PyTree) -> bool:
        return is_packed(x) or tree.is_leaf(x)

    flat: tuple[list[PyTree], PyTreeDef] = jax.tree.flatten(values, is_leaf=is_node)
    nodes, structure = flat
    columns = (jax.tree.leaves(other, is_leaf=is_node) for other in others)
    return structure.unflatten(map(fn, tree.paths(values, is_node), nodes, *columns))


def _part(whole: Packed, chosen: frozenset[int]) -> Packed:
    """Return the chosen leaves of a Packed, by their numbers."""
    layout = whole.layout.only(chosen)
    buffers = [
        _chosen_elements(buffer, chosen, x)
        for buffer, x in zip(whole.layout.buffers, whole.buffers, strict=True)
        if not chosen.isdisjoint(buffer.leaves)
    ]
    frozen = dict(zip(whole.layout.frozen, whole.frozen, strict=True))
    return Packed(buffers, [frozen[i] for i in layout.frozen], layout)


def _filled(whole: Packed, part: Packed, chosen: frozenset[int]) -> Packed:
    """Return `whole` with its chosen leaves replaced by those of `part`."""
    arrays = {b.dtype: x for b, x in zip(part.layout.buffers, part.buffers, strict=True)}
    leaves = dict(zip(part.layout.frozen, part.frozen, strict=True))
    buffers = [
        _merged_elements(buffer, chosen, arrays.get(buffer.dtype), x)
        for buffer, x in zip(whole.layout.buffers, whole.buffers, strict=True)
    ]
    frozen = zip(whole.layout.frozen, whole.frozen, strict=True)
    return Packed(buffers, [leaves.get(i, x) for i, x in frozen], whole.layout)


def _spans(buffer: BufferLayout, chosen: frozenset[int]) -> Iterator[tuple[bool, int]]:
    """Yield (chosen, number of elements) for neighbouring leaves that are both chosen or not."""
    sizes = ((i in chosen, run.size) for run in buffer.runs for i in run.leaves)
    for is_chosen, group in itertools.groupby(sizes, key=lambda pair: pair[0]):
        yield is_chosen, sum(size for _, size in group)


def _chosen_elements(buffer: BufferLayout, chosen: frozenset[int], x: Leaf) -> Leaf:
    """Return the elements of a buffer that belong to chosen leaves."""
    if chosen.issuperset(buffer.leaves) or tree.is_masked(x):
        return x
    pieces, start = [], 0
    for is_chosen, size in _spans(buffer, chosen):
        if is_chosen:
            pieces.append(x[start : start + size])
        start += size
    return jnp.concatenate(pieces)


def _merged_elements(buffer: BufferLayout, chosen: frozenset[int], part: Leaf, whole: Leaf) -> Leaf:
    """Return the buffer `whole` with the elements of its chosen leaves from `part`."""
    if chosen.isdisjoint(buffer.leaves):
        return whole
    if chosen.issuperset(buffer.leaves):
        return part
    pieces, start, start_of_part = [], 0, 0
    for is_chosen, size in _spans(buffer, chosen):
        array, at = (part, start_of_part) if is_chosen else (whole, start)
        pieces.append(array[at : at + size])
        start, start_of_part = start + size, start_of_part + size * is_chosen
    return jnp.concatenate(pieces)
