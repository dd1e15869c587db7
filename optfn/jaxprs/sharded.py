"""Run a program on params that are shards: which equation gathers which param.

A loss is traced for whole params, and its equations run on the shards that a device keeps:

1. An operation on a param and literals, such as a cast, waits until the param is gathered.
2. A scan over stacked params takes the shards of all layers, and its body gathers its layer.
3. A jitted function and a `jax.checkpoint` run in the same way, with their gathers inside.
4. Any other equation gathers the params that it reads.

The backward pass gathers a layer again, so that no device ever keeps all layers. All other values
are kept or recomputed as the loss says: an equation of a scan that reads a layer runs in a
`jax.checkpoint` that keeps all values but gathered ones, and a checkpoint in the loss runs with the
gathers inside and with the policy of its author. A scan whose layers are recomputed as a whole, as
those of `scan_layers`, has a backward pass of its own (`recomputed_scan.py`).
"""

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import jax
import jax.extend.core as jex
from jax import lax

from optfn.jaxprs.equations import (
    CHECKPOINTS,
    JITTED,
    Environment,
    Equation,
    Jaxpr,
    Value,
    Variable,
    bind,
    bindings,
    count_scan_groups,
    find_call_constants,
    find_called_jaxpr,
    find_inner_jaxprs,
    kind_of,
    options_of,
    read,
    run_equations,
    split_operands,
    variables,
    walk,
)
from optfn.jaxprs.recomputed_scan import Order, scan_recomputed
from optfn.jaxprs.sharded_param import (
    ELEMENTWISE,
    GATHERED,
    Operation,
    ShardedParam,
    gather_params,
)

# The name of the results of a `scan_layers` layer.
LAYER = "optfn.layer"


def run_on_shards(equation: Equation, *operands: Value) -> list[Value]:
    """Return the results of an equation; a result that waits for its param is a ShardedParam."""
    return _run_equation(equation, *operands, by_name=False)


def has_scan_over_arrays(equations: Iterable[Equation]) -> bool:
    """Tell whether some equation is a scan over arrays, which `run_on_shards` would find."""
    for equation in equations:
        inner = find_called_jaxpr(equation)
        if equation.primitive.name == "scan":
            groups = count_scan_groups(equation.params)
            if groups is not None and len(equation.invars) > sum(groups):
                return True
        is_entered = kind_of(equation) in (*JITTED, *CHECKPOINTS)
        if is_entered and inner is not None and has_scan_over_arrays(inner.eqns):
            return True
    return False


def _run_equation(equation: Equation, *operands: Value, by_name: bool) -> list[Value]:
    """Run an equation; ShardedParams enter its jaxpr or wait where they can, else are gathered.

    Args:
      equation: the equation.
      *operands: its operands, of which some may be ShardedParams.
      by_name: whether a checkpoint around the equation looks for gathered arrays by their name.
    """
    name = kind_of(equation)
    if not any(isinstance(x, ShardedParam) for x in operands):
        return bind(equation, *operands)
    if (waiting := _delay(equation, operands)) is not None:
        return [waiting]
    inner = find_called_jaxpr(equation)
    if name in JITTED and inner is not None:
        return _run_jaxpr(inner, [*find_call_constants(equation), *operands], by_name)
    if name in CHECKPOINTS:
        return _run_checkpoint(equation, operands)
    if name == "scan":
        return _run_scan(equation, operands, by_name)
    return bind(equation, *gather_params(operands, by_name))


def _delay(equation: Equation, operands: Sequence[Value]) -> ShardedParam | None:
    """Return a param with one more operation that waits; None if the equation needs its value."""
    is_known = equation.primitive.name in (*ELEMENTWISE, "reshape", "transpose")
    params = [x for a, x in zip(equation.invars, operands, strict=True) if isinstance(a, jex.Var)]
    if not is_known or len(params) != 1 or equation.params.get("sharding") is not None:
        return None
    (param,) = params
    operation = Operation(equation, equation.params)
    return dataclasses.replace(param, operations=(*param.operations, operation))


