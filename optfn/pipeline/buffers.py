"""Trees of any shape as a few flat buffers of fixed size, one per dtype.

Stages that differ in shapes run in one program only if what they exchange and keep has one type:
each tree is ravelled, dtype by dtype, and padded to the longest.
"""

import math
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp

# The length of the buffer of each dtype, by the dtype's name.
Sizes = dict[str, int]


def sizes(trees: Iterable[Any]) -> Sizes:
    """Return, for each dtype, the length of a buffer that holds those leaves of any of `trees`."""
    longest: Sizes = {}
    for tree in trees:
        own: Sizes = {}
        for x in jax.tree.leaves(tree):
            own[x.dtype.name] = own.get(x.dtype.name, 0) + math.prod(x.shape)
        for name, length in own.items():
            longest[name] = max(length, longest.get(name, 0))
    return dict(sorted(longest.items()))


def inexact(lengths: Sizes) -> Sizes:
    """Return the part of `lengths` that can have a gradient."""
    return {k: n for k, n in lengths.items() if jnp.issubdtype(jnp.dtype(k), jnp.inexact)}


def pack(tree: Any, lengths: Sizes) -> dict[str, jax.Array]:
    """Return the leaves of `tree` in buffers of the given lengths, zeros behind them."""
    parts: dict[str, list[jax.Array]] = {name: [] for name in lengths}
    for x in jax.tree.leaves(tree):
        parts[x.dtype.name].append(jnp.ravel(x))
    packed = {}
    for name, length in lengths.items():
        rest = length - sum(x.size for x in parts[name])
        packed[name] = jnp.concatenate([*parts[name], jnp.zeros(rest, jnp.dtype(name))])
    return packed


def unpack(buffers: dict[str, Any], like: Any) -> Any:
    """Return the tree that was packed; `like` has its structure, shapes and dtypes."""
    leaves, structure = jax.tree.flatten(like)
    start = dict.fromkeys(buffers, 0)
    out = []
    for x in leaves:
        name, length = x.dtype.name, math.prod(x.shape)
        stop = start[name] + length
        out.append(buffers[name][start[name] : stop].reshape(x.shape))
        start[name] = stop
    return jax.tree.unflatten(structure, out)
