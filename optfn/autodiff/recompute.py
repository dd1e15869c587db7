"""Functions that keep fewer residuals for their backward, and compute the others again.

fluid's RecomputeOptimizer, as a transformation of the function: the values and the gradients are
the same, so any optimizer and any loop take it.
"""

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from optfn import checks
from optfn.autodiff.costs import num_bytes, piece_of
from optfn.autodiff.equations import Equations, read, variables
from optfn.autodiff.pullback import floats, pullback
from optfn.autodiff.rotor import Plan, Rotor, pieces_of
from optfn.leaves import tree

TRIALS = 6  # plans that are compiled at most to keep a budget


def recompute(
    fn: Callable[..., Any] | Sequence[Callable[..., Any]],
    *,
    checkpoints: Sequence[str] | None = None,
    segments: str | int | None = None,
    memory_budget: int | None = None,
) -> Callable[..., Any]:
    """Return a function with the values and gradients of `fn` that keeps fewer residuals.

    A function is cut at values that it has named:

        def model(params, x):
            for p in params:
                x = checkpoint_name(block(p, x), "block")       # of jax.ad_checkpoint
            return head(x)

        recompute(model, checkpoints=("block",))

    A chain of functions, f([params1, …, paramsn], x) = fn(paramsn, … f1(params1, x)), is cut
    between functions, into a number of segments or so that it fits into a memory.

    Between the cuts nothing is kept: in backward each segment is run again from the cut before it
    (`jax.checkpoint`). What else a segment makes and a later one reads is kept too. Where the
    result is one scalar, a loss, the part after the last cut is not run again: its backward
    follows at once.

    Args:
      fn: any function, traced as under jit, with `checkpoints`; or a list of functions
        (params, x) -> x with `segments` or `memory_budget`.
      checkpoints: names of values, each of which is kept wherever it occurs.
      segments: "sqrt", √n segments of like numbers of functions; "each", one for each function; or
        their number, 1 to n.
      memory_budget: bytes for the temporaries of the gradient, as
        `compiled.memory_analysis().temp_size_in_bytes` counts them. The plan with the fewest FLOPs
        is found by dynamic programming on the sizes of the residuals and the FLOPs of each
        function, when it is traced, and checked by compiling the gradient; segments may be nested.
        Let the last function be the loss, so that it is counted.

    Raises:
      ValueError: not one of the three options, a name that `fn` does not give (when it is called;
        the message lists those that it gives), a number of segments that the list does not have,
        a budget that cannot be kept (when it is called; the message has the least).
      TypeError: arguments of the wrong kind.

    Source: Chen, Xu, Zhang and Guestrin 2016, arXiv 1604.06174 (√n segments); Beaumont et al.
    2019, arXiv 1911.13214 (the budget: `optfn.autodiff.rotor`).

    >>> import jax, jax.numpy as jnp
    >>> deep = recompute([lambda p, x: jnp.sin(p * x)] * 9, segments="sqrt")
    >>> [round(float(g), 3) for g in jax.grad(deep)([1.0] * 9, 0.5)[:3]]
    [0.206, 0.225, 0.244]
    """
    options = {"checkpoints": checkpoints, "segments": segments, "memory_budget": memory_budget}
    given = [name for name, value in options.items() if value is not None]
    if len(given) != 1:
        raise ValueError(
            f"give one of checkpoints, segments and memory_budget; got "
            f"{' and '.join(given) or 'none'}"
        )
    if checkpoints is not None:
        return _cut_at_names(fn, checkpoints)
    fns = _functions(fn, given[0])
    if segments is not None:
        plan = _equal_segments(len(fns), segments)
        return _chain(fns, lambda params, x: plan)
    return _chain(fns, _budgeted(fns, checks.count("memory_budget", memory_budget)))


def _functions(fn: Any, option: str) -> tuple[Callable[[Any, Any], Any], ...]:
    if isinstance(fn, list | tuple) and fn and all(map(callable, fn)):
        return tuple(fn)
    raise TypeError(f"fn must be a list of functions (params, x) -> x with {option}; got {fn!r}")


