"""Views of equations. JAX's names of primitives, and of their params, stand in this file alone.

Where JAX renames a primitive, or moves a param, its new form is added to the view here. A view
(`as_…`) has the params of an equation of one kind, and is None for an equation of another kind.

JAX 0.12 has the flags jax_remat3, jax_custom_jvp3 and jax_custom_vjp3: with them a checkpoint, a
name and a custom derivative are one primitive, whose param `_prim` tells them apart.
"""

import math
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias, TypeVar

import jax
import jax.extend.core as jex
import jax.numpy as jnp
from jax.lax import GatherScatterMode
from jax.sharding import NamedSharding

Variable: TypeAlias = jex.Var
Atom: TypeAlias = jex.Var | jex.Literal  # an input of an equation
Equation: TypeAlias = jex.JaxprEqn
Jaxpr: TypeAlias = jex.Jaxpr
T = TypeVar("T")

# JAX's scope for the equations that a checkpoint runs again in the backward pass.
RECOMPUTED = "rematted_computation"
# Since JAX 0.11.2 XLA ends the process for some orders of the axes of nested `shard_map`.
NESTS_AXES_IN_ANY_ORDER = jax.__version_info__ < (0, 11, 2)

_HIGH_PRIMITIVES = {
    "RematTraced": "checkpoint",
    "CheckpointName": "name",
    "CustomJVPTraced": "custom_jvp_call",
    "CustomVJPTraced": "custom_vjp_call",
}
_JITTED = ("jit", "pjit", "closed_call")
_CHECKPOINTS = ("checkpoint", "remat2")
# Primitives that run a function once on their operands.
_CALLS = (
    *(*_JITTED, "core_call", "composite", "shard_map", *_CHECKPOINTS),
    *("custom_jvp_call", "custom_vjp_call"),
)
# Kernels and library calls, whose products no equation shows.
_KERNELS = ("pallas_call", "ffi_call", "dot_product_attention", "scaled_matmul", "tpu_custom_call")
# Operations on one array that commute with a lookup: they treat each entry by itself, or do
# nothing.
_BY_ENTRY = ("convert_element_type", "reduce_precision", "copy", "copy_p", "stop_gradient")
# Operations on an array and literals that are the same on each layer of a stack.
_BY_LAYER = (*_BY_ENTRY, "neg", "mul", "add", "sub", "div")
_LOOKUPS = ("gather", "dynamic_slice", "slice")
_MOVES = ("name", "reshape", "broadcast_in_dim", "transpose")
# XLA does not write the results of these to memory, but computes them in each fusion that reads
# them.
_CHEAP = frozenset(
    {"abs", "add", "add_any", "and", "broadcast_in_dim", "ceil", "clamp", "convert_element_type"}
    | {"copy", "copy_p", "eq", "expand_dims", "floor", "ge", "gt", "integer_pow", "iota"}
    | {"is_finite", "le", "lt", "max", "min", "mul", "name", "ne", "neg", "not"}
    | {"one_minus_square", "or", "pad", "real", "reshape", "rev", "select_n", "sign", "slice"}
    | {"square", "squeeze", "stop_gradient", "sub", "transpose", "xor"}
)
# XLA writes the results of these to memory, but their operands need not be there.
_FUSED = _CHEAP | frozenset(
    {"argmax", "argmin", "atan2", "cbrt", "cos", "cumsum", "div", "erf", "erf_inv", "exp", "exp2"}
    | {"expm1", "log", "log1p", "logistic", "pow", "reduce_and", "reduce_max", "reduce_min"}
    | {"reduce_or", "reduce_prod", "reduce_sum", "rem", "rsqrt", "sin", "sqrt", "tan", "tanh"}
)
# Each entry of the result depends on the same entry of the operands, or on scalars.
_REDUCTIONS = frozenset(f"reduce_{x}" for x in ("and", "max", "min", "or", "prod", "sum"))
_BY_ELEMENT = (_FUSED - _REDUCTIONS).difference(
    {"argmax", "argmin", "broadcast_in_dim", "cumsum", "expand_dims", "iota", "pad", "reshape"},
    {"rev", "slice", "squeeze", "transpose"},
) | frozenset(
    {"bitcast_convert_type", "clz", "conj", "imag", "nextafter", "optimization_barrier", "pcast"}
    | {"population_count", "pvary", "reduce_precision", "round", "shift_left"}
    | {"shift_right_arithmetic", "shift_right_logical"}
)