def _run_jaxpr(jaxpr: Jaxpr, operands: Sequence[Value], by_name: bool) -> list[Value]:
    """Return the results of a jaxpr, gathered; its constants and arguments may be ShardedParams."""
    values = bindings([*jaxpr.constvars, *jaxpr.invars], operands)
    values = run_equations(jaxpr.eqns, values, rule=partial(_run_equation, by_name=by_name))
    return gather_params(read(values, jaxpr.outvars), by_name)


def _run_checkpoint(equation: Equation, operands: Sequence[Value]) -> list[Value]:
    """Return the results of a `jax.checkpoint`, with its gathers inside."""
    options = options_of(equation)
    policy, prevent_cse = options["policy"], options["prevent_cse"]
    if isinstance(prevent_cse, tuple):  # JAX 0.12: one for each argument
        prevent_cse = any(prevent_cse)
    run = jax.checkpoint(
        partial(_run_jaxpr, options["jaxpr"], by_name=True),
        prevent_cse=prevent_cse,
        policy=None if policy is None else _without_gathered(policy),
    )
    results: list[Value] = run(operands)
    return results


def _run_scan(equation: Equation, operands: Sequence[Value], by_name: bool) -> list[Value]:
    """Return the results of a scan, whose body gathers its layer of each stack of shards."""
    options = equation.params
    groups, closed, length = count_scan_groups(options), options["jaxpr"], options["length"]
    if groups is None:
        return bind(equation, *gather_params(operands, by_name))
    constants, init, elements = split_operands(operands, groups)
    constants, init = gather_params(constants, by_name), gather_params(init, by_name)
    stacks: list[Value] = []
    for x in elements:
        stack = x.divide_within_layers(length) if isinstance(x, ShardedParam) else None
        stacks += gather_params([x], by_name) if stack is None else [stack]
    if not any(isinstance(x, ShardedParam) for x in stacks):
        return bind(equation, *constants, *init, *stacks)
    if not by_name and _is_recomputed(closed.jaxpr):
        run_layer = partial(_run_without_outer_call, closed.jaxpr)
        order = Order(length, options["reverse"], options["unroll"])
        return scan_recomputed(run_layer, [*closed.consts, *constants], init, stacks, order)

    def body(carry: list[Value], arrays: Sequence[Value]) -> tuple[list[Value], list[Value]]:
        pairs = zip(stacks, arrays, strict=True)
        layers = [x.layer(array) if isinstance(x, ShardedParam) else array for x, array in pairs]
        results = _run_body(closed.jaxpr, [*closed.consts, *constants, *carry, *layers])
        return results[: len(carry)], results[len(carry) :]

    arrays = [x.shard.array if isinstance(x, ShardedParam) else x for x in stacks]
    same = {name: options[name] for name in ("length", "reverse", "unroll")}
    carry, results = lax.scan(body, list(init), arrays, **same)
    return [*carry, *results]


def _is_recomputed(jaxpr: Jaxpr) -> bool:
    """Tell whether the backward pass recomputes all of a body from its inputs.

    It does so in a layer of `scan_layers`, and in a body that is one checkpoint without a policy.
    """
    names = [options_of(e)["name"] for e in jaxpr.eqns if kind_of(e) == "name"]
    calls = [e for e in jaxpr.eqns if kind_of(e) != "name"]
    if LAYER in names or len(calls) != 1:
        return LAYER in names
    inner = find_called_jaxpr(calls[0])
    if calls[0].primitive.name in JITTED and inner is not None:
        return _is_recomputed(inner)
    return kind_of(calls[0]) in CHECKPOINTS and options_of(calls[0])["policy"] is None


def _run_without_outer_call(jaxpr: Jaxpr, operands: Sequence[Value]) -> list[Value]:
    """Return the results of a jaxpr; of a checkpoint or jit that is all of it, those of its inside.

    The caller puts a checkpoint around it, in place of the one left out.
    """
    calls = [e for e in jaxpr.eqns if kind_of(e) != "name"]
    if len(calls) != 1 or kind_of(calls[0]) not in (*JITTED, *CHECKPOINTS):
        return _run_jaxpr(jaxpr, operands, by_name=False)
    (call,) = calls
    inner = find_called_jaxpr(call)
    assert inner is not None  # a jit or a checkpoint

    def run_inside(*arguments: Value) -> list[Value]:
        return _run_without_outer_call(inner, [*find_call_constants(call), *arguments])

    values = bindings([*jaxpr.constvars, *jaxpr.invars], operands)
    values = run_equations(jaxpr.eqns, values, {id(call): run_inside}, run_on_shards)
    return gather_params(read(values, jaxpr.outvars), by_name=False)


