"""Expressions for particular XLA backends.

Each docstring names the compiler behaviour that it works around. XLA on CPU makes a pass over
memory for each array that a program writes, and keeps an array that two passes read. The compilers
of TPUs and GPUs put several results and reductions into one kernel, and compute an array again for
each kernel that reads it. There a loop is slow, and so is a view in rows of another length.
"""

import functools
import itertools
import math
import operator
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from optfn.core import tree
from optfn.core.numerics import abs_squared, promote, sqrt
from optfn.core.types import Leaf, PyTree
from optfn.mesh.compilers.groups import manual_axes, map_groups, varying_axes

T = TypeVar("T")

# Platforms that get the expression for CPUs. Tests set () to run another expression on a CPU, and
# ("cpu",) for the platforms whose expression they run.
CPU_PLATFORMS: tuple[str, ...] = ("cpu",)
TPU_PLATFORMS: tuple[str, ...] = ("tpu",)
GPU_PLATFORMS: tuple[str, ...] = ("cuda", "rocm")


def call_for_platform(
    cpu: Callable[..., Any],
    plain: Callable[..., Any],
    *arguments: Any,
    tpu: Callable[..., Any] | None = None,
    gpu: Callable[..., Any] | None = None,
) -> Any:
    """Return cpu(*arguments) in a program for a CPU, the result of `tpu` or `gpu` in one for a TPU
    or GPU if they are given, and else plain(*arguments).

    All are traced, so a jaxpr has a cond of them, and they give trees of the same shapes and
    dtypes. Lowering for a platform drops the branches that it does not run.
    """
    branches = dict.fromkeys(CPU_PLATFORMS, cpu)
    for platforms, fn in ((TPU_PLATFORMS, tpu), (GPU_PLATFORMS, gpu)):
        if fn is not None:
            branches |= dict.fromkeys(platforms, fn)
    return lax.platform_dependent(*arguments, default=plain, **branches)


LANES, LONG_ROW = 8, 256


def row_norms(x: jax.Array) -> jax.Array:
    """Return the L2 norms of x[0], x[1], …, over all their axes, shape (len(x),)."""
    length = math.prod(x.shape[1:])
    squares = abs_squared(x)
    in_lanes = length >= LONG_ROW and length % LANES == 0
    return sqrt(call_for_platform(_sums_by_lanes if in_lanes else _sums, _sums, squares))


def _sums(x: jax.Array) -> jax.Array:
    """Return the sum of each row of x, (len(x),)."""
    return jnp.sum(x, axis=range(1, x.ndim))


def _sums_by_lanes(x: jax.Array) -> jax.Array:
    """Return the sum of each row of x ≥ 0, whose length must be a multiple of 8, by first summing
    eight elements at a time.

    XLA on CPU does not vectorize an expression that it sums along a row. Sums of eight elements,
    kept in an array, take a half to a third of the time. The comparison is always false; it keeps
    XLA from merging the two sums.
    """
    eighths = x.reshape(len(x), -1, LANES)
    partial_sums = sum(eighths[:, :, i] for i in range(LANES))
    return _sums(jnp.where(partial_sums < 0, 0, partial_sums))


def divide(x: jax.Array, divisor: Any) -> jax.Array:
    """Return x/divisor, rounded once even if the divisor is broadcast, and NaN where x is NaN.

    XLA multiplies by the rounded reciprocal of a broadcast divisor, unless the divisor depends on
    x. So here it is x where x is NaN, and `divisor` elsewhere.
    """
    return x / jnp.where(jnp.isnan(x), x, divisor)


def reduce_rows(x: jax.Array, of_axis: Callable[..., jax.Array]) -> jax.Array:
    """Reduce each row of x, along its last axis, by `of_axis`, `jnp.sum` or `jnp.max`, on a CPU in
    two steps of eighths first if 64 divides its length.

    XLA on CPU does not vectorize a floating-point reduction along a row, and writes x to memory
    before it. So on a CPU the eighths of a row are first reduced elementwise, which vectorizes, if
    64 divides the length of a row.
    """

    def by_eighths(x: jax.Array) -> jax.Array:
        for _ in range(2 if x.shape[-1] % 64 == 0 else 0):
            x = of_axis(x.reshape(*x.shape[:-1], 8, -1), axis=-2)
        return of_axis(x, axis=-1)

    return call_for_platform(by_eighths, functools.partial(of_axis, axis=-1), x)


