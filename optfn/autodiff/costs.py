"""What a function takes to be differentiated, read off its equations: FLOPs and bytes.

Bytes are those of what a compiler that fuses has to write to memory. Values that cheap elementwise
equations give to others of the kind are not: they are computed where they are read.
"""

import math
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import jax

from optfn.autodiff.equations import Equations, variables
from optfn.autodiff.pullback import floats, pullback
from optfn.autodiff.rotor import Piece

# What XLA computes again in each fusion that reads it, rather than write it to memory.
CHEAP = frozenset(
    {"abs", "add", "add_any", "and", "broadcast_in_dim", "ceil", "clamp", "convert_element_type"}
    | {"copy", "copy_p", "eq", "expand_dims", "floor", "ge", "gt", "integer_pow", "iota"}
    | {"is_finite", "le", "lt", "max", "min", "mul", "name", "ne", "neg", "not"}
    | {"one_minus_square", "or", "pad", "real", "reshape", "rev", "select_n", "sign", "slice"}
    | {"square", "squeeze", "stop_gradient", "sub", "transpose", "xor"}
)
# What it writes to memory, out of values that need not be there.
FUSED = CHEAP | frozenset(
    {"argmax", "argmin", "atan2", "cbrt", "cos", "cumsum", "div", "erf", "erf_inv", "exp", "exp2"}
    | {"expm1", "log", "log1p", "logistic", "pow", "reduce_and", "reduce_max", "reduce_min"}
    | {"reduce_or", "reduce_prod", "reduce_sum", "rem", "rsqrt", "sin", "sqrt", "tan", "tanh"}
)


def piece_of(fn: Callable[[Any, Any], Any], params: Any, x: Any) -> tuple[Piece, Any]:
    """Return what `fn(params, x)` takes, and the shapes of its result.

    The arguments are arrays or shapes; nothing is computed.
    """
    structure: Any = None

    def run(params: Any, x: Any) -> tuple[Any, list[Any]]:
        nonlocal structure
        y, pull = pullback(lambda params, x, _: fn(params, x), params, x, None)
        leaves, structure = jax.tree.flatten(pull)
        return y, leaves

    def pull(leaves: list[Any], cotangent: list[Any]) -> tuple[list[Any], list[Any]]:
        return jax.tree.unflatten(structure, leaves)(cotangent)

    forward = Equations(run, params, x)
    y_atoms, residuals = jax.tree.unflatten(forward.structure, forward.outputs)
    y_leaves = jax.tree.leaves(y_atoms)
    # Shapes as eval_shape gives them know over which mesh axes they vary.
    y, leaves = jax.eval_shape(run, params, x)
    backward = Equations(pull, leaves, floats(y))
    inputs = {*forward.inputs, *forward.constants}
    read_back = _written(backward.equations, ())
    inside = zip(residuals, backward.inputs, strict=False)
    read_whole = [a for a, within in inside if within in read_back]
    written = _written(forward.equations, [*y_leaves, *read_whole])
    kept = _sources(forward, variables(residuals), written) - inputs
    outputs = set(variables(y_leaves)) - inputs
    for_y = forward.needed_for(y_leaves)
    weight_gradients = set(variables(jax.tree.unflatten(backward.structure, backward.outputs)[0]))
    piece = Piece(
        forward=_flops(for_y),
        again=_flops(forward.needed_for(residuals)),
        output=num_bytes(variables(y_leaves)),
        kept=num_bytes(kept - outputs),
        keeps_output=bool(outputs & kept),
        forward_peak=_peak(for_y, y_leaves),
        residual_peak=_peak(forward.equations, [*y_leaves, *kept]),
        # The gradients of the weights are results of the whole, not temporaries.
        backward_peak=_peak(
            backward.equations,
            backward.outputs,
            backward.inputs[len(residuals) :],
            weight_gradients,
        ),
    )
    return piece, y


def num_bytes(atoms: Iterable[Any]) -> int:
    """Return the bytes of the values of variables."""
    return sum(math.prod(a.aval.shape) * a.aval.dtype.itemsize for a in atoms)