def _run_body(jaxpr: Jaxpr, operands: Sequence[Value]) -> list[Value]:
    """Return the results of a scan's body, which keeps no gathered layer for the backward pass.

    The equations between two checkpoints of the loss run together in a checkpoint that keeps all
    values but gathered ones; an outer checkpoint would override the policies of inner ones.
    """
    values = bindings([*jaxpr.constvars, *jaxpr.invars], operands)
    together: list[Equation] = []
    for i, equation in enumerate(jaxpr.eqns):
        delayed = _delay_in(equation, values)
        if delayed is not None:
            values[equation.outvars[0]] = delayed
        elif not _has_checkpoint(equation):
            together.append(equation)
        else:
            _run_together(together, jaxpr, jaxpr.eqns[i:], values)
            together = []
            values = run_equations([equation], values, rule=_run_with_checkpoint)
    _run_together(together, jaxpr, [], values)
    return gather_params(read(values, jaxpr.outvars), by_name=False)


def _run_with_checkpoint(equation: Equation, *operands: Value) -> list[Value]:
    """Return the results of an equation that has a checkpoint; a jitted function runs as a body."""
    inner = find_called_jaxpr(equation)
    if equation.primitive.name not in JITTED or inner is None:
        return run_on_shards(equation, *operands)
    return _run_body(inner, [*find_call_constants(equation), *operands])


def _delay_in(equation: Equation, values: Environment) -> ShardedParam | None:
    """Return `_delay` of an equation on these values; None if it reads other equations' results."""
    reads = variables(equation.invars)
    if len(reads) == 1 and isinstance(values.get(reads[0]), ShardedParam):
        return _delay(equation, read(values, equation.invars))
    return None


def _run_together(
    equations: Sequence[Equation], jaxpr: Jaxpr, later: Sequence[Equation], values: Environment
) -> None:
    """Add the results of equations to `values`, in a checkpoint that keeps all but gathered ones.

    Args:
      equations: equations without checkpoints.
      jaxpr: the body that they belong to.
      later: the equations after them.
      values: the values of the variables before them.
    """
    made = {a for e in equations for a in e.outvars}
    read_later = variables([*jaxpr.outvars, *(a for e in later for a in e.invars)])
    results: list[Variable] = [a for a in read_later if a in made]
    reads = [a for a in variables(a for e in equations for a in e.invars) if a in values]

    def run(operands: Sequence[Value]) -> list[Value]:
        rule = partial(_run_equation, by_name=True)
        return read(run_equations(equations, bindings(reads, operands), rule=rule), results)

    if any(isinstance(values[a], ShardedParam) for a in reads):
        run = jax.checkpoint(run, prevent_cse=False, policy=_without_gathered(_keep_all))
    values |= bindings(results, run(read(values, reads)))


def _has_checkpoint(equation: Equation) -> bool:
    """Tell whether an equation is a `jax.checkpoint`, or runs a function that has one."""
    inside = (e for jaxpr in find_inner_jaxprs(equation) for e in walk(jaxpr))
    return any(kind_of(e) in CHECKPOINTS for e in (equation, *inside))


def _keep_all(*args: object, **params: object) -> bool:
    """Return True: the policy of a checkpoint that keeps all values."""
    return True


def _without_gathered(policy: Callable[..., Any]) -> Callable[..., Any]:
    """Return a policy for a checkpoint that keeps what `policy` keeps, but no gathered array."""

    def keeps(primitive: Any, *args: Any, **params: Any) -> Any:
        is_gathered = primitive.name == "composite" and params["name"] == GATHERED
        return False if is_gathered else policy(primitive, *args, **params)

    return keeps