def pack_mask(mask: jax.Array) -> jax.Array:
    """Pack a mask into words along its last axis, uint32 (…, ⌈n/32⌉). Entry i is bit i mod 32 of
    its word, and the bits behind the end are 0.

    On a TPU, whose rows have 128 lanes, a view with 32 entries in its last axis takes four times
    the memory. There the words are products of the mask and powers of two; these are exact, since
    half a word is an integer of 16 bits.
    """
    return call_for_platform(_bits_by_shifts, _bits_by_products, mask)


def _bits_by_shifts(mask: jax.Array) -> jax.Array:
    """Return the words of `pack_mask` by shifts and sums, for a CPU.

    XLA on CPU does not vectorize the reduction of a padded array, so the tail alone is padded.
    """
    end = mask.shape[-1] // 32 * 32
    if missing := -mask.shape[-1] % 32:
        tail = jnp.pad(mask[..., end:], [(0, 0)] * (mask.ndim - 1) + [(0, missing)])
        return jnp.concatenate(list(map(_bits_by_shifts, (mask[..., :end], tail))), axis=-1)
    lanes = mask.reshape(-1, 32).astype(jnp.uint32) << np.arange(32, dtype=np.uint32)[None]
    return jnp.sum(lanes, axis=1, dtype=jnp.uint32).reshape(*mask.shape[:-1], end // 32)


def _bits_by_products(mask: jax.Array) -> jax.Array:
    """Return the words of `pack_mask` by products with a matrix of at most 4,096 rows, for a
    TPU."""
    lead, n = mask.shape[:-1], mask.shape[-1]
    width = min(4096, -(-n // 32) * 32)
    mask = jnp.pad(mask, [(0, 0)] * len(lead) + [(0, -n % width)]).reshape(*lead, -1, width)
    number = jnp.arange(width, dtype=jnp.int32)[:, None]
    # Column j has the low half of word j, and column j + width/32 the high half.
    half, word = jnp.divmod(jnp.arange(width // 16, dtype=jnp.int32), width // 32)
    # bfloat16 has powers of two exactly, and float32 their sums of 16 bits.
    power = (1 << number % 16).astype(jnp.bfloat16)
    powers = jnp.where(number // 16 == (2 * word + half)[None], power, 0)
    sums = jnp.matmul(mask.astype(jnp.bfloat16), powers, preferred_element_type=jnp.float32)
    low, high = jnp.split(sums.astype(jnp.uint32), 2, axis=-1)
    return (low | high << np.uint32(16)).reshape(*lead, -1)[..., : -(-n // 32)]


def any_nonfinite(arrays: Sequence[jax.Array]) -> jax.Array:
    """Tell whether any entry of the arrays is infinite or NaN, which is False if they have no
    entries.

    XLA on CPU makes a slow loop of each reduction to a scalar. So there one pass turns each array
    into bits, and one reduction takes the bits of all arrays.
    """

    def by_bits(arrays: list[jax.Array]) -> jax.Array:
        bits = [_bits_by_shifts(~jnp.isfinite(x.reshape(-1))) for x in arrays]
        return jnp.any(jnp.concatenate(bits) > 0)

    def by_largest(arrays: list[jax.Array]) -> jax.Array:
        # A maximum keeps NaN.
        largest = [jnp.max(jnp.abs(x)) for x in arrays]
        wide = promote(jnp.float32, *(x.dtype for x in largest))
        return ~jnp.all(jnp.isfinite(jnp.stack([x.astype(wide) for x in largest])))

    found = [x for x in arrays if x.size]
    return call_for_platform(by_bits, by_largest, found) if found else jnp.asarray(False)


def compute_once(flag: jax.Array) -> jax.Array:
    """Return the bool scalar `flag` unchanged, behind an operation that makes XLA on CPU compute it
    once, not again for each use.

    XLA on CPU takes the conjunction of N flags for cheap and fuses it into the update of each of N
    leaves: with 300 leaves the compiler takes minutes and gigabytes. It does not duplicate square
    roots, so the flag passes through one.
    """
    return jnp.sqrt(flag.astype(jnp.float32)) > 0


def hide_constant(value: Any) -> jax.Array:
    """Return a constant that XLA cannot fold, so that it keeps the code that depends on it.

    With a known value, XLA removes the branch of a cond that is never taken, and unrolls a loop of
    one iteration.
    """
    return lax.optimization_barrier(jnp.asarray(value))


def barrier(values: T, *first: jax.Array) -> T:
    """Return `values` unchanged, behind a barrier: XLA computes all of them, and `first`, before it
    reads any.

    Without a barrier XLA interleaves updates with a loss that reads the same arrays, and keeps
    copies of the arrays. All results of a barrier vary over the same mesh axes, so arrays that vary
    over different axes get separate barriers. A float0 passes through none.
    """

    def kind(x: Leaf) -> Any:
        return None if tree.is_float0(x) else varying_axes(x)

    def pass_group(group: list[Leaf]) -> list[Leaf]:
        if kind(group[0]) is None:
            return group
        return list(lax.optimization_barrier([*first, *group]))[len(first) :]

    leaves, structure = jax.tree.flatten(values)
    return jax.tree.unflatten(structure, map_groups(pass_group, leaves, kind))


def run_in_place(
    bodies: Sequence[Callable[[PyTree, PyTree], PyTree]],
    due: jax.Array,
    carry: PyTree,
    reads: Sequence[PyTree],
) -> PyTree:
    """Return the carry after body(carry, read) for each pair, if `due`, else the carry unchanged.

    Each body runs in a loop of one iteration. XLA updates the carry of a loop in place, and fuses
    no later code into the loop; a cond would write its results to new memory. XLA hoists code that
    does not depend on the carry out of a loop, so the counter passes the barrier of each iteration.
    """
    left = jnp.where(due, len(bodies), 0)  # carried from loop to loop, which orders them
    for i, (body, read) in enumerate(zip(bodies, reads, strict=True)):

        def once(state: PyTree, body: Callable[..., PyTree] = body, read: PyTree = read) -> PyTree:
            left, carry = state
            return _decrement(left), body(*barrier((carry, read), left))

        def is_next(state: PyTree, turn: int = len(bodies) - i) -> Any:
            return state[0] == turn

        left, carry = lax.while_loop(is_next, once, (left, carry))
    return carry


def _decrement(left: jax.Array) -> jax.Array:
    """Return left − 1, computed by a sort, so that XLA on CPU keeps the loop multi-threaded.

    From jaxlib 0.12 on, XLA on CPU runs a loop whose number of iterations it does not know on one
    core, however large the arrays are. A sort in the loop prevents that.
    """
    ascending: jax.Array = lax.sort(jnp.stack([left, left - 1]))
    return ascending[0]


def split(x: Leaf, sizes: Sequence[int]) -> list[Leaf]:
    """Split x along its last axis into consecutive pieces of `sizes`, on the host if it is a NumPy
    array.

    XLA on CPU compiles each static slice together with the code that reads it: about 8 ms for each
    distinct start, minutes for thousands. So there the starts are known only at run time, and all
    slices of one length share their code.
    """
    edges = list(itertools.accumulate(sizes, initial=0))
    if isinstance(x, np.ndarray):
        return np.split(x, edges[1:-1], axis=-1)

    def static(x: jax.Array) -> list[jax.Array]:
        return [lax.slice_in_dim(x, a, b, axis=-1) for a, b in itertools.pairwise(edges)]

    def dynamic(x: jax.Array) -> list[jax.Array]:
        # The second branch never runs; it keeps XLA from knowing the starts.
        starts = lax.cond(
            hide_constant(False),
            lambda: [jnp.int32(start + 1) for start in edges[:-1]],
            lambda: [jnp.int32(start) for start in edges[:-1]],
        )
        pairs = zip(starts, sizes, strict=True)
        return [lax.dynamic_slice_in_dim(x, start, size, axis=-1) for start, size in pairs]

    # A start beyond 2³¹ does not fit the int32 of a dynamic slice.
    if len(sizes) < 2 or x.shape[-1] >= 2**31:
        return static(x)
    return call_for_platform(dynamic, static, x)


def sum_arrays(*x: jax.Array) -> tuple[jax.Array, ...]:
    """Return the sum of each of several arrays of one shape, by one reduction.

    XLA on CPU first writes the arrays to memory for separate reductions: ten times as slow.
    """

    def add(a: Sequence[jax.Array], b: Sequence[jax.Array]) -> tuple[jax.Array, ...]:
        return tuple(map(operator.add, a, b))

    zeros = tuple(np.zeros((), array.dtype) for array in x)
    return tuple(lax.reduce(x, zeros, add, tuple(range(x[0].ndim))))


@jax.custom_jvp
def sum_each(*x: jax.Array) -> tuple[jax.Array, ...]:
    """Return the sum of each of several arrays of one shape, on a GPU by one reduction.

    XLA for GPUs puts separate reductions into the kernel that writes the new parameter, and then
    copies the parameter instead of writing it over the old one. On a TPU one reduction keeps a
    temporary array that separate ones do not.
    """

    def sum_apart(*x: jax.Array) -> tuple[jax.Array, ...]:
        return tuple(map(jnp.sum, x))

    if len(x) == 1:
        return sum_apart(*x)
    return call_for_platform(sum_apart, sum_apart, *x, gpu=sum_arrays)


@sum_each.defjvp
def _sum_each_jvp(
    x: tuple[jax.Array, ...], directions: tuple[jax.Array, ...]
) -> tuple[tuple[jax.Array, ...], tuple[jax.Array, ...]]:
    """Return the sums of `sum_each` and their derivatives as separate sums, because JAX has no
    derivative of one reduction to several numbers."""
    return sum_each(*x), tuple(map(jnp.sum, directions))


def progression(shape: tuple[int, ...], start: jax.Array, step: int) -> jax.Array:
    """Return start + step·k modulo 2³², uint32, for element k, in row-major order, of an array of
    `shape`, where `step` must be odd.

    A CPU adds a vector for the last axis to a vector for the leading axes, because XLA vectorizes a
    hash of such a sum. The vector for the last axis, mostly the longer one, has `start` in it:
    otherwise XLA would keep the vector in memory during a loop over steps. On another platform each
    vector would be a kernel, and one expression compiles in two thirds of the time.
    """
    *lead, length = shape or (1,)

    def of_vectors(start: jax.Array) -> jax.Array:
        others = lax.iota(jnp.uint32, math.prod(lead)) * np.uint32(length * step % 2**32)
        # step·step⁻¹ = 1 modulo 2³²: the product with `step` gives `start` back.
        last = lax.iota(jnp.uint32, length) + start * np.uint32(pow(step, -1, 2**32))
        return (others[:, None] + (last * np.uint32(step))[None]).reshape(shape)

    def of_numbers(start: jax.Array) -> jax.Array:
        number = jnp.zeros(shape, jnp.uint32)
        for axis in range(len(shape)):
            number = number * np.uint32(shape[axis] % 2**32)
            number += lax.broadcasted_iota(jnp.uint32, shape, axis)
        return number * np.uint32(step) + start

    return call_for_platform(of_vectors, of_numbers, start)


def round_to_bfloat16(x: jax.Array) -> jax.Array:
    """Round x to the precision of bfloat16, and return it in the dtype of x.

    XLA would drop two casts, there and back.
    """
    return lax.reduce_precision(x, exponent_bits=8, mantissa_bits=7)


def widen_for_all_reduce(x: jax.Array) -> jax.Array:
    """Cast x to float32 if it is bfloat16 and XLA on CPU would crash in an all-reduce of it, and
    return it unchanged otherwise.

    With jaxlib 0.10 to 0.12, an all-reduce of bfloat16 on CPU ends the process ("Invalid binary
    instruction opcode copy") inside a `shard_map` over some of the axes of a mesh.
    """
    mesh, bound = jax.sharding.get_abstract_mesh(), manual_axes()
    is_partial = bool(bound) and bound != set(mesh.axis_names)
    fails = is_partial and x.dtype == jnp.bfloat16 and mesh.abstract_device.platform == "cpu"
    return x.astype(jnp.float32) if fails else x
