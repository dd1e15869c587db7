"""Run a program on params that are shards: which equation gathers which param.

A loss is traced for whole params, and its equations run on the shards that a device keeps:

1. An operation on a param and literals, such as a cast, waits until the param is gathered.
2. A jitted function and a `jax.checkpoint` run in the same way, with their gathers inside.
3. A scan over stacked params takes the shards of all layers, and its body gathers its layer.
4. Each remaining equation gathers the params that it reads.

The backward pass gathers a layer again, so that no device ever keeps all layers. The remaining
values are kept or recomputed as the loss says: an equation of a scan that reads a layer runs in a
`jax.checkpoint` that keeps all values but gathered ones, and a checkpoint in the loss runs with the
gathers inside and with the policy of its author. `scan_layers` recomputes each layer as a whole,
and its scan has a special backward pass (`recomputed_scan.py`).
"""

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import jax
from jax import lax

from optfn.loss.jaxprs import primitives
from optfn.loss.jaxprs.equations import (
    Environment,
    Value,
    bind,
    bindings,
    read,
    run_equations,
    variables,
)
from optfn.loss.jaxprs.primitives import Call, Checkpoint, Equation, Jaxpr, Scan, Variable
from optfn.loss.jaxprs.recomputed_scan import Order, scan_recomputed
from optfn.loss.jaxprs.sharded_param import GATHERED, Operation, ShardedParam, gather_params

# The name of the results of a `scan_layers` layer.
LAYER = "optfn.layer"


def run_on_shards(equation: Equation, *operands: Value) -> list[Value]:
    """Run an equation, and return its results, a ShardedParam where an operation waits for its
    param to be gathered."""
    return _Interpreter(by_name=False).run_equation(equation, *operands)


def has_scan_over_arrays(equations: Iterable[Equation]) -> bool:
    """Tell whether some equation is a scan over arrays, also inside of jitted functions and
    checkpoints, which `run_on_shards` enters."""
    for equation in equations:
        scan = primitives.as_scan(equation)
        if scan is not None and scan.split(equation.invars)[2]:
            return True
        entered = _find_entered(equation)
        if entered is not None and has_scan_over_arrays(entered.body.eqns):
            return True
    return False


def _find_entered(equation: Equation) -> Call | None:
    """Return the call of a jitted function or of a checkpoint, or None for another equation."""
    call = primitives.as_call(equation)
    is_entered = call and (call.is_jitted or primitives.as_checkpoint(equation))
    return call if is_entered else None


@dataclasses.dataclass(frozen=True)
class _Interpreter:
    """Runs equations whose operands may be ShardedParams.

    by_name: whether a checkpoint around the equations looks for gathered arrays by their name.
    """

    by_name: bool

    def run(self, jaxpr: Jaxpr, operands: Sequence[Value]) -> list[Value]:
        """Run a jaxpr on its constants and arguments, and return its results, with each
        ShardedParam among them gathered."""
        values = bindings([*jaxpr.constvars, *jaxpr.invars], operands)
        values = run_equations(jaxpr.eqns, values, rule=self.run_equation)
        return self.gather(read(values, jaxpr.outvars))

    def gather(self, operands: Iterable[Value]) -> list[Value]:
        """Gather the whole value of each ShardedParam among the operands."""
        return gather_params(operands, self.by_name)

    def run_equation(self, equation: Equation, *operands: Value) -> list[Value]:
        """Run an equation as JAX does if no operand is a ShardedParam, else let it wait, enter the
        function inside of it, or gather its operands."""
        if not any(isinstance(x, ShardedParam) for x in operands):
            return bind(equation, *operands)
        if (waiting := _delay(equation, operands)) is not None:
            return [waiting]
        if (checkpoint := primitives.as_checkpoint(equation)) is not None:
            return _run_checkpoint(checkpoint, operands)
        if (scan := primitives.as_scan(equation)) is not None:
            return self._run_scan(equation, scan, operands)
        call = primitives.as_call(equation)
        if call is not None and call.is_jitted:
            return self.run(call.body, [*call.constants, *operands])
        return bind(equation, *self.gather(operands))

    def _run_scan(self, equation: Equation, scan: Scan, operands: Sequence[Value]) -> list[Value]:
        """Run a scan whose body gathers its layer of each stack that is divided within layers, and
        gather the remaining sharded operands whole before it."""
        constants, init, elements = scan.split(operands)
        constants, init = self.gather(constants), self.gather(init)
        stacks: list[Value] = []
        for x in elements:
            stack = x.divide_within_layers(scan.length) if isinstance(x, ShardedParam) else None
            stacks += self.gather([x]) if stack is None else [stack]
        if not any(isinstance(x, ShardedParam) for x in stacks):
            return bind(equation, *constants, *init, *stacks)
        jaxpr, constants = scan.body.jaxpr, [*scan.body.consts, *constants]
        if not self.by_name and _is_recomputed(jaxpr):
            run_layer = partial(_run_without_outer_call, jaxpr)
            return scan_recomputed(run_layer, constants, init, stacks, Order(**scan.options))

        def body(carry: list[Value], arrays: Sequence[Value]) -> tuple[list[Value], list[Value]]:
            pairs = zip(stacks, arrays, strict=True)
            layers = [
                x.layer(array) if isinstance(x, ShardedParam) else array for x, array in pairs
            ]
            results = _BodyInterpreter(by_name=False).run(jaxpr, [*constants, *carry, *layers])
            return results[: len(carry)], results[len(carry) :]

        arrays = [x.shard.array if isinstance(x, ShardedParam) else x for x in stacks]
        carry, results = lax.scan(body, list(init), arrays, **scan.options)
        return [*carry, *results]


