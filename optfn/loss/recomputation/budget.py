"""The choice of segments within a memory budget: proposed by a table, checked by compiling."""

import functools
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from optfn.core.types import Leaf, Params, PyTree
from optfn.loss.jaxprs.equations import Equations, variables
from optfn.loss.jaxprs.pullback import Key, pullback, select_inexact_leaves
from optfn.loss.recomputation.chain import LayerFn, run_chain
from optfn.loss.recomputation.costs import estimate_costs, num_bytes
from optfn.loss.recomputation.rotor import Rotor, Segmentation
from optfn.mesh.compilers.groups import manual_axes

MAX_TRIALS = 6  # the most segmentations that are compiled to find one within a budget


class _MemoryUse(NamedTuple):
    """The memory that a gradient takes, in bytes."""

    num_bytes: int
    measured: bool  # whether these are the temporaries of the compiled gradient, or only residuals


def choose_segmentation(
    fns: Sequence[LayerFn], budget: int
) -> Callable[[Sequence[Params], PyTree], Segmentation]:
    """Return a function that finds the cheapest segmentation within the budget for its arguments,
    by compiling trials once for their shapes, or raises a ValueError if none fits."""
    cache: dict[Any, Segmentation] = {}

    def segmentation_of(params: Sequence[Params], x: PyTree) -> Segmentation:
        shapes = tuple((jnp.shape(a), jnp.result_type(a)) for a in jax.tree.leaves((params, x)))
        key = jax.tree.structure((params, x)), shapes
        if key not in cache:
            costs, y = [], x
            for fn, fn_params in zip(fns, params, strict=True):
                fn_costs, y = estimate_costs(fn, fn_params, y)
                costs.append(fn_costs)
            measure = partial(_measure_memory, fns, params, x)
            cache[key] = _find_segmentation(Rotor(costs), budget, measure)
        return cache[key]

    return segmentation_of


def _find_segmentation(
    rotor: Rotor, budget: int, measure: Callable[[Segmentation], _MemoryUse]
) -> Segmentation:
    """Return the cheapest segmentation found that takes at most `budget` bytes, or raise a
    ValueError with the bytes needed if none does."""
    best, needed = _bisect_with_feedback(rotor, budget, measure)
    # Near the minimum the errors of the table matter, and a cut after each function may be best.
    *before, last = range(len(rotor.costs))
    each = [*([i] for i in before), last]
    if best is None or rotor.extra_flops(best) > rotor.extra_flops(each):
        size, measured = measure(each)
        if measured and size <= budget:
            return each
        needed = min(needed, size) if measured else needed
    if best is None:
        raise ValueError(
            f"memory_budget must be at least {needed} bytes for this chain and batch; got {budget}"
        )
    return best


def _bisect_with_feedback(
    rotor: Rotor, budget: int, measure: Callable[[Segmentation], _MemoryUse]
) -> tuple[Segmentation | None, int]:
    """Return the first of at most `MAX_TRIALS` segmentations that measures at most `budget` bytes,
    and its bytes, or None and the bytes that are needed if all fail.

    This is a heuristic, since the table's prediction of the peak has an unknown error. The table
    predicts well by how much two segmentations differ, and less well how much each takes. Each
    trial asks the table for a segmentation within some budget, and measures it. If it exceeds the
    user's budget, the next trial asks for the larger of
      * the user's budget, corrected by the error of this prediction (predicted − measured), and
      * the midpoint of this prediction and the table's minimum. Otherwise a correction that
        overshoots would land at the minimum, where segmentations can cost many more FLOPs than just
        above it;
    but always for less than this prediction. If nothing can be measured and the prediction exceeds
    the budget, the next trial asks for the budget itself. The last trial asks for the minimum. If
    all trials fail, the returned bytes are those measured last, a budget that could be met.
    """
    needed, request = rotor.min_bytes, max(budget, 1.5 * rotor.min_bytes)
    for trial in range(MAX_TRIALS):
        request = rotor.min_bytes if trial == MAX_TRIALS - 1 else request
        segmentation, predicted = rotor.find_segmentation(request), rotor.predict_bytes(request)
        size, measured = measure(segmentation)
        if size <= budget and (measured or predicted <= budget):
            return segmentation, size
        needed = size if measured else max(rotor.min_bytes, size)
        if predicted <= rotor.min_bytes:
            break
        request = (predicted + rotor.min_bytes) / 2
        if measured:
            request = max(budget + predicted - size, request)
        elif predicted > budget:
            request = budget
        request = max(rotor.min_bytes, min(request, predicted - rotor.unit))
    return None, needed


def _measure_memory(
    fns: Sequence[LayerFn], params: Sequence[Params], x: PyTree, segmentation: Segmentation
) -> _MemoryUse:
    """Compile the gradient and return the bytes of its temporaries. If it cannot be compiled, or
    XLA undoes recomputation, trace it and return the bytes of its residuals.

    It cannot be compiled outside of its context if it has effects, as collectives do, or if mesh
    axes are bound.
    """

    def run(params: Sequence[Params], x: PyTree, _: Key) -> PyTree:
        return run_chain(segmentation, fns, params, x)

    def gradient(params: Sequence[Params], x: PyTree, cotangent: list[Leaf]) -> PyTree:
        y, pull = pullback(run, params, x, None)
        return y, pull(cotangent)[0]

    def residuals(params: Sequence[Params], x: PyTree) -> list[Leaf]:
        _, pull = pullback(run, params, x, None)
        return jax.tree.leaves(pull)

    shapes = jax.eval_shape(lambda *args: args, params, x)
    y = select_inexact_leaves(jax.eval_shape(partial(run_chain, segmentation, fns), *shapes))
    traced = jax.jit(gradient).trace(*shapes, y)
    # Collectives have a meaning only where their axis is bound, so effects rule out compiling.
    if traced.jaxpr.effects or manual_axes() or not is_recomputation_kept():
        program = Equations(residuals, *shapes)
        saved = set(variables(program.outputs)) - {*program.inputs}
        return _MemoryUse(num_bytes(saved), measured=False)
    # Here y and its cotangent are arguments and results. In the whole gradient they are
    # temporaries.
    boundary = sum(2 * a.size * a.dtype.itemsize for a in y if a.size > 1)
    return _MemoryUse(_temp_size(traced.lower().compile()) + boundary, measured=True)


def _temp_size(compiled: jax.stages.Compiled) -> int:
    """Return the bytes of temporaries of a compiled function."""
    analysis: Any = compiled.memory_analysis()
    return analysis.temp_size_in_bytes


@functools.cache
def is_recomputation_kept() -> bool:
    """Compile eight layers with and without recomputation, once for the process, and tell whether
    the default device's compiler takes less memory with it.

    On a CPU, jaxlib 0.10 merges a computation and its recomputation outside of loops, so that no
    memory is freed.
    """
    n = 8

    def temporaries(segmentation: Segmentation) -> int:
        fns = [lambda w, x: jnp.tanh(jnp.tanh(x @ w) @ w)] * n
        shape = jax.ShapeDtypeStruct((32, 32), jnp.float32)
        gradient = jax.grad(lambda w, x: jnp.sum(run_chain(segmentation, fns, w, x)))
        return _temp_size(jax.jit(gradient).lower([shape] * n, shape).compile())

    return temporaries([[i] for i in range(n)]) < 0.9 * temporaries(list(range(n)))