def type_of(atom: Atom) -> Any:
    """Return the abstract value of an atom, which has its shape and dtype."""
    return atom.aval


def name_of(equation: Equation) -> str:
    """Return the name of an equation's primitive, the same with any flag of JAX."""
    high = type(equation.params.get("_prim")).__name__
    return _HIGH_PRIMITIVES.get(high, equation.primitive.name)


def _params_of(equation: Equation) -> Mapping[str, Any]:
    """Return the params of the primitive that `name_of` names, which some flags of JAX put inside
    an equation."""
    if name_of(equation) == equation.primitive.name:
        return equation.params
    params = equation.params["_prim"].params
    return params | {"call_jaxpr": params["traced"].jaxpr} if "traced" in params else params


# Functions inside of an equation.


def find_inner_jaxprs(equation: Equation) -> list[Jaxpr]:
    """Return the jaxprs that an equation runs, which are bodies of loops, branches and calls, or []
    if it runs none."""
    return list(jex.jaxprs_in_params(_params_of(equation)))


def walk(jaxpr: Jaxpr) -> Iterator[Equation]:
    """Yield each equation of a jaxpr, followed by the equations of the jaxprs that it runs, to any
    depth."""
    for equation in jaxpr.eqns:
        yield equation
        for inner in find_inner_jaxprs(equation):
            yield from walk(inner)


class Call(NamedTuple):
    """A function that runs once on the operands of an equation.

    body: its equations.
    constants: the values that the body takes before the operands.
    is_jitted: whether it is a jitted function; else a checkpoint or a custom derivative, for
      example.
    """

    body: Jaxpr
    constants: list[Any]
    is_jitted: bool


def drop_constants(program: Jaxpr | jex.ClosedJaxpr) -> Jaxpr:
    """Return the equations of a program, without the arrays that a closed one has beside them."""
    return program.jaxpr if isinstance(program, jex.ClosedJaxpr) else program


def as_call(equation: Equation) -> Call | None:
    """Return the function that an equation runs once on its operands, such as a jitted one or a
    checkpoint, or None."""
    name, params = name_of(equation), _params_of(equation)
    inner = params.get("jaxpr", params.get("call_jaxpr"))
    if name not in _CALLS or inner is None:
        return None
    return Call(drop_constants(inner), [*getattr(inner, "consts", ())], name in _JITTED)


class Checkpoint(NamedTuple):
    """A `jax.checkpoint`: its function, its policy, and whether XLA must not merge the equations
    that it repeats with the first ones."""

    body: Jaxpr
    policy: Callable[..., Any] | None
    prevent_cse: bool


def as_checkpoint(equation: Equation) -> Checkpoint | None:
    """Return the `jax.checkpoint` that an equation is, or None."""
    call = as_call(equation)
    if call is None or name_of(equation) not in _CHECKPOINTS:
        return None
    params = _params_of(equation)
    prevent_cse = params["prevent_cse"]
    # JAX 0.12 has one for each argument.
    is_prevented = any(prevent_cse) if isinstance(prevent_cse, tuple) else prevent_cse
    return Checkpoint(call.body, params["policy"], is_prevented)


def offloads(equation: Equation) -> bool:
    """Tell whether an equation is a `jax.checkpoint` that saves values in the memory of the host,
    by a policy of JAX."""
    checkpoint = as_checkpoint(equation)
    return checkpoint is not None and "offload" in getattr(checkpoint.policy, "__qualname__", "")


