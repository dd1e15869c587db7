"""Which tensors lie in an array: one, or several next to each other.

A rule with a norm per tensor has to know what a tensor is. In a plain leaf there is one; in a leaf
under a `Stacked` one for each index of its leading axes; in a buffer of a `Packed` those of many
leaves. All three are a `BufferLayout`: runs of leaves of one shape.
"""

import dataclasses
import itertools
import math
from collections.abc import Callable, Sequence
from functools import cached_property, lru_cache
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp

from optfn.leaves.types import PyTree, declares

T = TypeVar("T")


@declares(transparent=True)
class Stacked(NamedTuple):
    """A tree whose leaves have the layers of a model stacked along their leading axis.

    Rules with a norm per tensor (LAMB, LARS, `clip_by_norm`) then take each index of that axis for
    a tensor of its own, as in the model with its layers apart. `stack_stages` gives it; for layers
    that a model scans over, `ParamAttr(stacked=1)` does the same. One inside another counts two
    axes. It adds no word to paths and names, and `stacked["w"]` is the leaf.
    """

    layers: PyTree

    def __getitem__(self, key: Any) -> Any:
        # A tuple's own keys are integers and slices; others are those of the tree.
        is_index = isinstance(key, int | slice)
        return tuple.__getitem__(self, key) if is_index else self.layers[key]

    def __setitem__(self, key: Any, leaf: Any) -> None:
        self.layers[key] = leaf

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or hasattr(self.layers, "dtype"):
            raise AttributeError(name)
        return getattr(self.layers, name)


@dataclasses.dataclass(frozen=True)
class Run:
    """Leaves of one shape that follow each other in a buffer.

    Args:
      shape: of each leaf.
      leaves: which ones, by their number in the tree.
      start: where the first one starts.
      stacked: how many leading axes of a leaf count tensors.
    """

    shape: tuple[int, ...]
    leaves: tuple[int, ...]
    start: int = 0
    stacked: int = 0

    @property
    def size(self) -> int:
        """Elements of one leaf."""
        return math.prod(self.shape)

    @property
    def stop(self) -> int:
        """Where the last leaf ends."""
        return self.start + self.size * len(self.leaves)

    @property
    def per_leaf(self) -> int:
        """How many tensors a leaf holds."""
        return math.prod(self.shape[: self.stacked])

    @property
    def num_tensors(self) -> int:
        """How many tensors the run holds."""
        return len(self.leaves) * self.per_leaf


@dataclasses.dataclass(frozen=True)
class BufferLayout:
    """What lies in one array."""

    dtype: str
    runs: tuple[Run, ...]

    @cached_property
    def leaves(self) -> tuple[int, ...]:
        """The leaves in the order of the buffer, by their number in the tree."""
        return tuple(i for run in self.runs for i in run.leaves)

    @property
    def size(self) -> int:
        """Elements of the buffer."""
        return self.runs[-1].stop

    @property
    def is_one_tensor(self) -> bool:
        """Whether the array is a single tensor."""
        return len(self.runs) == 1 and self.runs[0].num_tensors == 1

    def tensors(self, x: jax.Array) -> list[jax.Array]:
        """Return the tensors in an array, run by run, each run (num_tensors, *shape)."""
        pieces = [x]
        if len(self.runs) > 1:
            pieces = [x[run.start : run.stop] for run in self.runs]
        return [
            piece.reshape(run.num_tensors, *run.shape[run.stacked :])
            for piece, run in zip(pieces, self.runs, strict=True)
        ]

    def join(self, tensors: Sequence[jax.Array], shape: tuple[int, ...]) -> jax.Array:
        """Return the array of `shape` in which these tensors lie: the inverse of `tensors`."""
        if len(tensors) == 1:
            return tensors[0].reshape(shape)
        return jnp.concatenate([x.reshape(-1) for x in tensors])

    def by_run(self, per_leaf: Sequence[T]) -> list[list[T]]:
        """Split what has one entry per leaf by run, an entry for each tensor of the run."""
        rest = iter(per_leaf)
        return [
            [x for x in itertools.islice(rest, len(run.leaves)) for _ in range(run.per_leaf)]
            for run in self.runs
        ]

    def map_tensors(
        self, rule: Callable[..., Any], arrays: Sequence[jax.Array], scalars: dict[str, Any]
    ) -> Any:
        """Apply a rule on one tensor to all tensors in buffers.

        Args:
          rule: (*tensors, **scalars) -> a tensor like those, or a tuple of them.
          arrays: the buffers.
          scalars: for each name a list, with an array (num_tensors,) for each run.
        """
        views = zip(*map(self.tensors, arrays), strict=True)
        results = []
        for k, view in enumerate(views):
            own = {name: jnp.asarray(values[k]) for name, values in scalars.items()}
            results.append(jax.vmap(lambda x, own: rule(*x, **own))(view, own))
        return jax.tree.map(lambda *runs: self.join(runs, arrays[0].shape), *results)


def plain(shape: tuple[int, ...], stacked: int = 0) -> BufferLayout:
    """Return the layout of an array that is a leaf."""
    return BufferLayout("", (Run(shape, (0,), 0, stacked),))