def _cut_at_names(fn: Any, names: Any) -> Callable[..., Any]:
    if not callable(fn):
        raise TypeError(f"fn must be a function with checkpoints; got {fn!r}")
    if isinstance(names, str) or not all(isinstance(name, str) for name in names) or not names:
        raise TypeError(f"checkpoints must be a sequence of names; got {names!r}")
    names = tuple(names)

    @functools.wraps(fn)
    def recomputed(*args: Any, **kwargs: Any) -> Any:
        of_arrays, arrays = _of_arrays(fn, args, kwargs)
        program = Equations(of_arrays, arrays)
        _check_names(program, names)
        segments = _segments(program.equations, names)
        values = {**program.constants, **dict(zip(program.inputs, arrays, strict=True))}
        keeps_tail = _is_loss(program.outputs)
        for i, equations in enumerate(segments):
            later = {a for rest in segments[i + 1 :] for e in rest for a in variables(e.invars)}
            later.update(variables(program.outputs))
            made = [a for e in equations for a in e.outvars]
            out = [a for a in made if a in later]
            given = set(variables(a for e in equations for a in e.invars)).difference(made)
            ordered = [a for a in values if a in given]
            segment: Any = partial(_run, program, equations, ordered, out)
            if i < len(segments) - 1 or not keeps_tail:
                segment = jax.checkpoint(segment)
            values.update(zip(out, segment(read(values, ordered)), strict=True))
        return jax.tree.unflatten(program.structure, read(values, program.outputs))

    return recomputed


def _run(
    program: Equations, equations: list[Any], given: list[Any], out: list[Any], values: list[Any]
) -> list[Any]:
    return read(program.run(equations, dict(zip(given, values, strict=True))), out)


def _is_loss(results: Sequence[Any]) -> bool:
    return len(results) == 1 and results[0].aval.shape == ()


def _of_arrays(fn: Callable[..., Any], args: Any, kwargs: Any) -> tuple[Callable[..., Any], Any]:
    """Return `fn` as a function of the arrays among its arguments, and these.

    The others, such as flags and sizes, stay what they are.
    """
    leaves, structure = jax.tree.flatten((args, kwargs))
    is_array = [isinstance(x, jax.Array) for x in leaves]

    def of_arrays(arrays: list[Any]) -> Any:
        given = iter(arrays)
        pairs = zip(leaves, is_array, strict=True)
        whole = [next(given) if array else x for x, array in pairs]
        args, kwargs = jax.tree.unflatten(structure, whole)
        return fn(*args, **kwargs)

    return of_arrays, [x for x, array in zip(leaves, is_array, strict=True) if array]


def _name(equation: Any) -> str | None:
    return equation.params["name"] if equation.primitive.name == "name" else None


def _check_names(program: Equations, names: tuple[str, ...]) -> None:
    there = dict.fromkeys(n for n in map(_name, program.equations) if n is not None)
    for name in names:
        if name not in there:
            raise ValueError(
                f"checkpoints: the function names no value {name!r} (by "
                f"jax.ad_checkpoint.checkpoint_name, outside of loops, branches and custom "
                f"derivatives); it names {tree.listed(list(there)) or 'none'}"
            )


def _segments(equations: list[Any], names: tuple[str, ...]) -> list[list[Any]]:
    """Return the equations up to each named value, and those after the last.

    Leaves that were named together are one cut.
    """
    found: list[list[Any]] = [[]]
    for equation in equations:
        if _name(found[-1][-1]) in names if found[-1] else False:
            if _name(equation) in names:
                found[-1].append(equation)
                continue
            found.append([])
        found[-1].append(equation)
    return found


def _equal_segments(n: int, segments: Any) -> Plan:
    """Return the plan of `segments` segments of n functions, the first ones longer by up to one."""
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


def _chain(
    fns: Sequence[Callable[[Any, Any], Any]], plan_of: Callable[[Any, Any], Plan]
) -> Callable[[Any, Any], Any]:
    """Return f([params1, …, paramsn], x), run by the plan for its arguments."""

    def recomputed(params: Any, x: Any) -> Any:
        if not isinstance(params, list | tuple) or len(params) != len(fns):
            came = f"{len(params)}" if isinstance(params, list | tuple) else repr(params)
            raise ValueError(f"params must be a list of {len(fns)}, one per function; got {came}")
        plan = plan_of(params, x)
        if isinstance(plan[-1], list) and _is_loss_of(fns, params, x):
            plan = [*plan[:-1], *plan[-1]]
        return _follow(plan, fns, params, x)

    return recomputed


def _is_loss_of(fns: Sequence[Callable[[Any, Any], Any]], params: Any, x: Any) -> bool:
    whole = partial(_follow, list(range(len(fns))), fns)
    y = jax.tree.leaves(jax.eval_shape(whole, params, x))
    return len(y) == 1 and y[0].shape == ()


def _follow(plan: Plan, fns: Sequence[Callable[[Any, Any], Any]], params: Any, x: Any) -> Any:
    for entry in plan:
        if isinstance(entry, int):
            x = fns[entry](params[entry], x)
        else:
            own = {i: params[i] for i in pieces_of(entry)}
            of_arrays, arrays = _of_arrays(partial(_follow, entry, fns), (own, x), {})
            x = jax.checkpoint(of_arrays)(arrays)
    return x


