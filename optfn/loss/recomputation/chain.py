"""A chain of functions, cut between them into segments that are recomputed."""

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TypeAlias

import jax

from optfn.core import checks
from optfn.core.types import Params, PyTree
from optfn.loss.jaxprs.equations import function_of_arrays
from optfn.loss.recomputation.rotor import Segmentation, list_functions

# One function of a chain, (params, x) -> x; and a chain, ([params1, …, paramsn], x) -> x.
LayerFn: TypeAlias = Callable[[Params, PyTree], PyTree]
ChainFn: TypeAlias = Callable[[Sequence[Params], PyTree], PyTree]


def recompute_chain(
    fns: Sequence[LayerFn], segmentation_of: Callable[[Sequence[Params], PyTree], Segmentation]
) -> ChainFn:
    """Return f([params1, …, paramsn], x), which runs the chain in the segments that
    `segmentation_of` chooses, but does not recompute a last segment that ends in a scalar."""

    def run_segments(params: Sequence[Params], x: PyTree) -> PyTree:
        if not isinstance(params, list | tuple) or len(params) != len(fns):
            got = f"{len(params)}" if isinstance(params, list | tuple) else repr(params)
            raise ValueError(
                f"params must be a list of length {len(fns)}, one per function; got {got}"
            )
        segmentation = segmentation_of(params, x)
        if isinstance(segmentation[-1], list) and _is_loss_chain(fns, params, x):
            # The backward of a loss follows at once, so to recompute its segment would free
            # nothing.
            segmentation = [*segmentation[:-1], *segmentation[-1]]
        return run_chain(segmentation, fns, params, x)

    return run_segments


def run_chain(
    segmentation: Segmentation,
    fns: Sequence[LayerFn],
    params: Sequence[Params] | Mapping[int, Params],
    x: PyTree,
) -> PyTree:
    """Run the functions of a segmentation in order, each nested list in a `jax.checkpoint`, which
    the backward pass recomputes, and return the last result.

    `params` is a list, or a dict by the indices of the functions.
    """
    for entry in segmentation:
        if isinstance(entry, int):
            x = fns[entry](params[entry], x)
        else:
            segment_params = {i: params[i] for i in list_functions(entry)}
            run = partial(run_chain, entry, fns)
            # jax.checkpoint takes arrays; flags and sizes are bound.
            call, arrays = function_of_arrays(run, (segment_params, x), {})
            x = jax.checkpoint(call)(arrays)
    return x


def _is_loss_chain(fns: Sequence[LayerFn], params: Sequence[Params], x: PyTree) -> bool:
    """Tell whether the chain returns a single scalar, from shapes alone, without running it."""
    run = partial(run_chain, list(range(len(fns))), fns)
    y = jax.tree.leaves(jax.eval_shape(run, params, x))
    return len(y) == 1 and y[0].shape == ()


def equal_segments(n: int, segments: str | int) -> Segmentation:
    """Divide n functions into √n, n or a given count of nearly equal segments, and raise a
    ValueError for another word or more segments than functions."""
    if isinstance(segments, str):
        if segments not in ("sqrt", "each"):
            raise ValueError(f"segments must be 'sqrt', 'each' or a number; got {segments!r}")
        count = n if segments == "each" else round(math.sqrt(n))
    else:
        count = checks.count("segments", segments)
    if count > n:
        raise ValueError(f"segments must be at most {n}, the number of functions; got {count}")
    edges = [-(-n * i // count) for i in range(count + 1)]
    return [list(range(a, b)) for a, b in itertools.pairwise(edges)]
