"""Expressions written for XLA, each with the reason: a door to programs for CPUs, and hints.

XLA on CPU makes a pass over memory for each array that a program writes, and keeps in memory what
two of them read. The compilers of TPUs and GPUs make one kernel of several results and reductions,
and compute again what two kernels read; there a loop or a view in rows of another length costs.
"""

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from optfn.core import tree
from optfn.core.numerics import abs_squared
from optfn.core.types import Leaf, PyTree
from optfn.leaves.groups import map_groups, varying_axes

T = TypeVar("T")

# The platforms that are behind the door; none where a test runs the plain expressions on a CPU.
BEHIND_THE_DOOR = ("cpu",)


def on_cpu(
    cpu: Callable[..., Any],
    plain: Callable[..., Any],
    *arguments: Any,
    also: tuple[str, ...] = (),
) -> Any:
    """Return cpu(*arguments) in a program for a CPU, and plain(*arguments) in any other.

    Both are traced, so a jaxpr has a cond of both; lowered for one platform, nothing of the other
    is left. They give trees of the same shapes and dtypes. `also` names further platforms that are
    behind the door.
    """
    branches = dict.fromkeys((*BEHIND_THE_DOOR, *also), cpu)
    return lax.platform_dependent(*arguments, default=plain, **branches)


LANES, LONG_ROW = 8, 256


def row_norms(x: jax.Array) -> jax.Array:
    """Return the L2 norms of x[0], x[1], …, shape (len(x),)."""
    length = math.prod(x.shape[1:])
    squares = abs_squared(x)
    in_lanes = length >= LONG_ROW and length % LANES == 0
    return jnp.sqrt(on_cpu(_sums_by_lanes if in_lanes else _sums, _sums, squares))


def _sums(x: jax.Array) -> jax.Array:
    return jnp.sum(x, axis=range(1, x.ndim))


def _sums_by_lanes(x: jax.Array) -> jax.Array:
    """Return the sum of each row of x ≥ 0, of eight elements first.

    XLA on CPU does not vectorize an expression that it sums along a row. Partial sums of eight
    elements, an array of their size, take a half to a third of the time; the comparison, always
    false, keeps XLA from summing them in one operation.
    """
    eighths = x.reshape(len(x), -1, LANES)
    partial_sums = sum(eighths[:, :, i] for i in range(LANES))
    return _sums(jnp.where(partial_sums < 0, 0, partial_sums))


def computed_once(flag: jax.Array) -> jax.Array:
    """Return a bool scalar that XLA does not compute again in each of its uses.

    The conjunction of N flags is cheap to XLA's CPU fusion, so it is fused into the update of each
    of N leaves: with 300 leaves the compiler takes minutes and gigabytes. Square roots are not
    duplicated.
    """
    return jnp.sqrt(flag.astype(jnp.float32)) > 0


def hidden(value: Any) -> jax.Array:
    """Return a constant of which XLA does not know the value, so that it keeps what depends on it.

    It would remove the branch of a cond that is never taken, and unroll a loop of one iteration.
    """
    constant: jax.Array = lax.optimization_barrier(jnp.asarray(value))
    return constant


def barrier(values: T, *first: jax.Array) -> T:
    """Return the arrays of a tree, all of which, and `first`, XLA computes before one is read.

    It would compute updates in between a loss that reads the same arrays, and keep copies of them.
    There is one barrier for each set of mesh axes over which arrays vary, since all results of a
    barrier vary over the same axes.
    """

    def kind(x: Leaf) -> Any:
        return None if tree.is_float0(x) else varying_axes(x)

    def passed(group: list[Leaf]) -> list[Leaf]:
        if kind(group[0]) is None:
            return group
        return list(lax.optimization_barrier([*first, *group]))[len(first) :]

    leaves, structure = jax.tree.flatten(values)
    result: T = jax.tree.unflatten(structure, map_groups(passed, leaves, kind))
    return result


