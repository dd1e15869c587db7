"""Nodes of a tree that describe their leaves: `Stacked` and `Packed`.

The functions `leaf_layouts` and `leaf_names` of `contents.py` call the methods of these names.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple, TypeGuard

import jax

from optfn.core import tree
from optfn.core.traits import traits
from optfn.core.types import Leaf, PyTree
from optfn.leaves import contents
from optfn.leaves.layout import BufferLayout, PackedLayout


@traits(transparent=True)
class Stacked(NamedTuple):
    """A tree whose leaves have the layers of a model stacked along their leading axis.

    It tells rules with a norm per tensor (LAMB, LARS, `clip_by_norm`) to treat each index of that
    axis as a separate tensor, as in the unstacked model. `stack_stages` returns a `Stacked`; for
    layers that a model scans over, `ParamAttr(stacked=1)` has the same effect. A `Stacked` inside
    another counts two axes. It does not change paths. `stacked["w"]` is the leaf, as are
    `stacked[0]` for a list and `stacked.weight` for an object. To JAX it is a tuple of one tree.
    """

    layers: PyTree

    def leaf_layouts(self) -> list[BufferLayout]:
        """Return the layout of each leaf: a tensor for each index of one more axis."""
        return [layout.stack_once() for layout in contents.leaf_layouts(self.layers)]

    def __getitem__(self, key: Any) -> Any:
        return self.layers[key]

    def __setitem__(self, key: Any, leaf: Any) -> None:
        self.layers[key] = leaf

    def __contains__(self, key: object) -> bool:
        return key in self.layers

    def __getattr__(self, name: str) -> Any:
        # With the attributes of an array it would pass for an array (`tree.is_array`).
        if name.startswith("_") or tree.is_array(self.layers):
            raise AttributeError(name)
        return getattr(self.layers, name)


@jax.tree_util.register_pytree_with_keys_class
class Packed:
    """A tree of arrays as one flat buffer per dtype. The function `optfn.unpack` returns the tree.

    It is a pytree. Its leaves are the buffers, and the leaves of the original tree that are not
    floating point. Optimizers of optfn take it like the original tree: norms per tensor, patterns
    of paths and attributes refer to the leaves of that tree. Others see the buffers; see `pack`.

    Args:
      buffers: flat arrays, one for each buffer of the layout.
      frozen: the leaves that are not floating point.
      layout: the position of each leaf in the buffers.
    """

    def __init__(
        self, buffers: Sequence[Leaf], frozen: Sequence[Leaf], layout: PackedLayout
    ) -> None:
        self.buffers = tuple(buffers)
        self.frozen = tuple(frozen)
        self.layout = layout

    def tree_flatten_with_keys(self) -> tuple[list[tuple[Any, Leaf]], PackedLayout]:
        """Return the children with their keys, and the layout."""
        names = [buffer.dtype for buffer in self.layout.buffers]
        names += [self.layout.paths[i] for i in self.layout.frozen]
        keys = map(jax.tree_util.DictKey, names)
        return list(zip(keys, (*self.buffers, *self.frozen), strict=True)), self.layout

    def tree_flatten(self) -> tuple[tuple[Leaf, ...], PackedLayout]:
        """Return the children, and the layout."""
        return (*self.buffers, *self.frozen), self.layout

    @classmethod
    def tree_unflatten(cls, layout: PackedLayout, children: Sequence[Leaf]) -> "Packed":
        """Return the Packed of a layout and its children."""
        count = len(layout.buffers)
        return cls(children[:count], children[count:], layout)

    def buffer_items(self) -> list[tuple[BufferLayout, Leaf]]:
        """Return (layout, array) of each buffer."""
        return list(zip(self.layout.buffers, self.buffers, strict=True))

    def frozen_leaves(self) -> dict[int, Leaf]:
        """Return the frozen leaves by their indices in the tree."""
        return dict(zip(self.layout.frozen, self.frozen, strict=True))

    def leaf_layouts(self) -> list[BufferLayout]:
        """Return the layout of each leaf of this node: the buffers, then the frozen leaves."""
        return [*self.layout.buffers, *map(contents.layout_of_leaf, self.frozen)]

    def leaf_names(self) -> list[tuple[str, ...]]:
        """Return for each leaf of this node the paths of the original leaves in it."""
        paths = self.layout.paths
        buffers = [tuple(paths[i] for i in buffer.leaves) for buffer in self.layout.buffers]
        return [*buffers, *((paths[i],) for i in self.layout.frozen)]

    def __repr__(self) -> str:
        buffers = (f"{b.dtype}[{b.size}] of {len(b.leaves)} leaves" for b in self.layout.buffers)
        frozen = [f"{len(self.frozen)} frozen"] if self.frozen else []
        return f"Packed({', '.join([*buffers, *frozen])})"


def is_packed(x: object) -> TypeGuard[Packed]:
    """Tell whether `x` is a Packed."""
    return isinstance(x, Packed)