def name_of_value(equation: Equation) -> str | None:
    """Return the name that `checkpoint_name` gives a value, or None for another equation."""
    return _params_of(equation)["name"] if name_of(equation) == "name" else None


def is_composite(primitive: Any, params: Mapping[str, Any], name: str) -> bool:
    """Tell whether a primitive with these params, as a policy gets them, is the composite called
    `name`."""
    return bool(primitive.name == "composite" and params["name"] == name)


def is_recomputed(equation: Equation) -> bool:
    """Tell by its named scope whether a checkpoint runs an equation again in the backward pass."""
    return RECOMPUTED in str(equation.source_info.name_stack)


# Loops and branches.


class Scan(NamedTuple):
    """A scan: its body, and its numbers of constants and of carries, which come in this order."""

    body: jex.ClosedJaxpr
    num_constants: int
    num_carry: int
    length: int
    reverse: bool
    unroll: Any

    def split(self, operands: Sequence[T]) -> tuple[Sequence[T], Sequence[T], Sequence[T]]:
        """Return the constants, the carries and the elements among operands."""
        return _split(operands, self.num_constants, self.num_carry)

    @property
    def options(self) -> dict[str, Any]:
        """The arguments of `lax.scan` that are not arrays."""
        return {"length": self.length, "reverse": self.reverse, "unroll": self.unroll}


def as_scan(equation: Equation) -> Scan | None:
    """Return the scan that an equation is, or None, also for a scan whose params have an unknown
    form."""
    params = equation.params
    if equation.primitive.name != "scan":
        return None
    if "num_consts" in params:
        groups = params["num_consts"], params["num_carry"]
    elif "ft_in" in params:  # JAX 0.12: the operands as a tree of constants, carry and elements
        constants, carry, _ = params["ft_in"].unpack()
        groups = len(constants), len(carry)
    else:
        return None
    return Scan(params["jaxpr"], *groups, params["length"], params["reverse"], params["unroll"])


class While(NamedTuple):
    """A loop of an unknown number of turns.

    The operands are the constants of the condition, the constants of the body, and the carries.
    """

    condition: Jaxpr
    body: Jaxpr
    num_of_condition: int
    num_of_body: int

    def split(self, operands: Sequence[T]) -> tuple[Sequence[T], Sequence[T], Sequence[T]]:
        """Return the constants of the condition, the constants of the body, and the carries."""
        return _split(operands, self.num_of_condition, self.num_of_body)


def as_while(equation: Equation) -> While | None:
    """Return the while loop that an equation is, or None."""
    if equation.primitive.name != "while":
        return None
    params = equation.params
    bodies = params["cond_jaxpr"].jaxpr, params["body_jaxpr"].jaxpr
    return While(*bodies, params["cond_nconsts"], params["body_nconsts"])


def as_branches(equation: Equation) -> list[Jaxpr] | None:
    """Return the branches of a `lax.cond` or `lax.switch`, whose first operand is the index, or
    None."""
    if equation.primitive.name != "cond":
        return None
    return [branch.jaxpr for branch in equation.params["branches"]]


def as_platform_branch(equation: Equation, platform: str) -> Call | None:
    """Return the branch of a `lax.platform_dependent` for a platform, as a function of the operands
    behind the first, or None."""
    platforms = equation.params.get("branches_platforms")
    if equation.primitive.name != "cond" or platforms is None:
        return None
    chosen = [i for i, names in enumerate(platforms) if names and platform in names]
    branch = equation.params["branches"][chosen[0] if chosen else platforms.index(None)]
    return Call(branch.jaxpr, [*branch.consts], False)


def count_runs(equation: Equation) -> int:
    """Return how often the devices together run the functions inside of an equation: the length
    of a scan, the number of devices of a `shard_map`, else 1."""
    if equation.primitive.name == "scan":
        return int(equation.params["length"])
    return math.prod(find_bound_axes(equation).values())