class _BodyInterpreter(_Interpreter):
    """Runs the body of a scan, so that the backward pass is left no gathered layer.

    The equations between two checkpoints of the loss run together in a checkpoint that keeps all
    values but gathered ones; an outer checkpoint would override the policies of inner ones.
    """

    def run(self, jaxpr: Jaxpr, operands: Sequence[Value]) -> list[Value]:
        """Run the body of a scan, and return its results, gathered."""
        values = bindings([*jaxpr.constvars, *jaxpr.invars], operands)
        together: list[Equation] = []
        for i, equation in enumerate(jaxpr.eqns):
            if (delayed := _delay_first(equation, values)) is not None:
                values[equation.outvars[0]] = delayed
            elif not _has_checkpoint(equation):
                together.append(equation)
            else:
                _run_together(together, jaxpr, jaxpr.eqns[i:], values)
                together = []
                values = run_equations([equation], values, rule=self.run_equation)
        _run_together(together, jaxpr, [], values)
        return self.gather(read(values, jaxpr.outvars))


def _delay(equation: Equation, operands: Sequence[Value]) -> ShardedParam | None:
    """Return the operand with one more operation that waits, or None if an equation is no such
    operation and needs the gathered value."""
    operation = Operation.of(equation)
    if operation is None:
        return None
    (variable,) = variables(equation.invars)
    param = operands[equation.invars.index(variable)]
    return dataclasses.replace(param, operations=(*param.operations, operation))


def _delay_first(equation: Equation, values: Environment) -> ShardedParam | None:
    """Return `_delay` of an equation that reads one variable, a ShardedParam, else None."""
    reads = variables(equation.invars)
    if len(reads) == 1 and isinstance(values.get(reads[0]), ShardedParam):
        return _delay(equation, read(values, equation.invars))
    return None


def _run_checkpoint(checkpoint: Checkpoint, operands: Sequence[Value]) -> list[Value]:
    """Run a `jax.checkpoint` with the gathers of its params inside, so that the backward pass
    gathers them again."""
    policy = checkpoint.policy
    run = jax.checkpoint(
        partial(_Interpreter(by_name=True).run, checkpoint.body),
        prevent_cse=checkpoint.prevent_cse,
        policy=None if policy is None else _without_gathered(policy),
    )
    return run(operands)


def _is_recomputed(jaxpr: Jaxpr) -> bool:
    """Tell whether a scan's body is a layer of `scan_layers`, or one checkpoint without a policy:
    the backward pass recomputes both from their inputs. A layer that saves values on the host is
    none."""
    names = [primitives.name_of_value(e) for e in jaxpr.eqns]
    calls = [e for e, name in zip(jaxpr.eqns, names, strict=True) if name is None]
    if LAYER in names or len(calls) != 1:
        return LAYER in names and not any(map(primitives.offloads, primitives.walk(jaxpr)))
    call, checkpoint = primitives.as_call(calls[0]), primitives.as_checkpoint(calls[0])
    if call is not None and call.is_jitted:
        return _is_recomputed(call.body)
    return checkpoint is not None and checkpoint.policy is None


def _run_without_outer_call(jaxpr: Jaxpr, operands: Sequence[Value]) -> list[Value]:
    """Run a jaxpr, but only the equations inside of a checkpoint or jit that is all of it, and
    return its results, gathered.

    The caller puts a checkpoint around it, in place of the one left out.
    """
    interpreter = _Interpreter(by_name=False)
    calls = [e for e in jaxpr.eqns if primitives.name_of_value(e) is None]
    call = _find_entered(calls[0]) if len(calls) == 1 else None
    if call is None:
        return interpreter.run(jaxpr, operands)

    def run_inside(*arguments: Value) -> list[Value]:
        return _run_without_outer_call(call.body, [*call.constants, *arguments])

    values = bindings([*jaxpr.constvars, *jaxpr.invars], operands)
    instead = {id(calls[0]): run_inside}
    values = run_equations(jaxpr.eqns, values, instead, interpreter.run_equation)
    return interpreter.gather(read(values, jaxpr.outvars))


def _run_together(
    equations: Sequence[Equation], jaxpr: Jaxpr, later: Sequence[Equation], values: Environment
) -> None:
    """Run equations, in a checkpoint that keeps all but gathered values if they read a
    ShardedParam, and add the results that are read later to `values`.

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
        rule = _Interpreter(by_name=True).run_equation
        return read(run_equations(equations, bindings(reads, operands), rule=rule), results)

    if any(isinstance(values[a], ShardedParam) for a in reads):
        policy = _without_gathered(jax.checkpoint_policies.everything_saveable)
        run = jax.checkpoint(run, prevent_cse=False, policy=policy)
    values |= bindings(results, run(read(values, reads)))


def _has_checkpoint(equation: Equation) -> bool:
    """Tell whether an equation is a `jax.checkpoint`, or runs a function that has one."""
    inside = (e for jaxpr in primitives.find_inner_jaxprs(equation) for e in primitives.walk(jaxpr))
    return any(primitives.as_checkpoint(e) is not None for e in (equation, *inside))


def _without_gathered(policy: Callable[..., Any]) -> Callable[..., Any]:
    """Return a policy for a checkpoint that keeps the results that `policy` keeps, except gathered
    arrays."""

    def keeps(primitive: Any, *args: Any, **params: Any) -> Any:
        is_gathered = primitives.is_composite(primitive, params, GATHERED)
        return not is_gathered and policy(primitive, *args, **params)

    return keeps
