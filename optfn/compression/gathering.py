"""The mean over workers of decoded packets, by one all-gather."""

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from optfn.compression.compressors import BaseCompressor, LeafInExchange
from optfn.core.types import PyTree
from optfn.mesh.collectives.axes import Axes, axis_size
from optfn.mesh.collectives.gathers import GatheredPackets
from optfn.mesh.compilers.groups import map_groups
from optfn.tables.rows import Rows


def mean_by_all_gather(
    compressors: Sequence[BaseCompressor], leaves: Sequence[LeafInExchange], axis_name: Axes
) -> list[LeafInExchange]:
    """Encode the leaves, gather the packets of all workers, and return leaves with their mean, as
    Rows where `direction` is Rows, the unsent residual and the next state.

    Args:
      compressors: the compressor of each leaf.
      leaves: the leaves of one worker.
      axis_name: the mesh axis, or axes, of the workers; it must be bound.
    """
    xs = [leaf.residual for leaf in leaves]
    encoded = encode_all(compressors, xs, [leaf.state for leaf in leaves])
    packets, states = zip(*encoded, strict=True)
    residuals = list(map(lambda c, x, packet: c.add_to(x, packet, -1.0), compressors, xs, packets))
    gathered = GatheredPackets.of(packets, axis_name)
    # The means that are arrays: packets are added to these zeros. Means as Rows need all packets.
    zeros = {i: x.direction for i, x in enumerate(leaves) if not isinstance(x.direction, Rows)}

    def add(totals: list[jax.Array], packets: PyTree, scale: float) -> list[jax.Array]:
        """Add each packet to the total of its leaf. Leaves whose mean is Rows have no total."""
        columns = zip(zeros, totals, strict=True)
        return [compressors[i].add_to(total, packets[i], scale) for i, total in columns]

    means = gathered.mean(list(zeros.values()), add)
    directions: dict[int, jax.Array | Rows] = dict(zip(zeros, means, strict=True))
    if len(zeros) < len(leaves):
        # Only here are all packets held at once; totals of arrays take them one by one.
        packets_of_all = gathered.packets
        for i, leaf in enumerate(leaves):
            if i not in zeros:
                directions[i] = _mean_of_entries(compressors[i], packets_of_all[i], leaf.direction)
    kept = enumerate(zip(residuals, states, strict=True))
    return [LeafInExchange(directions[i], residual, state) for i, (residual, state) in kept]


def empty_rows(compressor: BaseCompressor, shape: tuple[int, ...], axis_name: Axes) -> Rows | None:
    """Return padding Rows with a place for each entry of all workers' packets of a leaf, or None if
    packets have no indices or an array costs less than to sort them."""
    size, number = math.prod(shape), compressor.num_entries(math.prod(shape))
    count = axis_size(axis_name) * (number or 0)
    if not count or count * _SORTED > size:
        return None
    return padding_rows(count, size, unique=True, view=shape)


def padding_rows(count: int, num_rows: int, **fields: Any) -> Rows:
    """Return `count` Rows of zeros that are all padding, because their index is `num_rows`, which
    no array has."""
    indices, values = jnp.full(count, num_rows, jnp.int32), jnp.zeros(count, jnp.float32)
    return Rows(indices, values, num_rows, **fields)


# To sort an entry takes as long as a pass of an update over so many elements.
_SORTED = 64


def _mean_of_entries(compressor: BaseCompressor, packets: PyTree, like: Rows) -> Rows:
    """Return the mean over workers as Rows of the shape of `like`. Repeated entries are merged into
    one, which has the bits of the dense mean."""
    indices, values = jax.vmap(lambda packet: compressor.entries(packet, like.num_rows))(packets)
    workers = indices.shape[0]
    indices, values = indices.reshape(-1).astype(jnp.int32), (1 / workers) * values.reshape(-1)
    return Rows(indices, values, like.num_rows, parts=workers, view=like.view).merge()


def encode_all(
    compressors: Sequence[BaseCompressor], xs: Sequence[jax.Array], states: Sequence[PyTree]
) -> list[tuple[PyTree, PyTree]]:
    """Return the packet and the next state of each leaf, in order, where leaves of equal
    compressors are encoded together by one call."""

    def encode(group: list[int]) -> list[tuple[PyTree, PyTree]]:
        compressor = compressors[group[0]]
        return compressor.encode_all([xs[i] for i in group], [states[i] for i in group])

    # One program for a group: to compile a search per leaf takes a minute for a large model.
    return map_groups(encode, range(len(xs)), lambda i: compressors[i])