def _split(
    operands: Sequence[T], first: int, second: int
) -> tuple[Sequence[T], Sequence[T], Sequence[T]]:
    """Return the first `first` operands, the `second` operands after them, and the remaining
    ones."""
    end = first + second
    return operands[:first], operands[first:end], operands[end:]


# Meshes.


def find_bound_axes(equation: Equation) -> dict[str, int]:
    """Return the axes that a `shard_map` binds, with their lengths, or {} for another equation."""
    if equation.primitive.name != "shard_map":
        return {}
    mesh, axes = equation.params["mesh"], equation.params["newly_manual_axes"]
    return {axis: mesh.shape[axis] for axis in axes}


class Constraint(NamedTuple):
    """A sharding constraint: its sharding, and whether it asks for a layout in memory too."""

    sharding: Any
    has_layout: bool


def as_constraint(equation: Equation) -> Constraint | None:
    """Return the sharding constraint that an equation is, or None."""
    if equation.primitive.name != "sharding_constraint":
        return None
    return Constraint(equation.params["sharding"], bool(equation.params["layout"]))


def has_sharding_as_type(equation: Equation) -> bool:
    """Tell whether an equation gives its result a sharding as a type, by a NamedSharding as
    `out_sharding`."""
    return isinstance(equation.params.get("out_sharding"), NamedSharding)


# Operations on one array.


def keeps_entries(equation: Equation) -> bool:
    """Tell whether an equation is a cast, a copy, a name or a stopped gradient, which commutes with
    a lookup of rows."""
    return name_of(equation) in (*_BY_ENTRY, "name")


def is_same_on_layers(equation: Equation) -> bool:
    """Tell whether an equation is a cast, a copy or plain arithmetic without a sharding, which with
    literals is the same on each layer of a stack."""
    return equation.primitive.name in _BY_LAYER and equation.params.get("sharding") is None


def stops_gradient(equation: Equation) -> bool:
    """Tell whether an equation stops the gradient of its operand."""
    return equation.primitive.name == "stop_gradient"


def as_cast(equation: Equation) -> Any:
    """Return the dtype that an equation casts its operand to, or None if it is no cast."""
    is_cast = equation.primitive.name == "convert_element_type"
    return equation.params["new_dtype"] if is_cast else None


def as_transpose(equation: Equation) -> tuple[int, ...] | None:
    """Return the order of the axes of a transpose, or None."""
    return equation.params["permutation"] if equation.primitive.name == "transpose" else None


def as_reshape(equation: Equation) -> tuple[int, ...] | None:
    """Return the new shape if an equation is a reshape, or None, also for a reshape that moves
    entries or has a sharding."""
    params = equation.params
    if equation.primitive.name != "reshape":
        return None
    is_plain = params["dimensions"] is None and params.get("sharding") is None
    return params["new_sizes"] if is_plain else None


def is_barrier(equation: Equation) -> bool:
    """Tell whether an equation is an `optimization_barrier`, which returns its operands unchanged
    and in the same order."""
    return equation.primitive.name == "optimization_barrier"


def draws_bits(equation: Equation) -> bool:
    """Tell whether an equation draws random bits."""
    return equation.primitive.name == "random_bits"


# Rows.


