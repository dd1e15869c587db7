"""Packed parameters: one flat buffer per dtype in place of thousands of leaves.

Leaves of equal shape lie next to each other in a buffer and make up a run, so that what concerns
each tensor, its norm or its own rate, is arithmetic on arrays of shape (count, *shape).
`optfn.leaves.packed` makes them.
"""

import dataclasses
import itertools
import math
from collections.abc import Callable, Sequence
from functools import cached_property, lru_cache
from typing import Any

import jax
import jax.numpy as jnp


@dataclasses.dataclass(frozen=True)
class Run:
    """Leaves of one shape that follow each other in a buffer.

    Args:
      shape: of each.
      leaves: which ones, by their number in the tree.
      start: where the first one starts.
    """

    shape: tuple[int, ...]
    leaves: tuple[int, ...]
    start: int

    @property
    def size(self) -> int:
        """Elements of one leaf."""
        return math.prod(self.shape)

    @property
    def stop(self) -> int:
        """Where the last one ends."""
        return self.start + self.size * len(self.leaves)


@dataclasses.dataclass(frozen=True)
class Part:
    """What lies in one buffer."""

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

    def views(self, x: jax.Array) -> list[jax.Array]:
        """Return the runs of a buffer, each (count, *shape)."""
        return [x[run.start : run.stop].reshape(len(run.leaves), *run.shape) for run in self.runs]

    def split(self, values: Sequence[Any]) -> list[Sequence[Any]]:
        """Return what has one entry per leaf of the buffer, run by run."""
        rest = iter(values)
        return [list(itertools.islice(rest, len(run.leaves))) for run in self.runs]


@dataclasses.dataclass(frozen=True, eq=False)
class Layout:
    """Where the leaves of a tree lie; static.

    Args:
      structure: of the tree, holes counted as leaves.
      paths: of its leaves.
      parts: the buffers.
      held: the leaves that are in none, because they are not floating point, by their number.
    """

    structure: Any
    paths: tuple[str, ...]
    parts: tuple[Part, ...]
    held: tuple[int, ...]

    @cached_property
    def _key(self) -> Any:
        return self.structure, self.paths, self.parts, self.held

    @cached_property
    def _hash(self) -> int:
        return hash(self._key)

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: Any) -> bool:
        # A jitted step asks this at each call, mostly of the same object.
        return self is other or (isinstance(other, Layout) and self._key == other._key)

    def only(self, flags: Sequence[bool | tuple[bool, ...]]) -> "Layout":
        """Return the layout of what is selected: flags as `tree.select` gives them."""
        return _only(self, tuple(flags))


@lru_cache(maxsize=64)
def _only(layout: Layout, flags: tuple[bool | tuple[bool, ...], ...]) -> Layout:
    parts = []
    for part, chosen in zip(layout.parts, flags, strict=False):
        assert isinstance(chosen, tuple)
        start, runs = 0, []
        for run, own in zip(part.runs, part.split(chosen), strict=True):
            kept = tuple(i for i, keep in zip(run.leaves, own, strict=True) if keep)
            if kept:
                runs.append(Run(run.shape, kept, start))
                start = runs[-1].stop
        if runs:
            parts.append(Part(part.dtype, tuple(runs)))
    rest = flags[len(layout.parts) :]
    held = tuple(i for i, keep in zip(layout.held, rest, strict=True) if keep)
    return Layout(layout.structure, layout.paths, tuple(parts), held)


@jax.tree_util.register_pytree_with_keys_class
class Packed:
    """A tree of arrays as one flat buffer per dtype; `optfn.unpack` gives the tree.

    A pytree whose leaves are the buffers, and those leaves of the tree that are not floating point.
    Optimizers work on it as on any other; what concerns single tensors (norms, patterns of paths,
    attributes) is that of the leaves of the tree.

    Args:
      buffers: flat arrays, one for each part of the layout.
      held: the other leaves.
      layout: where everything lies.
    """

    def __init__(self, buffers: Sequence[Any], held: Sequence[Any], layout: Layout) -> None:
        self.buffers = tuple(buffers)
        self.held = tuple(held)
        self.layout = layout

    def tree_flatten_with_keys(self) -> tuple[list[tuple[Any, Any]], Layout]:
        """Return the children with their keys, and the layout."""
        names = [part.dtype for part in self.layout.parts]
        names += [self.layout.paths[i] for i in self.layout.held]
        keys = map(jax.tree_util.DictKey, names)
        return list(zip(keys, (*self.buffers, *self.held), strict=True)), self.layout

    def tree_flatten(self) -> tuple[tuple[Any, ...], Layout]:
        """Return the children, and the layout."""
        return (*self.buffers, *self.held), self.layout

    @classmethod
    def tree_unflatten(cls, layout: Layout, children: Sequence[Any]) -> "Packed":
        """Return the Packed of these children."""
        count = len(layout.parts)
        return cls(children[:count], children[count:], layout)

    def __repr__(self) -> str:
        parts = (
            f"{part.dtype}[{part.size}] of {len(part.leaves)} leaves" for part in self.layout.parts
        )
        held = [f"{len(self.held)} held"] if self.held else []
        return f"Packed({', '.join([*parts, *held])})"


def is_packed(x: Any) -> bool:
    """Tell whether `x` is a Packed."""
    return isinstance(x, Packed)


def by_runs(rule: Callable[..., Any], part: Part, arrays: Sequence[Any], own: Any) -> Any:
    """Apply a rule on one tensor to each leaf of buffers.

    Args:
      rule: (arrays, own) -> an array like those, or a tuple of them.
      part: what lies in the buffers.
      arrays: the buffers.
      own: a dict of lists: for each run an array (count,), a scalar for each leaf.
    """
    views = zip(*(part.views(x) for x in arrays), strict=True)
    results = []
    for k, view in enumerate(views):
        scalars = {name: jnp.asarray(values[k]) for name, values in own.items()}
        results.append(jax.vmap(rule)(view, scalars))
    return jax.tree.map(lambda *runs: jnp.concatenate([x.reshape(-1) for x in runs]), *results)
