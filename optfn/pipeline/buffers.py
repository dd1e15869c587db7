"""Conversion of trees of any shape to flat buffers of fixed length, one per dtype.

Heterogeneous stages run in one program only if their activations and residuals have the same type.
Each tree is therefore ravelled, dtype by dtype, and padded to the length of the longest.
"""

import math
from collections.abc import Iterable
from typing import TypeAlias

import jax
import jax.numpy as jnp

from optfn.core.types import PyTree

# The length of the buffer of each dtype, by the dtype's name.
Lengths: TypeAlias = dict[str, int]
# The buffers, by the dtype's name.
Buffers: TypeAlias = dict[str, jax.Array]


def find_lengths(trees: Iterable[PyTree]) -> Lengths:
    """Return, by the dtype's name, the most entries that one of `trees` has together, so that
    buffers of these lengths hold any of them."""
    longest: Lengths = {}
    for tree in trees:
        lengths: Lengths = {}
        for x in jax.tree.leaves(tree):
            lengths[x.dtype.name] = lengths.get(x.dtype.name, 0) + math.prod(x.shape)
        for name, length in lengths.items():
            longest[name] = max(length, longest.get(name, 0))
    # Sorted, so that buffers have one order on all devices and in all traces.
    return dict(sorted(longest.items()))


def make_shapes(lengths: Lengths) -> dict[str, jax.ShapeDtypeStruct]:
    """Return the shape (length,) and dtype of each buffer, by the dtype's name."""
    return {k: jax.ShapeDtypeStruct((n,), jnp.dtype(k)) for k, n in lengths.items()}


def select_inexact(lengths: Lengths) -> Lengths:
    """Return the lengths of the real and complex floating-point dtypes, which can have a
    gradient."""
    return {k: n for k, n in lengths.items() if jnp.issubdtype(jnp.dtype(k), jnp.inexact)}


def ravel(tree: PyTree, lengths: Lengths) -> Buffers:
    """Concatenate the leaves of a tree by dtype, pad each buffer with zeros to its length, and
    return the buffers by the dtype's name."""
    pieces: dict[str, list[jax.Array]] = {name: [] for name in lengths}
    for x in jax.tree.leaves(tree):
        pieces[x.dtype.name].append(jnp.ravel(x))
    buffers = {}
    for name, length in lengths.items():
        padding = length - sum(x.size for x in pieces[name])
        buffers[name] = jnp.concatenate([*pieces[name], jnp.zeros(padding, jnp.dtype(name))])
    return buffers


def unravel(buffers: Buffers, like: PyTree) -> PyTree:
    """Undo `ravel` by cutting leaves with the shapes and dtypes of `like` out of the buffers,
    without the padding."""
    start = dict.fromkeys(buffers, 0)

    def take(x: jax.Array) -> jax.Array:
        name, first = x.dtype.name, start[x.dtype.name]
        start[name] += math.prod(x.shape)
        return buffers[name][first : start[name]].reshape(x.shape)

    return jax.tree.map(take, like)
