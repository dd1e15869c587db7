"""One function, cut at the values that it names into segments that are recomputed."""

import functools
import itertools
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax

from optfn.core import checks, tree
from optfn.core.types import PyTree
from optfn.loss.jaxprs.equations import (
    Equations,
    Value,
    bindings,
    function_of_arrays,
    read,
    variables,
)
from optfn.loss.jaxprs.primitives import Equation, Variable, name_of_value, type_of
from optfn.mesh.compilers.memories import PINNED_HOST


def check_names(argument: str, names: Sequence[str]) -> tuple[str, ...]:
    """Return names of values as a tuple, or raise a TypeError unless they are a sequence of at
    least one string."""
    is_sequence = isinstance(names, Iterable) and not isinstance(names, str)
    if not is_sequence or not all(isinstance(name, str) for name in names) or not names:
        raise TypeError(f"{argument} must be a non-empty sequence of names; got {names!r}")
    return tuple(names)


def recompute_function(
    fn: Any, names: Sequence[str], argument: str = "checkpoints", *, offload: bool = False
) -> Callable[..., Any]:
    """Return `fn`, cut into segments after the values of these names, which the backward pass runs
    again, except a last segment that ends in a scalar, the loss.

    Args:
      fn: the function.
      names: names of values in it.
      argument: the name of the user's argument, for errors.
      offload: whether the values wait on the host, and all else is one segment.
    """
    checks.instance("fn", fn, Callable, f"a function with {argument}")
    names = check_names(argument, names)

    @functools.wraps(fn)
    def run_segments(*args: PyTree, **kwargs: PyTree) -> PyTree:
        # 1. The function as equations, cut after the named values.
        call, arrays = function_of_arrays(fn, args, kwargs)
        program = Equations(call, arrays)
        _check_names(program, names, argument)
        if offload:
            policy = jax.checkpoint_policies.save_and_offload_only_these_names(
                names_which_can_be_saved=[], names_which_can_be_offloaded=list(names),
                offload_src="device", offload_dst=PINNED_HOST,
            )  # fmt: skip
            return jax.checkpoint(call, policy=policy)(arrays)
        *segments, tail = _make_segments(program, names)
        # 2. Each segment under jax.checkpoint, fed with the values so far.
        values = program.constants | bindings(program.inputs, arrays)
        run_tail: Callable[..., Any] = partial(_run_segment, program, tail)
        # The backward of a loss follows at once, so its segment needs no recomputation.
        if [type_of(x).shape for x in program.outputs] != [()]:
            run_tail = jax.checkpoint(run_tail)
        for segment in segments:
            run = jax.checkpoint(partial(_run_segment, program, segment))
            values |= bindings(segment.outputs, run(read(values, segment.inputs)))
        values |= bindings(tail.outputs, run_tail(read(values, tail.inputs)))
        return jax.tree.unflatten(program.structure, read(values, program.outputs))

    return run_segments


class _Segment(NamedTuple):
    """Consecutive equations, the variables that they read, and those that later segments read."""

    equations: list[Equation]
    inputs: list[Variable]
    outputs: list[Variable]


def _make_segments(program: Equations, names: Sequence[str]) -> list[_Segment]:
    """Return the segments of a program cut after its named values, each with the variables that it
    reads, and the variables that later segments or the result read of it."""
    runs = _split_at_names(program.equations, names)
    available = [*program.constants, *program.inputs]
    segments = []
    for i, equations in enumerate(runs):
        following = itertools.chain(*runs[i + 1 :])
        later = set(variables(program.outputs)).union(*(variables(e.invars) for e in following))
        results = list(itertools.chain.from_iterable(e.outvars for e in equations))
        outputs = [a for a in results if a in later]
        # jax.checkpoint saves its arguments, so a segment gets only the values that it reads.
        operands = itertools.chain.from_iterable(e.invars for e in equations)
        reads = set(variables(operands)).difference(results)
        segments.append(_Segment(equations, [a for a in available if a in reads], outputs))
        # Results that no later segment reads are not passed on, so nothing keeps them.
        available += outputs
    return segments


def _run_segment(program: Equations, segment: _Segment, inputs: list[Value]) -> list[Value]:
    """Run the equations of a segment on its inputs, and return its outputs."""
    known = bindings(segment.inputs, inputs)
    return read(program.run(segment.equations, known), segment.outputs)


def _split_at_names(equations: Sequence[Equation], names: Sequence[str]) -> list[list[Equation]]:
    """Split equations after each value of these names, where consecutive names, as a tree's leaves
    have, make one cut, and names at the end make none."""
    runs: list[list[Equation]] = [[]]
    for equation in equations:
        after_name = bool(runs[-1]) and name_of_value(runs[-1][-1]) in names
        if after_name and name_of_value(equation) not in names:
            runs.append([])
        runs[-1].append(equation)
    return runs


def _check_names(program: Equations, names: Sequence[str], argument: str) -> None:
    """Raise a ValueError, which lists the names that values have, for a name that no value has
    outside of loops, branches and custom derivatives."""
    known = dict.fromkeys(n for n in map(name_of_value, program.equations) if n is not None)
    for name in names:
        if name not in known:
            raise ValueError(
                f"{argument}: no value of the function has the name {name!r}; names in it are "
                f"{tree.list_names(list(known)) or 'none'}. Name a value by "
                "jax.ad_checkpoint.checkpoint_name(x, name), outside of loops, branches and custom "
                "derivatives"
            )