def as_row_rule(equation: Equation) -> tuple[bool, ...] | None:
    """Return for each operand of an equation whether row i of its results reads row i of it alone,
    with False for an operand that it reads whole; or None if a row depends on further rows.

    A row is an index of the first axis. With `cut_rows` such an equation runs on some rows.
    """
    name, params = name_of(equation), equation.params
    shapes, made = (
        [getattr(type_of(a), "shape", ()) for a in atoms]
        for atoms in (equation.invars, equation.outvars)
    )
    shape, has_sharding = made[0] if made else (), params.get("sharding") is not None
    if not shape or has_sharding or {*made} != {shape}:
        return None
    if name in _BY_ELEMENT:
        # An axis of length 1 stands for each length.
        pairs = [zip(x, shape, strict=False) for x in shapes]
        fits = all(len(x) in (0, len(shape)) for x in shapes)
        fits = fits and all(a in (1, b) for pair in pairs for a, b in pair)
        return tuple(x[:1] == shape[:1] for x in shapes) if fits else None
    if name == "iota":
        return ()
    if name == "broadcast_in_dim":
        kept = dict(zip(params["broadcast_dimensions"], range(len(shapes[0])), strict=True))
        if 0 not in kept or shapes[0][kept[0]] != shape[0]:
            return (False,)
        return (True,) if kept[0] == 0 else None
    if name in _REDUCTIONS or name == "squeeze":
        axes = params["dimensions"] if name == "squeeze" else params["axes"]
        return None if 0 in axes else (True,)
    if name == "reduce":  # of several arrays, and then their first values
        is_array = tuple(bool(x) for x in shapes)
        return None if 0 in params["dimensions"] else is_array
    if name == "reshape":
        keeps_rows = shapes[0][:1] == shape[:1] and params["dimensions"] is None
        return (True,) if keeps_rows else None
    return None


class Fold(NamedTuple):
    """A reduction of all rows: the operation that joins its results on two sets of rows, and its
    result on no rows."""

    join: Callable[[Any, Any], Any]
    first: Any


_FOLDS = {
    "reduce_sum": Fold(jnp.add, 0),
    "reduce_max": Fold(jnp.maximum, -math.inf),
    "reduce_or": Fold(jnp.logical_or, False),
    "reduce_and": Fold(jnp.logical_and, True),
}


def as_fold(equation: Equation) -> Fold | None:
    """Return the reduction of rows that an equation is, or None for another equation, and for a
    maximum of integers."""
    name = equation.primitive.name
    if name not in _FOLDS or 0 not in equation.params["axes"]:
        return None
    is_inexact = jnp.issubdtype(type_of(equation.outvars[0]).dtype, jnp.inexact)
    return _FOLDS[name] if is_inexact or name != "reduce_max" else None


def cut_rows(equation: Equation, rows: int) -> Equation:
    """Return an equation that has a row rule, for this count of rows."""
    of_shape = {"broadcast_in_dim": "shape", "reshape": "new_sizes", "iota": "shape"}
    name = of_shape.get(equation.primitive.name)
    if name is None:
        return equation
    return equation.replace(params=equation.params | {name: (rows, *equation.params[name][1:])})


def counts_rows(equation: Equation) -> bool:
    """Tell whether an equation returns the number of each row."""
    return equation.primitive.name == "iota" and equation.params["dimension"] == 0


def count_moved(equation: Equation) -> int:
    """Return the bytes that an equation moves between the memories of a device and of its host."""
    if equation.primitive.name != "device_put":
        return 0
    pairs = zip(map(type_of, equation.invars), map(type_of, equation.outvars), strict=True)
    spaces = [
        (a, getattr(a, "memory_space", None), getattr(b, "memory_space", None)) for a, b in pairs
    ]
    return sum(math.prod(a.shape) * a.dtype.itemsize for a, x, y in spaces if x != y)


def as_slice(equation: Equation) -> tuple[Any, Any, Any] | None:
    """Return the starts, ends and strides (or None) of a slice, or None for another equation."""
    names = "start_indices", "limit_indices", "strides"
    is_slice = equation.primitive.name == "slice"
    return operator.itemgetter(*names)(equation.params) if is_slice else None


# Lookups.


class RowLookup(NamedTuple):
    """A read of whole rows of an array, one for each index: a gather, or a slice for one index.

    mode: how indices out of range are read. Slices read the nearest row.
    fill: the value that the mode may fill in.
    start: the index, if it is a number; None if it is an operand.
    index_axes: the axes of the array that an index has a coordinate for; None for a slice.
    kept: the lengths of the axes of a row that the result keeps.
    offset_dims: the places of these axes in the result; None for a slice, which keeps all axes.
    """

    mode: Any
    fill: Any = None
    start: int | None = None
    index_axes: tuple[int, ...] | None = None
    kept: tuple[int, ...] = ()
    offset_dims: tuple[int, ...] | None = None


