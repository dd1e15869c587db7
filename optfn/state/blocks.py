"""Codes of 8-bit moments as earlier versions wrote them, with a scale for each 256 elements.

Only a mapping of such a version opens this module.
"""

import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from optfn.core.types import Leaf
from optfn.state.encoded import Encoded, encoded_names

BLOCK = 256  # consecutive elements of a leaf; the last block may have fewer


def converted_scales(mapping: Mapping[str, Any], local: Mapping[str, int]) -> Mapping[str, Any]:
    """Return a mapping in which codes have a scale for each row; `mapping` itself if they do.

    Args:
      mapping: arrays by name, as `state_dict` returns them.
      local: the names of per-worker arrays, with the number of workers.

    Raises:
      ValueError: codes of an earlier version are spread over several processes.
    """
    new: dict[str, np.ndarray] = {}
    for name, (field, scale) in encoded_names(mapping).items():
        codes, scales, workers = mapping[name], mapping[scale], local.get(name, 1)
        leaf, stored = np.shape(codes), _row_shape(field, np.shape(codes))
        if name in local:  # the arrays of all workers, along the first axis
            leaf = (leaf[0] // workers, *leaf[1:])
            first, *others = _row_shape(field, leaf) or (1,)
            stored = (workers * first, *others)
        blocks = workers * -(-math.prod(leaf) // BLOCK)
        fits = np.size(codes) == workers * math.prod(leaf) and np.size(scales) == blocks
        if np.shape(scales) == stored or not fits:
            continue
        each = [
            _row_codes(field, *pair)
            for pair in zip(
                _on_host(codes, name).reshape(workers, *leaf),
                _on_host(scales, scale).reshape(workers, -1),
                strict=True,
            )
        ]
        new[name] = np.stack([x for x, _ in each]).reshape(np.shape(codes))
        new[scale] = np.stack([x for _, x in each]).reshape(stored)
    return {**mapping, **new} if new else mapping


def _row_shape(field: Encoded, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape of the scales of rows."""
    rows = jax.eval_shape(field.scales, jax.ShapeDtypeStruct(shape, jnp.float32))
    return tuple(rows.shape)


def _on_host(x: Leaf, name: str) -> np.ndarray:
    if isinstance(x, jax.Array) and not (x.is_fully_addressable or x.is_fully_replicated):
        raise ValueError(
            f"{name!r} has 8-bit moments of an earlier version, with a scale for each {BLOCK} "
            "elements, and is spread over several processes. Load the checkpoint in one process, "
            "and save it again"
        )
    return np.asarray(x)


def _row_codes(
    field: Encoded, codes: np.ndarray, scales: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return the nearest codes under scales of rows, and these, for the codes of one leaf.

    Args:
      field: the declaration of the codes.
      codes: the codes.
      scales: one for each block, flat.
    """
    blocks = np.zeros((scales.size, BLOCK), codes.dtype)
    blocks.reshape(-1)[: codes.size] = codes.reshape(-1)
    numbers = field.decode(jnp.asarray(blocks), jnp.asarray(scales))  # these are rows of 256
    each = jnp.repeat(jnp.asarray(scales), BLOCK)
    numbers, each = (x.reshape(-1)[: codes.size].reshape(codes.shape) for x in (numbers, each))
    scale = field.scales(each)
    return np.asarray(field.nearest(numbers, scale)), np.asarray(scale)
