"""The positions of the tensors in an array: one tensor, or several, one after another.

A rule with a norm per tensor has to know where each tensor begins and ends. A plain leaf is one
tensor. A leaf in a `Stacked` has one tensor for each index of its leading axes. A buffer of a
`Packed` has the tensors of many leaves. A `BufferLayout` describes all three, as runs of leaves of
the same shape.
"""

import dataclasses
import itertools
import math
from collections.abc import Sequence
from functools import cached_property, lru_cache

import jax
import jax.numpy as jnp
from jax.tree_util import PyTreeDef


@dataclasses.dataclass(frozen=True)
class Run:
    """Leaves of one shape, one after another in a buffer.

    Args:
      shape: the shape of each leaf.
      leaves: the leaves, by their number in the tree.
      start: the first element of the first leaf.
      stacked: how many leading axes of a leaf count tensors.
    """

    shape: tuple[int, ...]
    leaves: tuple[int, ...]
    start: int = 0
    stacked: int = 0

    @property
    def size(self) -> int:
        """The number of elements of one leaf."""
        return math.prod(self.shape)

    @property
    def stop(self) -> int:
        """The index of the element behind the last leaf."""
        return self.start + self.size * len(self.leaves)

    @property
    def tensors_per_leaf(self) -> int:
        """The number of tensors in one leaf."""
        return math.prod(self.shape[: self.stacked])

    @property
    def tensor_size(self) -> int:
        """The number of elements of one tensor."""
        return math.prod(self.shape[self.stacked :])

    @property
    def num_tensors(self) -> int:
        """The number of tensors in the run."""
        return len(self.leaves) * self.tensors_per_leaf


@dataclasses.dataclass(frozen=True)
class BufferLayout:
    """The runs of leaves in one array, in order. For an array that is a leaf, `dtype` is ""."""

    dtype: str
    runs: tuple[Run, ...]

    @cached_property
    def leaves(self) -> tuple[int, ...]:
        """The indices in the tree of the leaves, in the order of the buffer."""
        return tuple(i for run in self.runs for i in run.leaves)

    @property
    def run_of_leaves(self) -> dict[int, Run]:
        """The run of each leaf, by the leaf's index in the tree, in the order of `leaves`."""
        return {i: run for run in self.runs for i in run.leaves}

    @property
    def size(self) -> int:
        """The number of elements of the buffer."""
        return self.runs[-1].stop

    @property
    def is_one_tensor(self) -> bool:
        """Whether the array is a single tensor."""
        return len(self.runs) == 1 and self.runs[0].num_tensors == 1

    def split_tensors(self, x: jax.Array) -> list[jax.Array]:
        """Return the tensors in an array, one array (num_tensors, *shape) for each run."""
        pieces = [x]
        # A single run is the whole array, of any number of axes; several lie in a flat buffer.
        if len(self.runs) > 1:
            pieces = [x[run.start : run.stop] for run in self.runs]
        return [
            piece.reshape(run.num_tensors, *run.shape[run.stacked :])
            for piece, run in zip(pieces, self.runs, strict=True)
        ]

    def rows(self, x: jax.Array) -> list[jax.Array]:
        """Return the tensors of each run of a buffer as rows (num_tensors, n), or for an array of
        several axes the result of `split_tensors`.

        A buffer has one axis; on a TPU a view with more axes than two would be a copy.
        """
        if x.ndim > 1:
            return self.split_tensors(x)
        return [
            x[run.start : run.stop].reshape(run.num_tensors, run.tensor_size) for run in self.runs
        ]

    def join(self, tensors: Sequence[jax.Array], shape: tuple[int, ...]) -> jax.Array:
        """Undo `split_tensors`: put these tensors back into one array of `shape`."""
        if len(tensors) == 1:
            return tensors[0].reshape(shape)
        return jnp.concatenate([x.reshape(-1) for x in tensors]).reshape(shape)

    def stack_once(self) -> "BufferLayout":
        """Return the layout with one more leading axis of each leaf that counts tensors."""
        runs = (dataclasses.replace(run, stacked=run.stacked + 1) for run in self.runs)
        return dataclasses.replace(self, runs=tuple(runs))


def make_buffer_layout(
    dtype: str, leaves: Sequence[tuple[tuple[int, ...], int, int]]
) -> BufferLayout:
    """Return the layout of a buffer of leaves, given as (shape, stacked, index) each, in this
    order."""
    runs: list[Run] = []
    # Only neighbours: a run is one slice of the buffer.
    for (shape, stacked), group in itertools.groupby(leaves, key=lambda leaf: leaf[:2]):
        start = runs[-1].stop if runs else 0
        runs.append(Run(shape, tuple(i for _, _, i in group), start, stacked))
    return BufferLayout(dtype, tuple(runs))


@dataclasses.dataclass(frozen=True)
class PackedLayout:
    """The positions of the leaves of a tree in the buffers of a Packed. All of its fields are
    static.

    Args:
      structure: the structure of the tree; masked leaves count as leaves.
      paths: the paths of its leaves.
      buffers: the layout of each buffer.
      frozen: the leaves outside the buffers, by their number: those that are not floating point,
        and those without elements.
    """

    structure: PyTreeDef
    paths: tuple[str, ...]
    buffers: tuple[BufferLayout, ...]
    frozen: tuple[int, ...]

    @cached_property
    def _hash(self) -> int:
        """The hash, computed once: a structure of thousands of leaves takes time."""
        return hash((self.structure, self.paths, self.buffers, self.frozen))

    def __hash__(self) -> int:
        return self._hash


# Kept, because each update selects again, and a jitted step then compares layouts by identity.
@lru_cache(maxsize=64)
def select_leaves(layout: PackedLayout, chosen: frozenset[int]) -> PackedLayout:
    """Keep the chosen leaves of a layout, by their indices in the tree, and leave out each buffer
    without any of them."""
    buffers = []
    for buffer in layout.buffers:
        runs = buffer.run_of_leaves.items()
        kept = [(run.shape, run.stacked, i) for i, run in runs if i in chosen]
        buffers += [make_buffer_layout(buffer.dtype, kept)] if kept else []
    frozen = tuple(i for i in layout.frozen if i in chosen)
    return dataclasses.replace(layout, buffers=tuple(buffers), frozen=frozen)


@lru_cache(maxsize=64)
def mark_layout(layout: PackedLayout, axes: tuple[int, ...]) -> PackedLayout:
    """Make axes[i] leading axes of leaf i count tensors in a layout, or more if more of them count
    already."""
    buffers = []
    for buffer in layout.buffers:
        runs = buffer.run_of_leaves.items()
        leaves = [(run.shape, max(axes[i], run.stacked), i) for i, run in runs]
        buffers.append(make_buffer_layout(buffer.dtype, leaves))
    return dataclasses.replace(layout, buffers=tuple(buffers))