def loops_in_place(
    bodies: Sequence[Callable[[PyTree, PyTree], PyTree]],
    due: jax.Array,
    carry: PyTree,
    reads: Sequence[PyTree],
) -> PyTree:
    """Return the carry after each body(carry, read), each in a loop of one iteration, if `due`.

    XLA updates the carry of a loop in place, and fuses nothing after the loop into it; the results
    of a cond would be new memory. The counter passes the barrier of each iteration, or XLA would
    hoist what is invariant in the loop.
    """
    left = jnp.where(due, len(bodies), 0)  # carried from loop to loop, which orders them
    for i, (body, read) in enumerate(zip(bodies, reads, strict=True)):

        def once(state: PyTree, body: Callable[..., PyTree] = body, read: PyTree = read) -> PyTree:
            left, carry = state
            return _less_one(left), body(*barrier((carry, read), left))

        def is_next(state: PyTree, turn: int = len(bodies) - i) -> Any:
            return state[0] == turn

        left, carry = lax.while_loop(is_next, once, (left, carry))
    return carry


def _less_one(left: jax.Array) -> jax.Array:
    """Return left − 1, computed by a sort, so that XLA on CPU keeps the loop multi-threaded.

    From jaxlib 0.12 on, XLA on CPU runs a loop with an unknown number of iterations on one core,
    however large its arrays are, unless the loop has a sort in it.
    """
    ascending: jax.Array = lax.sort(jnp.stack([left, left - 1]))
    return ascending[0]


def split(x: Leaf, sizes: Sequence[int]) -> list[Leaf]:
    """Return consecutive pieces of x, along its last axis.

    XLA on CPU compiles each static slice together with the code that reads it, which takes about
    8 ms for each distinct start, and minutes for thousands. There the starts are known only at run
    time, so that all slices of the same length share one piece of code.
    """
    edges = list(itertools.accumulate(sizes, initial=0))
    if isinstance(x, np.ndarray):
        return np.split(x, edges[1:-1], axis=-1)

    def static(x: jax.Array) -> list[jax.Array]:
        return [lax.slice_in_dim(x, a, b, axis=-1) for a, b in itertools.pairwise(edges)]

    def dynamic(x: jax.Array) -> list[jax.Array]:
        starts = lax.cond(
            hidden(False),
            lambda: [jnp.int32(start + 1) for start in edges[:-1]],
            lambda: [jnp.int32(start) for start in edges[:-1]],
        )
        pairs = zip(starts, sizes, strict=True)
        return [lax.dynamic_slice_in_dim(x, start, size, axis=-1) for start, size in pairs]

    if len(sizes) < 2 or x.shape[-1] >= 2**31:
        return static(x)
    pieces: list[Leaf] = on_cpu(dynamic, static, x)
    return pieces


def sums(*x: jax.Array) -> tuple[jax.Array, ...]:
    """Return the sum of each of several arrays of one shape, by one reduction.

    For separate reductions XLA on CPU first writes the arrays to memory, which takes ten times as
    long.
    """

    def add(a: Sequence[jax.Array], b: Sequence[jax.Array]) -> tuple[jax.Array, ...]:
        return tuple(i + j for i, j in zip(a, b, strict=True))

    zeros = tuple(np.zeros((), array.dtype) for array in x)
    return tuple(lax.reduce(x, zeros, add, tuple(range(x[0].ndim))))


def rounded_to_bfloat16(x: jax.Array) -> jax.Array:
    """Return x rounded to bfloat16, in its dtype; XLA removes a cast to bfloat16 and back."""
    return lax.reduce_precision(x, exponent_bits=8, mantissa_bits=7)


def reducible(x: jax.Array) -> jax.Array:
    """Return x in a dtype that an all-reduce supports: bfloat16 as float32, if XLA would crash.

    With jaxlib 0.10 to 0.12, an all-reduce of bfloat16 on CPU ends the process ("Invalid binary
    instruction opcode copy") inside a `shard_map` over some of the axes of a mesh.
    """
    mesh = jax.sharding.get_abstract_mesh()
    is_partial = bool(mesh.manual_axes) and set(mesh.manual_axes) != set(mesh.axis_names)
    fails = is_partial and x.dtype == jnp.bfloat16 and mesh.abstract_device.platform == "cpu"
    return x.astype(jnp.float32) if fails else x