def as_row_lookup(equation: Equation) -> RowLookup | None:
    """Return the lookup if an equation reads whole rows of its first operand by a gather or a
    slice, or None."""
    name, params = equation.primitive.name, equation.params
    if not is_lookup(equation):
        return None
    shape = type_of(equation.invars[0]).shape
    one_row = (1, *shape[1:])
    if name == "slice":
        starts, ends = params["start_indices"], params["limit_indices"]
        sizes = tuple(end - start for start, end in zip(starts, ends, strict=True))
        is_row = sizes == one_row and set(params["strides"] or [1]) == {1}
        return RowLookup(GatherScatterMode.CLIP, start=starts[0]) if is_row else None
    if tuple(params["slice_sizes"]) != one_row:
        return None
    if name == "dynamic_slice":
        return RowLookup(GatherScatterMode.CLIP)
    numbers = params["dimension_numbers"]
    if 0 not in numbers.start_index_map or numbers.operand_batching_dims:
        return None
    kept = [n for d, n in enumerate(one_row) if d not in numbers.collapsed_slice_dims]
    return RowLookup(
        params["mode"], params["fill_value"], None, numbers.start_index_map, tuple(kept),
        numbers.offset_dims,
    )  # fmt: skip


def is_lookup(equation: Equation) -> bool:
    """Tell whether an equation is a gather or a slice, which reads parts of an array by indices,
    whole rows or not."""
    return equation.primitive.name in _LOOKUPS


def begins_product(equation: Equation) -> bool:
    """Tell whether an equation is a dense product of matrices, or a transpose, which may be the
    first step of one."""
    return equation.primitive.name in ("dot_general", "transpose")


# Products and fusions of XLA.


class Contraction(NamedTuple):
    """A product of matrices.

    summed: the dimensions of its left operand that are summed.
    groups: how many groups divide these dimensions, at least 1.
    summed_right: the summed dimensions of its right operand.
    batch: the dimensions of each operand that count products; they come first in the result.
    """

    summed: tuple[int, ...]
    groups: int = 1
    summed_right: tuple[int, ...] = ()
    batch: tuple[tuple[int, ...], tuple[int, ...]] = ((), ())


def as_product(equation: Equation) -> Contraction | None:
    """Return the product of matrices that an equation is, or None."""
    name, params = equation.primitive.name, equation.params
    if name == "dot_general":
        (summed, summed_right), batch = params["dimension_numbers"]
        return Contraction(summed, 1, summed_right, batch)
    if name == "ragged_dot_general":
        numbers = params["ragged_dot_dimension_numbers"]
        (summed, _), _ = numbers.dot_dimension_numbers
        # Groups along a summed dimension divide it: all groups have its length together.
        is_divided = set(numbers.lhs_ragged_dimensions) <= set(summed)
        return Contraction(summed, type_of(equation.outvars[0]).shape[0] if is_divided else 1)
    return None


class Window(NamedTuple):
    """A spatial dimension of a convolution: the lengths of input, result and kernel, its stride,
    the padding in front, and the distances of two entries of the input and two of the kernel."""

    length: int
    result: int
    kernel: int
    stride: int
    low: int
    hole: int
    apart: int


class Convolution(NamedTuple):
    """A convolution: examples, features of the result, features of the kernel's input, windows."""

    examples: int
    features: int
    inputs: int
    windows: list[Window]


def as_convolution(equation: Equation) -> Convolution | None:
    """Return the convolution that an equation is, or None."""
    if equation.primitive.name != "conv_general_dilated":
        return None
    params = equation.params
    lhs, rhs = (type_of(x).shape for x in equation.invars)
    result = type_of(equation.outvars[0]).shape
    left, right, out = params["dimension_numbers"]
    dilations = params["lhs_dilation"], params["rhs_dilation"]
    settings = zip(params["window_strides"], params["padding"], *dilations, strict=True)
    windows = [
        Window(lhs[left[i]], result[out[i]], rhs[right[i]], stride, pad[0], hole, apart)
        for i, (stride, pad, hole, apart) in enumerate(settings, 2)
    ]
    return Convolution(result[out[0]], result[out[1]], rhs[right[1]], windows)


