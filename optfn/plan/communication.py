"""Collectives as the text of a program has them: kind, bytes, devices, directions."""

import re
from typing import NamedTuple

import numpy as np

from optfn.plan.hlo import Instruction, read_arrays, read_integers

KINDS = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")
Group = tuple[int, ...]
Pairs = tuple[tuple[int, int], ...]
_MESH = re.compile(
    r"replica_groups=mesh\[([^\]]*)\]"
    r"(?:, device_ids=\(\[([\d,]+)\]T\(([\d,]+)\)\))? \{([^}]*)\}"
)


class Collective(NamedTuple):
    """A collective of some devices.

    num_bytes: of the whole array: the result of an all-gather, the operand of a reduce-scatter, and
      either of them otherwise.
    group: the devices of one group, by their places in the mesh.
    pairs: of a permutation, (from, to).
    is_one_ring: whether its algorithm is a ring in one dimension of the torus at a time.
    is_queued: whether a sparse core runs it, which runs one collective at a time.
    """

    kind: str
    num_bytes: float
    group: Group
    pairs: Pairs = ()
    is_one_ring: bool = False
    is_queued: bool = False

    @property
    def sent(self) -> float:
        """The bytes that a device sends in a ring: twice (n − 1)/n of the array for an all-reduce,
        all of it for a permutation, else (n − 1)/n."""
        n = len(self.group)
        if self.kind == "collective-permute":
            return self.num_bytes
        passes = 2 if self.kind == "all-reduce" else 1
        return passes * self.num_bytes * (n - 1) / n


def read_collective(
    x: Instruction, computation: str, num_partitions: int, settings: str = ""
) -> Collective:
    """Return the kind, bytes, devices and pairs of a collective, from its instruction, such as
    all-gather or all-gather-start.

    Args:
      x: the instruction.
      computation: the name of its computation.
      num_partitions: the number of all devices.
      settings: the compiler's settings of the instruction around it.
    """
    kind = x.opcode.removesuffix("-start")
    group = read_group(x) or tuple(range(num_partitions))
    num_bytes = sum(array.num_bytes for array in read_arrays(x.result))
    if kind == "reduce-scatter":
        num_bytes *= len(group)
    elif "all-reduce-scatter" in computation:  # a TPU's scatter: an all-reduce and a slice
        kind = "reduce-scatter"
    settings += x.attributes
    is_queued = '"sparse_core_config"' in settings
    return Collective(kind, num_bytes, group, read_pairs(x), _is_one_ring(settings), is_queued)


def _is_one_ring(settings: str) -> bool:
    """Tell whether a TPU's algorithm is a ring in one dimension of the torus at a time, by the
    count of its rings, or else by its name.

    A sparse core's program names a sequence of rings for each part of the array: two parts go in
    both directions of the same rings, four go along two dimensions in both orders. Where it names
    none, one ring is an assumption.
    """
    if parts := settings.count('"phase_rings"'):
        return parts <= 2
    one_ring = r'"emitter":"1D|"strategy":"StrategyRing"|"sparse_core_config"'
    return bool(re.search(one_ring, settings))


def read_pairs(x: Instruction) -> Pairs:
    """Return the pairs (from, to) of a permutation, or () if the instruction has none."""
    found = re.search(r"source_target_pairs=\{(.*?\})\}", x.attributes)
    pairs = re.findall(r"\{(\d+),(\d+)\}", found[1]) if found else []
    return tuple((int(a), int(b)) for a, b in pairs)


def read_group(x: Instruction) -> Group:
    """Return the devices of a collective's first group, () for an empty list that stands for all,
    or those connected with a permutation's first pair. Raise a ValueError for groups of another
    form.

    The forms are {{0,1},{2,3}};  [2,4]<=[8] or [4,2]<=[2,4]T(1,0), a permuted range;  and
    mesh['a'=2,'b'=4] {'b'}, groups along axes, also with devices in another order, as in
    mesh['a'=2,'b'=4], device_ids=([2,4]T(1,0)) {'b'}.
    """
    line = x.attributes
    if listed := re.search(r"replica_groups=\{\{([\d,]+)\}", line):
        return read_integers(listed[1])
    if ranged := re.search(r"replica_groups=\[(\d+),(\d+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", line):
        numbers = _number_devices(ranged[3], ranged[4])
        return tuple(numbers.reshape(int(ranged[1]), int(ranged[2]))[0].tolist())
    if along := _MESH.search(line):
        return _group_along_axes(*along.groups())
    if pairs := read_pairs(x):
        return _find_connected(pairs)
    if "replica_groups={}" in line:
        return ()
    raise ValueError(f"estimate_step: replica groups of another form in {x.name}: {line[:200]}")


def _group_along_axes(axes: str, shape: str | None, order: str | None, chosen: str) -> Group:
    """Return the first group of a collective along the `chosen` axes of a mesh.

    Args:
      axes: the names and sizes of all axes, "'x'=4, 'y'=2".
      shape: the sizes of the array of device numbers, "4,2"; None for the sizes of the axes.
      order: the permutation of its dimensions, "1,0"; None for none.
      chosen: the quoted names of the axes of the collective.
    """
    sizes = re.findall(r"'([^']+)'=(\d+)", axes)
    dims = ",".join(n for _, n in sizes)
    numbers = _number_devices(shape or dims, order).reshape(read_integers(dims))
    names = re.findall(r"'([^']+)'", chosen)
    first = tuple(slice(None) if name in names else 0 for name, _ in sizes)
    return tuple(numbers[first].ravel().tolist())


def _number_devices(shape: str, order: str | None) -> np.ndarray:
    """Return 0, 1, … in an array of `shape`, with its dimensions permuted by `order`, if given."""
    sizes = read_integers(shape)
    numbers = np.arange(int(np.prod(sizes))).reshape(sizes)
    return numbers.transpose(read_integers(order)) if order else numbers


def _find_connected(pairs: Pairs) -> Group:
    """Return the first pair's devices, and all devices that further pairs link to them."""
    found = set(pairs[0])
    # A pair from a device to itself, as in a partial permutation, links none.
    while more := [{*pair} for pair in pairs if found & {*pair} and not found >= {*pair}]:
        found.update(*more)
    return tuple(sorted(found))