@dataclasses.dataclass(frozen=True, eq=False)
class PackedLayout:
    """Where the leaves of a tree lie in a Packed; static.

    Args:
      structure: of the tree, masked leaves counted as leaves.
      paths: of its leaves.
      buffers: what lies in each buffer.
      frozen: the leaves that are in none, because they are not floating point, by their number.
    """

    structure: Any
    paths: tuple[str, ...]
    buffers: tuple[BufferLayout, ...]
    frozen: tuple[int, ...]

    @cached_property
    def _key(self) -> tuple[Any, ...]:
        return self.structure, self.paths, self.buffers, self.frozen

    @cached_property
    def _hash(self) -> int:
        return hash(self._key)

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        # A jitted step asks this at each call, mostly of the same object.
        return self is other or (isinstance(other, PackedLayout) and self._key == other._key)

    def only(self, flags: tuple[tuple[bool, ...], ...]) -> "PackedLayout":
        """Return the layout of the leaves that are flagged, as `tree.select` flags them."""
        return _only(self, flags)

    def stacked(self, axes: tuple[tuple[int, ...], ...]) -> "PackedLayout":
        """Return the layout with so many leading axes of each leaf counting tensors."""
        return _stacked(self, axes)


def _split_run(run: Run, marks: Sequence[Any]) -> list[tuple[Any, tuple[int, ...]]]:
    """Return the leaves of a run in groups of one mark."""
    pairs = zip(marks, run.leaves, strict=True)
    groups = itertools.groupby(pairs, key=lambda pair: pair[0])
    return [(mark, tuple(i for _, i in group)) for mark, group in groups]


def _marks_by_run(layout: BufferLayout, marks: Sequence[Any]) -> list[list[Any]]:
    rest = iter(marks)
    return [list(itertools.islice(rest, len(run.leaves))) for run in layout.runs]


@lru_cache(maxsize=64)
def _only(layout: PackedLayout, flags: tuple[tuple[bool, ...], ...]) -> PackedLayout:
    buffers = []
    for buffer, chosen in zip(layout.buffers, flags, strict=False):
        start, runs = 0, []
        for run, own in zip(buffer.runs, _marks_by_run(buffer, chosen), strict=True):
            kept = tuple(itertools.compress(run.leaves, own))
            if kept:
                runs.append(dataclasses.replace(run, leaves=kept, start=start))
                start = runs[-1].stop
        if runs:
            buffers.append(BufferLayout(buffer.dtype, tuple(runs)))
    rest = flags[len(layout.buffers) :]
    frozen = tuple(i for i, (keep,) in zip(layout.frozen, rest, strict=True) if keep)
    return dataclasses.replace(layout, buffers=tuple(buffers), frozen=frozen)


@lru_cache(maxsize=64)
def _stacked(layout: PackedLayout, axes: tuple[tuple[int, ...], ...]) -> PackedLayout:
    buffers = []
    for buffer, counts in zip(layout.buffers, axes, strict=False):
        runs: list[Run] = []
        for run, own in zip(buffer.runs, _marks_by_run(buffer, counts), strict=True):
            for stacked, leaves in _split_run(run, own):
                start = runs[-1].stop if runs else 0
                runs.append(Run(run.shape, leaves, start, max(stacked, run.stacked)))
        buffers.append(BufferLayout(buffer.dtype, tuple(runs)))
    return dataclasses.replace(layout, buffers=tuple(buffers))


@jax.tree_util.register_pytree_with_keys_class
class Packed:
    """A tree of arrays as one flat buffer per dtype; `optfn.unpack` gives the tree.

    A pytree whose leaves are the buffers, and those leaves of the tree that are not floating point.
    Optimizers work on it as on any other; what concerns single tensors (norms, patterns of paths,
    attributes) is that of the leaves of the tree.

    Args:
      buffers: flat arrays, one for each buffer of the layout.
      frozen: the leaves that are not floating point.
      layout: where everything lies.
    """

    def __init__(self, buffers: Sequence[Any], frozen: Sequence[Any], layout: PackedLayout) -> None:
        self.buffers = tuple(buffers)
        self.frozen = tuple(frozen)
        self.layout = layout

    def tree_flatten_with_keys(self) -> tuple[list[tuple[Any, Any]], PackedLayout]:
        """Return the children with their keys, and the layout."""
        names = [buffer.dtype for buffer in self.layout.buffers]
        names += [self.layout.paths[i] for i in self.layout.frozen]
        keys = map(jax.tree_util.DictKey, names)
        return list(zip(keys, (*self.buffers, *self.frozen), strict=True)), self.layout

    def tree_flatten(self) -> tuple[tuple[Any, ...], PackedLayout]:
        """Return the children, and the layout."""
        return (*self.buffers, *self.frozen), self.layout

    @classmethod
    def tree_unflatten(cls, layout: PackedLayout, children: Sequence[Any]) -> "Packed":
        """Return the Packed of these children."""
        count = len(layout.buffers)
        return cls(children[:count], children[count:], layout)

    def __repr__(self) -> str:
        buffers = (f"{b.dtype}[{b.size}] of {len(b.leaves)} leaves" for b in self.layout.buffers)
        frozen = [f"{len(self.frozen)} frozen"] if self.frozen else []
        return f"Packed({', '.join([*buffers, *frozen])})"


def is_packed(x: Any) -> bool:
    """Tell whether `x` is a Packed."""
    return isinstance(x, Packed)