def is_kernel(equation: Equation) -> bool:
    """Tell whether an equation is a kernel or a library call, whose products are not known."""
    return name_of(equation).startswith(_KERNELS)


def moves_entries(equation: Equation) -> bool:
    """Tell whether an equation is a reshape, broadcast, transpose or name, which only moves the
    entries of an array or repeats them."""
    return name_of(equation) in _MOVES


def is_never_written(equation: Equation) -> bool:
    """Tell whether XLA computes the result of an equation in each fusion that reads it, as of a
    cheap elementwise one, and does not write it to memory."""
    return _has_only(_CHEAP, equation)


def reads_within_fusion(equation: Equation) -> bool:
    """Tell whether the operands of an equation need no memory, because XLA fuses it: an elementwise
    equation or a reduction."""
    return _has_only(_FUSED, equation)


def _has_only(names: frozenset[str], equation: Equation) -> bool:
    """Tell whether an equation has one of these names, or, for a jitted function or a custom JVP,
    whether all equations inside have."""
    if name_of(equation) in ("custom_jvp_call", "jit", "pjit"):  # such as relu
        inner = find_inner_jaxprs(equation)
        return all(_has_only(names, e) for jaxpr in inner for e in jaxpr.eqns)
    return name_of(equation) in names


# Collectives.


class CollectiveCall(NamedTuple):
    """A collective of the devices along some axes.

    axes: the names of the mesh axes.
    group: how many devices are in a group, if it is not all along the axes; else None.
    way: "all-reduce", "all-gather", "scatter" (each device sends each a share, as reduce-scatter
      and all-to-all do) or "permute".
    num_bytes: the bytes of each operand; result i is made of operand i.
    """

    axes: tuple[str, ...]
    group: int | None
    way: str
    num_bytes: list[int]

    def count_sent(self, devices: int, needed: Sequence[bool]) -> float:
        """Return the bytes that each of `devices` devices sends in a ring for the results that are
        needed, which depend on the way of the collective."""
        size = sum(n for n, is_needed in zip(self.num_bytes, needed, strict=True) if is_needed)
        share = (devices - 1) / devices * size
        return {
            "all-reduce": 2 * share,
            "all-gather": devices * share,
            "scatter": share,
            "permute": float(size),
        }[self.way]


_COLLECTIVES = {
    **dict.fromkeys(("psum", "psum2", "psum_invariant", "pmax", "pmin"), "all-reduce"),
    **dict.fromkeys(("all_gather", "all_gather_invariant", "pgather"), "all-gather"),
    **dict.fromkeys(("reduce_scatter", "psum_scatter", "all_to_all"), "scatter"),
    "ppermute": "permute",
}


def as_collective(equation: Equation) -> CollectiveCall | None:
    """Return the collective that an equation is, or None."""
    way, params = _COLLECTIVES.get(equation.primitive.name), equation.params
    if way is None:
        return None
    named = params["axes"] if "axes" in params else params["axis_name"]
    axes = named if isinstance(named, tuple) else (named,)
    groups = params.get("axis_index_groups")
    num_bytes = [math.prod(type_of(a).shape) * type_of(a).dtype.itemsize for a in equation.invars]
    names = tuple(axis for axis in axes if isinstance(axis, str))
    return CollectiveCall(names, len(groups[0]) if groups else None, way, num_bytes)


def has_side_effects(equation: Equation) -> bool:
    """Tell whether an equation does more than return results, such as print, where to read the name
    of a bound axis does not count."""
    # JAX marks equations that read the name of a bound axis too.
    return any(type(effect).__name__ != "NamedAxisEffect" for effect in equation.effects)
