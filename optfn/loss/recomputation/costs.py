"""The cost of differentiating a function, estimated from its equations: FLOPs and bytes.

The bytes are the bytes that a fusing compiler writes to memory. A value that a cheap elementwise
equation passes to another one is not written, but computed where it is read.
"""

import math
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import jax

from optfn.core.types import Leaf, Params, PyTree
from optfn.loss.jaxprs import flops, primitives
from optfn.loss.jaxprs.equations import Equations, variables
from optfn.loss.jaxprs.primitives import Atom, Equation, Variable
from optfn.loss.jaxprs.pullback import pullback, select_inexact_leaves
from optfn.loss.recomputation.rotor import FunctionCosts


def estimate_costs(
    fn: Callable[[Params, PyTree], PyTree], params: Params, x: PyTree
) -> tuple[FunctionCosts, PyTree]:
    """Return the FLOPs and bytes of `fn(params, x)` and of its backward pass, estimated from its
    equations without running it, and the shapes of its result.

    The arguments are arrays or shapes.
    """
    forward, backward, y = _trace_passes(fn, params, x)
    y_atoms, residuals = jax.tree.unflatten(forward.structure, forward.outputs)
    y_leaves = jax.tree.leaves(y_atoms)
    arguments = {*forward.inputs, *forward.constants}
    # Backward reads some residuals from memory, and computes the remaining ones within fusions.
    in_memory = _find_materialized(backward.equations, ())
    pairs = zip(residuals, backward.inputs, strict=False)
    read_from_memory = [a for a, in_backward in pairs if in_backward in in_memory]
    written = _find_materialized(forward.equations, [*y_leaves, *read_from_memory])
    saved = _find_sources(forward, variables(residuals), written) - arguments
    outputs = set(variables(y_leaves)) - arguments
    for_y = forward.find_equations(y_leaves)
    weight_gradients = set(variables(jax.tree.unflatten(backward.structure, backward.outputs)[0]))
    costs = FunctionCosts(
        forward_flops=flops.count_flops(for_y),
        recompute_flops=flops.count_flops(forward.find_equations(residuals)),
        output_bytes=num_bytes(variables(y_leaves)),
        residual_bytes=num_bytes(saved - outputs),
        output_is_residual=bool(outputs & saved),
        forward_peak=_peak_bytes(for_y, y_leaves),
        forward_peak_with_residuals=_peak_bytes(forward.equations, [*y_leaves, *saved]),
        # The gradients of the weights are results, not temporaries.
        backward_peak=_peak_bytes(
            backward.equations,
            backward.outputs,
            backward.inputs[len(residuals) :],
            weight_gradients,
        ),
    )
    return costs, y


def _trace_passes(
    fn: Callable[[Params, PyTree], PyTree], params: Params, x: PyTree
) -> tuple[Equations, Equations, PyTree]:
    """Trace the forward and the backward pass of `fn(params, x)` without running them, and return
    the equations of both and the shapes of the result.

    The forward pass gives (result, residuals); the backward pass takes the residuals, and then the
    cotangents of the result.
    """
    structure: Any = None

    def run(params: Params, x: PyTree) -> tuple[PyTree, list[Leaf]]:
        nonlocal structure
        y, pull = pullback(lambda params, x, _: fn(params, x), params, x, None)
        leaves, structure = jax.tree.flatten(pull)
        return y, leaves

    def pull(leaves: list[Leaf], cotangent: list[Leaf]) -> tuple[list[Leaf], list[Leaf]]:
        return jax.tree.unflatten(structure, leaves)(cotangent)

    forward = Equations(run, params, x)
    # Taken from eval_shape: its shapes also name the mesh axes that values vary along.
    y, leaves = jax.eval_shape(run, params, x)
    return forward, Equations(pull, leaves, select_inexact_leaves(y)), y


def num_bytes(atoms: Iterable[Atom]) -> int:
    """Return the total bytes of the values of `atoms`."""
    return sum(math.prod(t.shape) * t.dtype.itemsize for t in map(primitives.type_of, atoms))


def _find_materialized(equations: Iterable[Equation], outputs: Iterable[Atom]) -> set[Variable]:
    """Return the variables that XLA writes to memory, which are `outputs`, results of expensive
    equations, and operands of equations that do not fuse.

    Cheap elementwise results are fused away.
    """
    written = set(variables(outputs))
    for equation in equations:
        if not primitives.is_never_written(equation):
            written.update(equation.outvars)
        if not primitives.reads_within_fusion(equation):
            written.update(variables(equation.invars))
    return written


def _find_sources(
    program: Equations, targets: Iterable[Variable], written: set[Variable]
) -> set[Variable]:
    """Return the variables in `written`, and the inputs, that the fusions of `targets` read, where
    a target in `written` stands for itself."""
    sources = set(targets)
    for equation in reversed(program.equations):
        for computed in sources.intersection(equation.outvars) - written:
            sources.remove(computed)
            sources.update(variables(equation.invars))
    return sources


def _peak_bytes(
    equations: Sequence[Equation],
    outputs: Iterable[Atom],
    inputs: Iterable[Variable] = (),
    ignored: Collection[Variable] = (),
) -> int:
    """Return the most bytes of values that are alive at once while `equations` run, where fused
    values take none and a result may overwrite an operand.

    Args:
      equations: the equations, in the order of their run.
      outputs: variables that are alive until the end.
      inputs: variables that are alive from the start until they are last read.
      ignored: variables that take no memory here, like those that no equation computes.
    """
    written = _find_materialized(equations, outputs)
    last_read = dict.fromkeys(variables(outputs), len(equations))
    for i, equation in reversed(list(enumerate(equations))):
        # An equation inside a fusion reads its operands when the fusion's result is written.
        fused = not written.intersection(equation.outvars)
        end = max((last_read.get(a, i) for a in equation.outvars), default=i) if fused else i
        for a in variables(equation.invars):
            last_read[a] = max(last_read.get(a, i), end)
    alive = {a for a in inputs if a in last_read}
    peak = current = num_bytes(alive)
    for i, equation in enumerate(equations):
        results = [
            a for a in equation.outvars if a in written and a in last_read and a not in ignored
        ]
        freed = {a for a in alive if last_read[a] <= i}
        current += num_bytes(results)
        # An elementwise result overwrites an operand that is not read again.
        elementwise = primitives.reads_within_fusion(equation)
        in_place = elementwise and num_bytes(results) in {num_bytes([a]) for a in freed}
        peak = max(peak, current - num_bytes(results) if in_place else current)
        current -= num_bytes(freed)
        alive = (alive | set(results)) - freed
    return peak