def _written(equations: Iterable[Any], outputs: Iterable[Any]) -> set[Any]:
    """Return the variables that `equations` read from memory, or write to it."""
    written = set(variables(outputs))
    for equation in equations:
        if not _all_of(CHEAP, equation):
            written.update(equation.outvars)
        if not _all_of(FUSED, equation):
            written.update(variables(equation.invars))
    return written


def _all_of(kind: Collection[str], equation: Any) -> bool:
    if equation.primitive.name in ("custom_jvp_call", "jit", "pjit"):  # such as relu
        return all(_all_of(kind, e) for inner in _jaxprs(equation.params) for e in inner.eqns)
    return equation.primitive.name in kind


def _sources(program: Equations, atoms: Iterable[Any], written: set[Any]) -> set[Any]:
    """Return the written values and inputs from which fusions compute `atoms`."""
    wanted = set(atoms)
    for equation in reversed(program.equations):
        for made in wanted.intersection(equation.outvars) - written:
            wanted.remove(made)
            wanted.update(variables(equation.invars))
    return wanted


def _peak(
    equations: Sequence[Any],
    outputs: Iterable[Any],
    arriving: Iterable[Any] = (),
    free: Collection[Any] = (),
) -> int:
    """Return the bytes of what is alive at the worst of `equations`.

    Args:
      equations: run in this order.
      outputs: what lives until the end.
      arriving: variables that are alive at the start, until they have been read.
      free: variables that count nothing. Nor do those that no equation makes.
    """
    written = _written(equations, outputs)
    last = dict.fromkeys(variables(outputs), len(equations))
    for i, equation in reversed(list(enumerate(equations))):
        # A fusion reads what it reads when the value is written that it is part of.
        fused = not written.intersection(equation.outvars)
        end = max((last.get(a, i) for a in equation.outvars), default=i) if fused else i
        for a in variables(equation.invars):
            last[a] = max(last.get(a, i), end)
    alive = {a for a in arriving if a in last}
    peak = now = num_bytes(alive)
    for i, equation in enumerate(equations):
        made = [a for a in equation.outvars if a in written and a in last and a not in free]
        done = {a for a in alive if last[a] <= i}
        now += num_bytes(made)
        # An elementwise result takes the place of an operand that is not read again.
        in_place = _all_of(FUSED, equation) and num_bytes(made) in {num_bytes([a]) for a in done}
        peak = max(peak, now - in_place * num_bytes(made))
        now -= num_bytes(done)
        alive = (alive | set(made)) - done
    return peak


def _flops(equations: Iterable[Any]) -> float:
    """Return two for each multiplication and addition of matrices, one per element of the rest."""
    return sum(map(_flops_of, equations))


def _flops_of(equation: Any) -> float:
    name, params = equation.primitive.name, equation.params
    size = sum(math.prod(a.aval.shape) for a in equation.outvars)
    if name == "dot_general":
        (contracted, _), _ = params["dimension_numbers"]
        return 2.0 * size * math.prod(equation.invars[0].aval.shape[i] for i in contracted)
    if name == "conv_general_dilated":
        kernel = equation.invars[1].aval.shape
        features = kernel[params["dimension_numbers"].rhs_spec[0]]
        return 2.0 * size * math.prod(kernel) / features
    inner = [_flops(jaxpr.eqns) for jaxpr in _jaxprs(params)]
    if not inner:
        return 0.0 if name in ("name", "reshape", "broadcast_in_dim", "transpose") else float(size)
    if name == "cond":
        return max(inner)
    return sum(inner) * (params["length"] if name == "scan" else 1)


def _jaxprs(params: dict[str, Any]) -> list[Any]:
    """Return the jaxprs that an equation runs: bodies of loops, branches, calls."""
    found = []
    for value in params.values():
        for x in value if isinstance(value, list | tuple) else [value]:
            x = getattr(x, "jaxpr", x)
            if hasattr(x, "eqns"):
                found.append(x)
    return found