def _budgeted(fns: Sequence[Callable[[Any, Any], Any]], budget: int) -> Callable[[Any, Any], Plan]:
    """Return the function that finds the plan for params and x; once for arguments of a shape."""
    plans: dict[Any, Plan] = {}

    def plan_of(params: Any, x: Any) -> Plan:
        shapes = tuple((jnp.shape(a), jnp.result_type(a)) for a in jax.tree.leaves((params, x)))
        key = jax.tree.structure((params, x)), shapes
        if key not in plans:
            pieces, y = [], x
            for fn, own in zip(fns, params, strict=True):
                piece, y = piece_of(fn, own, y)
                pieces.append(piece)
            plans[key] = _fitting(Rotor(pieces), budget, partial(_taken, fns, params, x))
        return plans[key]

    return plan_of


def _fitting(rotor: Rotor, budget: int, taken: Callable[[Plan], tuple[int, bool]]) -> Plan:
    """Return the best plan that takes at most `budget` bytes."""
    plan, needed = _search(rotor, budget, taken)
    # Near the least the error of the table counts, and a cut after each function may do better.
    *before, last = range(len(rotor.pieces))
    each = [*([i] for i in before), last]
    if plan is None or rotor.flops(plan) > rotor.flops(each):
        size, exact = taken(each)
        if exact and size <= budget:
            return each
        needed = min(needed, size) if exact else needed
    if plan is None:
        raise ValueError(
            f"memory_budget must be at least {needed} bytes for this chain and batch; got {budget}"
        )
    return plan


def _search(
    rotor: Rotor, budget: int, taken: Callable[[Plan], tuple[int, bool]]
) -> tuple[Plan | None, int]:
    """Return the best plan of the table that takes at most `budget` bytes, or the least it needs.

    The table knows well what a piece adds to the peak, and less well the peak itself. So what is
    asked of it is corrected by how far the plan before was off; by halves towards the least, whose
    plan may cost much more than one beside it.
    """
    needed, asked = rotor.least, max(budget, 1.5 * rotor.least)
    for trial in range(TRIALS):
        asked = rotor.least if trial == TRIALS - 1 else asked
        plan, expected = rotor.plan(asked), rotor.peak(asked)
        size, exact = taken(plan)
        if size <= budget and (exact or expected <= budget):
            return plan, size
        needed = size if exact else max(rotor.least, size)
        if expected <= rotor.least:
            break
        asked = (expected + rotor.least) / 2
        if exact:
            asked = max(budget + expected - size, asked)
        elif expected > budget:
            asked = budget
        asked = max(rotor.least, min(asked, expected - rotor.unit))
    return None, needed


def _taken(
    fns: Sequence[Callable[[Any, Any], Any]], params: Any, x: Any, plan: Plan
) -> tuple[int, bool]:
    """Return the bytes that the gradient takes by this plan, and whether they were measured.

    Where the compiler undoes recomputation, or the functions cannot be compiled where they stand,
    they are those of the residuals.
    """

    def gradient(params: Any, x: Any, cotangent: Any) -> Any:
        y, pull = pullback(lambda own, x, _: _follow(plan, fns, own, x), params, x, None)
        return y, pull(cotangent)[0]

    def residuals(params: Any, x: Any) -> Any:
        _, pull = pullback(lambda own, x, _: _follow(plan, fns, own, x), params, x, None)
        return jax.tree.leaves(pull)

    shapes = jax.eval_shape(lambda *args: args, params, x)
    y = floats(jax.eval_shape(partial(_follow, plan, fns), *shapes))
    traced = jax.jit(gradient).trace(*shapes, y)
    # A collective is an effect: it means something where its axis is bound only.
    if traced.jaxpr.effects or jax.sharding.get_abstract_mesh().manual_axes or not is_effective():
        program = Equations(residuals, *shapes)
        return num_bytes(set(variables(program.outputs)) - {*program.inputs}), False
    # What comes in and out here is made inside of the whole gradient.
    around = sum(2 * a.size * a.dtype.itemsize for a in y if a.size > 1)
    return _temp_size(traced.lower().compile()) + around, True


def _temp_size(compiled: Any) -> int:
    return compiled.memory_analysis().temp_size_in_bytes


@functools.cache
def is_effective() -> bool:
    """Tell whether the compiler of the default device leaves recomputation as it is.

    That of jaxlib 0.10 on a CPU joins what is computed again with the first time, outside of
    loops: nothing is freed.
    """
    n = 8

    def temporaries(plan: Plan) -> int:
        fns = [lambda w, x: jnp.tanh(jnp.tanh(x @ w) @ w)] * n
        shape = jax.ShapeDtypeStruct((32, 32), jnp.float32)
        gradient = jax.grad(lambda w, x: jnp.sum(_follow(plan, fns, w, x)))
        return _temp_size(jax.jit(gradient).lower([shape] * n, shape).compile())

    return temporaries([[i] for i in range(n)]) < 0.9 * temporaries(list(range(n)))
