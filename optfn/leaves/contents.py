"""The names and the layouts of the tensors in each leaf of a tree.

A plain leaf has one name, its path. A buffer of a `Packed` has the path of each leaf packed in it.
"""

from typing import Any

import jax

from optfn.core.tree import is_array, is_leaf, join, leaves, paths
from optfn.core.types import Leaf, PyTree
from optfn.leaves.layout import BufferLayout, Run


def has_leaf_layouts(x: object) -> bool:
    """Tell whether `x` is a node that knows the layouts of its leaves, such as `Packed`."""
    # By its method, because `nodes` imports this module.
    return hasattr(type(x), "leaf_layouts")


def leaf_layouts(tree: PyTree) -> list[BufferLayout]:
    """Return the layout of each leaf in the order of `flatten`: one tensor for a plain leaf, and
    the layouts that a node such as `Packed` gives for its leaves."""
    found: list[BufferLayout] = []
    for node in jax.tree.leaves(tree, is_leaf=lambda x: has_leaf_layouts(x) or is_leaf(x)):
        found += node.leaf_layouts() if has_leaf_layouts(node) else [layout_of_leaf(node)]
    return found


def layout_of_leaf(x: Leaf) -> BufferLayout:
    """Return the layout of a leaf that is one tensor, a scalar if it has no shape."""
    shape = tuple(x.shape) if is_array(x) else ()
    return BufferLayout("", (Run(shape, (0,)),))


def count_stacked_axes(tree: PyTree) -> list[int]:
    """Return for each leaf how many leading axes count tensors, which is the number of `Stacked`
    around it."""
    return [layout.runs[0].stacked for layout in leaf_layouts(tree)]


def runs_by_name(tree: PyTree) -> dict[str, Run]:
    """Map each leaf name to its run: the neighbours of one shape in the same array."""
    runs = [run for layout in leaf_layouts(tree) for run in layout.run_of_leaves.values()]
    return dict(zip(all_names(tree), runs, strict=True))


def leaf_names(tree: PyTree) -> list[tuple[str, ...]]:
    """Return the names of each leaf in the order of `flatten`, which are its path, or for a buffer
    all paths packed in it."""
    found: list[tuple[str, ...]] = []
    nodes = jax.tree.leaves(tree, is_leaf=_is_named)
    for path, node in zip(paths(tree, _is_named), nodes, strict=True):
        groups = node.leaf_names() if has_names(node) else [("",)]
        found += [tuple(join(path, name) for name in group) for group in groups]
    return found


def all_names(tree: PyTree) -> list[str]:
    """Return the names of all leaves in one list, in the order of `leaf_names`."""
    return [name for group in leaf_names(tree) for name in group]


def leaves_with_names(tree: PyTree) -> list[tuple[str, Leaf]]:
    """Return (name, leaf) for each name of each leaf, as `leaf_names` returns them."""
    pairs = zip(leaf_names(tree), leaves(tree), strict=True)
    return [(name, leaf) for group, leaf in pairs for name in group]


def has_names(x: object) -> bool:
    """Tell whether `x` is a node that names its leaves, such as `Packed`."""
    return hasattr(type(x), "leaf_names")


def _is_named(x: Any) -> bool:
    """Tell whether `x` is a node that names its leaves, or a single leaf."""
    return has_names(x) or is_leaf(x)
