"""Run a program on params that are shards: which equation gathers which param.

A loss is traced for whole params, and its equations run on the shards that a device keeps:

1. An operation on a param and literals, such as a cast, waits until the param is gathered.
2. A scan over stacked params takes the shards of all layers, and its body gathers its layer.
3. A jitted function and a `jax.checkpoint` run in the same way, with their gathers inside.
4. Any other equation gathers the params that it reads.

The backward pass gathers a layer again, so that no device ever keeps all layers. All other values
are kept or recomputed as the loss says: an equation of a scan that reads a layer runs in a
`jax.checkpoint` that keeps all values but gathered ones, and a checkpoint in the loss runs with the
gathers inside and with the policy of its author.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, Protocol

import jax
import jax.extend.core as jex
import jax.numpy as jnp
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
    read,
    run_equations,
    split_operands,
    type_of,
    variables,
)

# Operations on an array and literals that are the same on each layer of a stack.
_ELEMENTWISE = (
    *("convert_element_type", "copy", "copy_p", "reduce_precision", "stop_gradient"),
    *("neg", "mul", "add", "sub", "div"),
)
# The name of a gathered array in a program, and the name of the results of a `scan_layers` layer.
_GATHERED = "optfn.gathered"
LAYER = "optfn.layer"


class Shard(Protocol):
    """The shard of an array that a device keeps; a pytree."""

    @property
    def array(self) -> jax.Array:
        """The shard."""

    def whole_type(self) -> jax.ShapeDtypeStruct:
        """Return the shape and dtype of the whole array."""

    def gather(self, dtype: Any = None) -> jax.Array:
        """Return the whole array, cast to `dtype`; None keeps the dtype."""

    def divide_layers(self) -> "Shard | None":
        """Return this array divided within each layer; None if no dimension of a layer fits."""

    def group_layers(self, groups: int) -> "Shard | None":
        """Return this array of divided layers as (groups, layers of a group, …).

        None if the layers themselves are divided.
        """

    def layer(self, array: jax.Array) -> "Shard":
        """Return the shard of one layer of this array of divided layers."""


@dataclasses.dataclass(frozen=True, eq=False)
class Operation:
    """An equation on one variable and literals, such as a cast.

    equation: the equation.
    params: its params, or those of the same operation on one layer.
    """

    equation: Equation
    params: dict[str, Any]

    @property
    def name(self) -> str:
        """The name of the primitive."""
        name: str = self.equation.primitive.name
        return name

    def apply(self, x: jax.Array) -> jax.Array:
        """Return the result of the operation on x."""
        operands = [a.val if isinstance(a, jex.Literal) else x for a in self.equation.invars]
        result: jax.Array = self.equation.primitive.bind(*operands, **self.params)
        return result

    def groups_of(self, length: int) -> int | None:
        """Return G if this reshapes `length` layers to (G, layers of a group, …), else None."""
        (operand,) = variables(self.equation.invars)
        old = type_of(operand).shape
        new = self.params.get("new_sizes", ())
        splits = self.name == "reshape" and len(new) == len(old) + 1 and new[2:] == old[1:]
        return new[0] if splits and old[0] == length and self.params["dimensions"] is None else None

    def of_layer(self, length: int) -> "Operation | None":
        """Return the operation on one of `length` layers; None if it mixes layers."""
        if self.name == "transpose":
            first, *order = self.params["permutation"]
            return None if first else self._with(permutation=tuple(d - 1 for d in order))
        if self.name == "reshape":
            first, *sizes = self.params["new_sizes"] or [0]
            keeps_layers = first == length and self.params["dimensions"] is None
            return self._with(new_sizes=tuple(sizes)) if keeps_layers else None
        return self

    def _with(self, **params: Any) -> "Operation":
        return dataclasses.replace(self, params=self.params | params)


@partial(jax.tree_util.register_dataclass, data_fields=["shard"], meta_fields=["operations"])
@dataclasses.dataclass(frozen=True)
class ShardedParam:
    """A param that is not gathered yet, and operations that wait until it is.

    shard: the shard that a device keeps.
    operations: operations on the whole array.
    """

    shard: Shard
    operations: tuple[Operation, ...] = ()

    def gather(self) -> jax.Array:
        """Return the whole value.

        A first cast to fewer bits is made before the array is sent; its gradient is reduced in the
        dtype of the param, as if the array had been cast after it.
        """
        first = self.operations[:1]
        if first and first[0].name == "convert_element_type" and self._narrows(first[0]):
            x = self.shard.gather(first[0].params["new_dtype"])
            remaining = self.operations[1:]
        else:
            x, remaining = self.shard.gather(), self.operations
        for operation in remaining:
            x = operation.apply(x)
        return x

    def _narrows(self, cast: Operation) -> bool:
        old, new = self.shard.array.dtype, jnp.dtype(cast.params["new_dtype"])
        return jnp.issubdtype(new, jnp.floating) and new.itemsize < old.itemsize

    @functools.cached_property
    def gathered_by_name(self) -> jax.Array:
        """The whole value, under a name by which the policy of a checkpoint finds it."""
        # A policy sees the equations inside of other calls, but only the name of a composite.
        named = lax.composite(ShardedParam.gather, _GATHERED)
        value = jax.custom_vjp(named)

        def backward(param: ShardedParam, cotangent: jax.Array) -> tuple["ShardedParam"]:
            return jax.vjp(ShardedParam.gather, param)[1](cotangent)

        value.defvjp(lambda param: (named(param), param), backward)
        whole: jax.Array = value(self)
        return whole

    def divide_within_layers(self, length: int) -> "ShardedParam | None":
        """Return this stack of layers, divided within each layer; None if a scan needs it whole.

        Args:
          length: the number of layers.
        """
        shard = self.shard.divide_layers()
        operations: list[Operation] = []
        for operation in self.operations:
            if shard is None:
                return None
            if (groups := operation.groups_of(shard.array.shape[0])) is not None:
                # An operation before it on the axes of a layer would now get groups of layers.
                is_fit = all(x.name in _ELEMENTWISE for x in operations)
                shard = shard.group_layers(groups) if is_fit else None
                continue
            of_layer = operation.of_layer(shard.array.shape[0])
            if of_layer is None:
                return None
            operations.append(of_layer)
        if shard is None or shard.array.shape[0] != length:
            return None
        return ShardedParam(shard, tuple(operations))

    def layer(self, array: jax.Array) -> "ShardedParam":
        """Return one layer of what `divide_within_layers` returns, from its shard."""
        return dataclasses.replace(self, shard=self.shard.layer(array))


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
        is_entered = equation.primitive.name in (*JITTED, *CHECKPOINTS)
        if is_entered and inner is not None and has_scan_over_arrays(inner.eqns):
            return True
    return False


def is_sharded_param(x: object) -> bool:
    """Tell whether `x` is a ShardedParam."""
    return isinstance(x, ShardedParam)


def _run_equation(equation: Equation, *operands: Value, by_name: bool) -> list[Value]:
    """Run an equation; ShardedParams enter its jaxpr or wait where they can, else are gathered.

    Args:
      equation: the equation.
      *operands: its operands, of which some may be ShardedParams.
      by_name: whether a checkpoint around the equation looks for gathered arrays by their name.
    """
    name = equation.primitive.name
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
    is_known = equation.primitive.name in (*_ELEMENTWISE, "reshape", "transpose")
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
    options = equation.params
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
    names = [e.params["name"] for e in closed.jaxpr.eqns if e.primitive.name == "name"]
    run = _run_recomputed_layer if LAYER in names else _run_body

    def body(carry: list[Value], arrays: Sequence[Value]) -> tuple[list[Value], list[Value]]:
        pairs = zip(stacks, arrays, strict=True)
        layers = [x.layer(array) if isinstance(x, ShardedParam) else array for x, array in pairs]
        results = run(closed.jaxpr, [*closed.consts, *constants, *carry, *layers])
        return results[: len(carry)], results[len(carry) :]

    arrays = [x.shard.array if isinstance(x, ShardedParam) else x for x in stacks]
    same = {name: options[name] for name in ("length", "reverse", "unroll")}
    carry, results = lax.scan(body, list(init), arrays, **same)
    return [*carry, *results]


def _run_recomputed_layer(jaxpr: Jaxpr, operands: Sequence[Value]) -> list[Value]:
    """Return the results of a layer of `scan_layers`, which the backward pass recomputes.

    A `jax.checkpoint` around the whole layer is left out: it would keep the arguments of the layer
    together, so that all gathers would end before the first product.
    """
    run = jax.checkpoint(partial(_run_without_outer_call, jaxpr), prevent_cse=False)
    results: list[Value] = run(operands)
    return results


def _run_without_outer_call(jaxpr: Jaxpr, operands: Sequence[Value]) -> list[Value]:
    """Return the results of a jaxpr; of a checkpoint or jit that is all of it, those of its inside.

    The caller puts a checkpoint around it, in place of the one left out.
    """
    calls = [e for e in jaxpr.eqns if e.primitive.name != "name"]
    if len(calls) != 1 or calls[0].primitive.name not in (*JITTED, *CHECKPOINTS):
        return _run_jaxpr(jaxpr, operands, by_name=False)
    (call,) = calls
    values = bindings([*jaxpr.constvars, *jaxpr.invars], operands)
    inner = find_called_jaxpr(call)
    assert inner is not None  # a jit or a checkpoint
    arguments = [*find_call_constants(call), *read(values, call.invars)]
    values |= bindings(call.outvars, _run_without_outer_call(inner, arguments))
    names = [e for e in jaxpr.eqns if e is not call]
    values = run_equations(names, values, rule=run_on_shards)
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
    if equation.primitive.name in CHECKPOINTS:
        return True
    found = jax.tree.leaves(list(equation.params.values()), is_leaf=_is_jaxpr)
    inner: list[Any] = [getattr(x, "jaxpr", x) for x in found if _is_jaxpr(x)]
    return any(_has_checkpoint(e) for jaxpr in inner for e in jaxpr.eqns)


def _is_jaxpr(x: object) -> bool:
    return isinstance(x, jex.Jaxpr | jex.ClosedJaxpr)


def _keep_all(*args: object, **params: object) -> bool:
    """Return True: the policy of a checkpoint that keeps all values."""
    return True


def _without_gathered(policy: Callable[..., Any]) -> Callable[..., Any]:
    """Return a policy for a checkpoint that keeps what `policy` keeps, but no gathered array."""

    def keeps(primitive: Any, *args: Any, **params: Any) -> Any:
        is_gathered = primitive.name == "composite" and params["name"] == _GATHERED
        return False if is_gathered else policy(primitive, *args, **params)

    return keeps


def gather_params(operands: Iterable[Value], by_name: bool = False) -> list[Value]:
    """Return operands, with the whole value in place of each ShardedParam."""
    whole = []
    for x in operands:
        if isinstance(x, ShardedParam):
            x = x.gathered_by_name if by_name else x.gather()
        whole.append(x)
    return whole
