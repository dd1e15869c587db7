"""A checksum of arrays that does not depend on how they are sharded.

Each 32-bit word of an array is mixed with its position, and the results are summed modulo 2³². The
order of the sum does not matter, so each device can sum over its shard. A single changed word
always changes the sum. There are two such sums, so further changes go unnoticed with probability
2⁻⁶⁴.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from optfn.core import tree
from optfn.core.types import Leaf, PyTree
from optfn.mesh.collectives.axes import Axes, exclude_axes, join_axes
from optfn.mesh.collectives.mesh import is_on_several_cpus
from optfn.mesh.compilers import memories, xla

_GOLDEN = np.uint32(0x9E3779B1)
# Odd multipliers of the two sums, from MurmurHash3's finalizer.
_MULTIPLIERS = (np.uint32(0x85EBCA6B), np.uint32(0xC2B2AE35))


def fingerprint(x: jax.Array) -> jax.Array:
    """Return the checksum of an array, uint32 (2,), from its bits and their positions, which does
    not depend on how the array is sharded."""
    words = _bit_words(x)
    position = jnp.zeros(words.shape, jnp.uint32)
    stride = 1
    for axis in reversed(range(words.ndim)):
        count = jax.lax.broadcasted_iota(jnp.uint32, words.shape, axis)
        position += count * np.uint32(stride % 2**32)
        stride *= words.shape[axis]
    seeded = words ^ (position * _GOLDEN + _GOLDEN)
    mixed = []
    for multiplier in _MULTIPLIERS:
        m = (seeded ^ (seeded >> 16)) * multiplier
        m = (m ^ (m >> 13)) * _GOLDEN
        mixed.append(m ^ (m >> 16))
    return jnp.stack(xla.sum_arrays(*mixed))


def _bit_words(x: jax.Array) -> jax.Array:
    """Return the bits of an array, or of a key's data, as uint32, a word for each element of at
    most four bytes, and several along further axes for longer ones."""
    if tree.is_key(x):
        x = jax.random.key_data(x)
    if jnp.iscomplexobj(x):
        x = jnp.stack([x.real, x.imag], -1)
    if x.dtype == jnp.bool_:
        return x.astype(jnp.uint32)
    is_integer = jnp.issubdtype(x.dtype, jnp.integer)
    if (jnp.iinfo if is_integer else jnp.finfo)(x.dtype).bits < 8:  # int4, float4
        x = x.astype(jnp.int8 if is_integer else jnp.float32)
    # An element of eight bytes becomes two words.
    unsigned = {1: jnp.uint8, 2: jnp.uint16}.get(x.dtype.itemsize, jnp.uint32)
    return jax.lax.bitcast_convert_type(x, unsigned).astype(jnp.uint32)


_fingerprints = jax.jit(lambda leaves: jnp.stack([fingerprint(x) for x in leaves]))
_have_nonfinite = jax.jit(lambda leaves: jnp.stack([jnp.any(~jnp.isfinite(x)) for x in leaves]))


# The time to compile a program for all arrays grows with their number. Models have many arrays and
# few kinds, so we compile two programs for each kind: for 8 arrays, and for a single array.
_AT_A_TIME = 8
_IN_FLIGHT = 16  # Hundreds of programs that wait to communicate can block the devices of a CPU.


def fingerprints(leaves: Sequence[Leaf]) -> np.ndarray:
    """Compute the checksum of each array on the devices, wait for all, and return them on the host,
    uint32 (len(leaves), 2).

    In a run of several processes, all of them must call it.
    """
    return begin_fingerprints(leaves)()


def begin_fingerprints(leaves: Sequence[Leaf]) -> Callable[[], np.ndarray]:
    """Start to compute `fingerprints` on the devices, and return a function that waits for them and
    returns them on the host."""
    wait = _begin_program(_fingerprints, leaves)
    return lambda: np.reshape(np.asarray(wait(), np.uint32), (len(leaves), 2))


def begin_finite_check(leaves: Sequence[Leaf]) -> Callable[[], bool]:
    """Start to look for nonfinite values on the devices, and return a function that waits and tells
    whether all values are finite.

    In a run of several processes, all must call both functions, and all get the same answer.
    """
    wait = _begin_program(_have_nonfinite, leaves)
    return lambda: not any(wait())


def _begin_program(
    program: Callable[[list[jax.Array]], jax.Array], leaves: Sequence[Leaf]
) -> Callable[[], list[np.ndarray]]:
    """Start to compute a row of a program for each array, and return a function that waits for the
    rows and returns them in the order of the arrays."""
    arrays = [jnp.asarray(x) for x in leaves]
    # 1. Arrays of one shape, dtype and sharding share a program.
    kinds: dict[Any, list[int]] = {}
    for i, x in enumerate(arrays):
        kinds.setdefault((x.shape, x.dtype, x.sharding), []).append(i)
    # 2. Start the programs; the results stay on the devices.
    found: list[tuple[list[int], jax.Array]] = []
    for kind in kinds.values():
        while kind:
            # A device has room for one large array of the host, not for several.
            on_host = memories.is_on_host(arrays[kind[0]])
            some = kind[: _AT_A_TIME if len(kind) >= _AT_A_TIME and not on_host else 1]
            del kind[: len(some)]
            jax.block_until_ready([sums for _, sums in found[-1 if on_host else -_IN_FLIGHT :][:1]])
            found.append((some, program([memories.to_device(arrays[i]) for i in some])))
    if any(map(is_on_several_cpus, arrays)):
        # CPU devices share their threads: the next step may hold those that these wait for.
        jax.block_until_ready([sums for _, sums in found])

    def wait() -> list[np.ndarray]:
        rows: dict[int, np.ndarray] = {}
        for some, computed in found:
            rows |= zip(some, np.asarray(computed.addressable_data(0)), strict=True)
        return [rows[i] for i in sorted(rows)]

    return wait


def compare_replicas(state: PyTree, mesh: Mesh) -> None:
    """Raise a RuntimeError if the checksums of the copies of an array that several devices of a
    mesh hold differ, and skip arrays without copies on it.

        def compare(step, state, metrics):      # a callback of minimize or fit
            if step % 100 == 0:
                compare_replicas(state, mesh)

    Devices that begin with different params, or miss an update, diverge silently: each updates its
    copy. Each device sends a checksum of 8 bytes per array. A shard is compared along the axes of
    the mesh that do not divide its array. In a run of several processes, all must call it.

    Args:
      state: a TrainState, or another tree of arrays; those that are not on `mesh` are left out.
      mesh: the mesh of the step.

    Raises:
      RuntimeError: copies differ; the error names the first such leaf.
    """
    copied = []
    for name, x in tree.arrays_with_paths(state):
        lies = x.sharding if isinstance(x, jax.Array) else None
        if not isinstance(lies, NamedSharding) or lies.device_set != set(mesh.devices.flat):
            continue
        if _replica_axes(lies.spec, mesh):
            copied.append((name, x, lies.spec))
    # One program for all arrays on the devices, and one for each that is fetched from the host.
    fetched = [[x] for x in copied if memories.is_on_host(x[1])]
    for group in filter(None, [[x for x in copied if not memories.is_on_host(x[1])], *fetched]):
        names, arrays, specs = zip(*group, strict=True)
        arrays = tuple(map(memories.to_device, arrays))
        differ = np.asarray(_compare_copies(arrays, specs, mesh).addressable_data(0))
        if differ.any():
            raise RuntimeError(
                f"the copies of {names[differ.argmax()]!r} differ between the devices of the mesh: "
                "all devices must begin with the same params and get the same updates"
            )


def _replica_axes(spec: P, mesh: Mesh) -> Axes:
    """Return the mesh axes whose devices hold copies of a shard: the axes that its spec leaves
    out."""
    return exclude_axes(mesh.axis_names, join_axes(*spec))


@functools.partial(jax.jit, static_argnums=(1, 2))
def _compare_copies(arrays: tuple[jax.Array, ...], specs: tuple[P, ...], mesh: Mesh) -> jax.Array:
    """Return for each array 1 if the checksums of the copies of any of its shards differ, else 0,
    int32 (arrays,), the same on all devices."""

    def compare(*shards: jax.Array) -> jax.Array:
        groups: dict[Axes, list[int]] = {}
        for i, spec in enumerate(specs):
            groups.setdefault(_replica_axes(spec, mesh), []).append(i)
        differ = jnp.zeros(len(specs), jnp.int32)
        for axes, members in groups.items():
            sums = jnp.stack([fingerprint(shards[i]) for i in members])
            # Equal checksums: the least is the greatest along the axes of copies.
            same = lax.pmin(sums, axes) == lax.pmax(sums, axes)
            differ = differ.at[np.array(members)].set(jnp.any(~same, axis=1).astype(jnp.int32))
        return lax.pmax(differ, mesh.axis_names)

    run = jax.shard_map(compare, mesh=mesh, in_specs=specs, out_specs=P(), check_vma=False)
    return run(*arrays)
