"""A function as the list of its equations: their dependencies, and running some of them."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeAlias, TypeVar

import jax
import jax.extend.core as jex
from jax.extend import source_info_util

from optfn.core.types import PyTree

Variable: TypeAlias = jex.Var
Atom: TypeAlias = jex.Var | jex.Literal  # an input of an equation
Equation: TypeAlias = jex.JaxprEqn
Jaxpr: TypeAlias = jex.Jaxpr
Value: TypeAlias = Any  # the value of an atom: an array, a tracer or a Python scalar
Environment: TypeAlias = dict[Any, Value]  # the values of variables
Override: TypeAlias = Callable[..., list[Value]]  # it runs in place of an equation
Rule: TypeAlias = Callable[..., list[Value]]  # (equation, *operands) -> results
T = TypeVar("T")

JITTED = ("jit", "pjit", "closed_call")
CHECKPOINTS = ("checkpoint", "remat2")
# JAX 0.12 with the flags jax_remat3, jax_custom_jvp3 and jax_custom_vjp3 has one primitive for all
# of these; its param `_prim` tells which.
_HIGH_PRIMITIVES = {
    "RematTraced": "checkpoint",
    "CheckpointName": "name",
    "CustomJVPTraced": "custom_jvp_call",
    "CustomVJPTraced": "custom_vjp_call",
}
# The scope in which JAX puts what a checkpoint runs again in the backward pass.
RECOMPUTED = "rematted_computation"
# Primitives that run a function once on their operands.
_CALLS = (
    *(*JITTED, "core_call", "composite", "shard_map", *CHECKPOINTS),
    *("custom_jvp_call", "custom_vjp_call"),
)


class Equations:
    """The equations of a function of trees.

    Args:
      fn: the function.
      *args: its arguments, or their shapes and dtypes.
      inline: whether to replace each call of a jitted function by the equations of the function.

    inputs: the variables of all leaves of the arguments, in order.
    outputs: the variables (or literals) of the leaves of the result.
    shapes: the shapes and dtypes of the result, a tree.
    constants: the values of the variables that the function closes over.
    """

    def __init__(self, fn: Callable[..., Any], *args: PyTree, inline: bool = True) -> None:
        closed, shape = jax.make_jaxpr(fn, return_shape=True)(*args)
        if inline:
            inlined = jax.make_jaxpr(partial(_run_inlined, closed))(*jax.tree.leaves(args))
        else:
            inlined = closed
        self.shapes: Any = shape
        self.inputs, self.outputs = list(inlined.jaxpr.invars), list(inlined.jaxpr.outvars)
        self.equations = list(inlined.jaxpr.eqns)
        self.constants = bindings(inlined.jaxpr.constvars, inlined.consts)

    @property
    def structure(self) -> Any:
        """The tree structure of the result."""
        return jax.tree.structure(self.shapes)

    @property
    def has_effects(self) -> bool:
        """Whether an equation has a side effect (writes to a reference, prints)."""
        return any(e.effects for e in self.equations)

    def find_computable(self, sources: Iterable[Variable]) -> set[Variable]:
        """Return the variables that `sources` and the constants alone determine."""
        known = {*sources, *self.constants}
        for equation in self.equations:
            if known.issuperset(variables(equation.invars)):
                known.update(equation.outvars)
        return known

    def find_equations(self, targets: Iterable[Atom]) -> list[Equation]:
        """Return the equations that compute `targets`, in order."""
        needed = set(variables(targets))
        found = []
        for equation in reversed(self.equations):
            if not needed.isdisjoint(equation.outvars):
                needed.update(variables(equation.invars))
                found.append(equation)
        return found[::-1]

    def find_dependencies(self, targets: Iterable[Atom]) -> set[Variable]:
        """Return the variables that `targets` depend on, themselves included."""
        targets = list(targets)
        equations = self.find_equations(targets)
        return set(variables([*targets, *(a for e in equations for a in e.invars)]))

    def find_live_equations(self) -> list[Equation]:
        """Return the equations that the outputs and side effects need, in order."""
        effects = [e for e in self.equations if e.effects]
        needed = self.find_equations([*self.outputs, *(a for e in effects for a in e.invars)])
        found = {id(e) for e in [*needed, *effects]}
        return [e for e in self.equations if id(e) in found]

    def evaluate(self, leaves: Sequence[Value]) -> PyTree:
        """Return the result of the function, from the leaves of its arguments."""
        values = self.run(self.equations, bindings(self.inputs, leaves))
        return jax.tree.unflatten(self.structure, read(values, self.outputs))

    def retrace(self, overrides: Mapping[int, Override], values: Sequence[Value]) -> "Equations":
        """Trace this program again, with `overrides` in place of some equations.

        Args:
          overrides: as in `run`.
          values: the inputs, or their shapes and dtypes.
        """

        def run(*leaves: Value) -> list[Value]:
            found = self.run(self.equations, bindings(self.inputs, leaves), overrides)
            return read(found, self.outputs)

        program = Equations(run, *values)
        program.shapes = self.shapes
        return program

    def run(
        self,
        equations: Iterable[Equation],
        known: Environment,
        overrides: Mapping[int, Override] | None = None,
        rule: Rule | None = None,
    ) -> Environment:
        """Return the values of variables: `known`, the constants, and the results of `equations`.

        Args:
          equations: the equations to run, in order.
          known: the values of the variables that they need.
          overrides: functions that replace equations, by the id of the equation; each maps the
            values of its arguments to its results.
          rule: returns the results of the remaining equations; None runs them as they are.
        """
        return run_equations(equations, self.constants | known, overrides, rule)


def function_of_arrays(
    fn: Callable[..., Any], args: PyTree, kwargs: PyTree
) -> tuple[Callable[[list[jax.Array]], PyTree], list[jax.Array]]:
    """Return `fn` as a function of the arrays among its arguments, and these arrays.

    The remaining arguments, such as flags and sizes, are bound.
    """

    def is_array(x: object) -> bool:
        return isinstance(x, jax.Array)

    def call(arrays: list[jax.Array]) -> PyTree:
        bound_args, bound_kwargs = replace_leaves(is_array, (args, kwargs), arrays)
        return fn(*bound_args, **bound_kwargs)

    return call, list(filter(is_array, jax.tree.leaves((args, kwargs))))


def replace_leaves(chosen: Callable[[Any], bool], tree: PyTree, leaves: Iterable[Value]) -> PyTree:
    """Return `tree` with its chosen leaves replaced by `leaves`, in order."""
    remaining = iter(leaves)
    return jax.tree.map(lambda x: next(remaining) if chosen(x) else x, tree)


def shapes_of(atoms: Iterable[Atom]) -> list[jax.ShapeDtypeStruct]:
    """Return the shapes and dtypes of `atoms`, to trace with."""
    return [jax.ShapeDtypeStruct(t.shape, t.dtype) for t in map(type_of, atoms)]


def type_of(atom: Atom) -> Any:
    """Return the abstract value of an atom, which has its shape and dtype."""
    return atom.aval


def variables(atoms: Iterable[Atom]) -> list[Variable]:
    """Return the variables among `atoms`, each once; literals are left out."""
    return list(dict.fromkeys(a for a in atoms if not isinstance(a, jex.Literal)))


def read(values: Environment, atoms: Iterable[Atom]) -> list[Value]:
    """Return the values of `atoms`: a literal's own, a variable's in the environment."""
    return [a.val if isinstance(a, jex.Literal) else values[a] for a in atoms]


def bindings(names: Iterable[Variable], values: Iterable[Value]) -> Environment:
    """Return an environment that gives variables these values: the inverse of `read`."""
    return dict(zip(names, values, strict=True))


def kind_of(equation: Equation) -> str:
    """Return the name of an equation's primitive, the same with any flag of JAX."""
    high = type(equation.params.get("_prim")).__name__
    return _HIGH_PRIMITIVES.get(high, equation.primitive.name)


def options_of(equation: Equation) -> Mapping[str, Any]:
    """Return the params of the primitive that `kind_of` names."""
    if kind_of(equation) == equation.primitive.name:
        return equation.params
    params = equation.params["_prim"].params
    return params | {"call_jaxpr": params["traced"].jaxpr} if "traced" in params else params


def find_called_jaxpr(equation: Equation) -> Jaxpr | None:
    """Return the jaxpr that an equation runs once on its operands; None if it does not call one."""
    if kind_of(equation) not in _CALLS:
        return None
    inner = _get_jaxpr(equation)
    return inner.jaxpr if isinstance(inner, jex.ClosedJaxpr) else inner


def find_inner_jaxprs(equation: Equation) -> list[Jaxpr]:
    """Return the jaxprs that an equation runs: bodies of loops, branches, calls."""
    return list(jex.jaxprs_in_params(options_of(equation)))


def walk(jaxpr: Jaxpr) -> Iterator[Equation]:
    """Yield each equation of a jaxpr, and the equations of the jaxprs that it runs."""
    for equation in jaxpr.eqns:
        yield equation
        for inner in find_inner_jaxprs(equation):
            yield from walk(inner)


def find_call_constants(equation: Equation) -> list[Value]:
    """Return the values that the jaxpr of `find_called_jaxpr` takes before its operands, if any."""
    return [*getattr(_get_jaxpr(equation), "consts", ())]


def _get_jaxpr(equation: Equation) -> Any:
    options = options_of(equation)
    return options.get("jaxpr", options.get("call_jaxpr"))


def count_scan_groups(params: Mapping[str, Any]) -> tuple[int, int] | None:
    """Return how many operands of a scan are constants, which come first, and how many are carries;
    None if this version of JAX has the params of a scan in an unknown form."""
    if "num_consts" in params:
        return params["num_consts"], params["num_carry"]
    if "ft_in" in params:  # JAX 0.12: the operands as a tree of constants, carry and elements
        constants, carry, _ = params["ft_in"].unpack()
        return len(constants), len(carry)
    return None


def split_operands(
    operands: Sequence[T], groups: tuple[int, int]
) -> tuple[Sequence[T], Sequence[T], Sequence[T]]:
    """Return two groups of operands with these lengths, and the remaining ones."""
    first, end = groups[0], sum(groups)
    return operands[:first], operands[first:end], operands[end:]


def bind(equation: Equation, *arguments: Value) -> list[Value]:
    """Run the primitive of an equation on other values of its arguments; return the results."""
    primitive = equation.primitive
    with equation.ctx.manager:
        result = primitive.bind(*arguments, **primitive.get_bind_params(equation.params))
    return result if primitive.multiple_results else [result]


def run_equations(
    equations: Iterable[Equation],
    values: Environment,
    overrides: Mapping[int, Override] | None = None,
    rule: Rule | None = None,
) -> Environment:
    """Run equations by their overrides, else by `rule`, else as they are; return `values`, with
    their results added.

    The arguments are the same as for `Equations.run`. Traced operations keep the lines and the
    named scopes of the equations, which errors and profiles show.
    """
    for equation in equations:
        override = (overrides or {}).get(id(equation), partial(rule or bind, equation))
        info = equation.source_info
        scope = source_info_util.current_name_stack() + info.name_stack
        with source_info_util.user_context(info.traceback, name_stack=scope):
            results = override(*read(values, equation.invars))
        values |= bindings(equation.outvars, results)
    return values


def _run_inlined(closed: jex.ClosedJaxpr, *arguments: Value) -> list[Value]:
    """Run a jaxpr equation by equation, and the jitted functions in it the same way."""
    values = bindings(closed.jaxpr.constvars, closed.consts)
    values |= bindings(closed.jaxpr.invars, arguments)
    equations = list(closed.jaxpr.eqns)
    instead = {
        id(e): partial(_run_inlined, _get_jaxpr(e))
        for e in equations
        if e.primitive.name in JITTED and isinstance(_get_jaxpr(e), jex.ClosedJaxpr)
    }
    return read(run_equations(equations, values, instead), closed.jaxpr.outvars)


def draws_random_numbers(fn: Callable[..., PyTree], *args: PyTree) -> bool:
    """Tell whether a function draws random numbers, in an inner function too. It is traced."""
    call, arrays = function_of_arrays(fn, args, {})
    program = jax.make_jaxpr(call)(arrays).jaxpr
    return any(kind_of(equation) == "random_bits" for equation in walk(program))


def split_scans(program: Equations, targets: Iterable[Atom]) -> Equations:
    """Return `program` with each scan split in two: the first computes all that `targets` need."""
    needed = program.find_dependencies(targets)
    scans = [e for e in program.equations if e.primitive.name == "scan"]
    instead = {id(e): partial(_run_split_scan, e, needed) for e in scans}
    return program.retrace(instead, shapes_of(program.inputs))


def _run_split_scan(equation: Equation, needed: set[Variable], *operands: Value) -> list[Value]:
    """Return the results of a scan: those in `needed` by a first scan, the remaining by a second.

    A scan that cannot be split runs as it is.
    """
    scan = _Scan.of(equation.params, operands)
    if scan is None:
        return bind(equation, *operands)
    early = scan.close_over_carries({i for i, a in enumerate(equation.outvars) if a in needed})
    body = split_scans(scan.body, (scan.body.outputs[i] for i in early))
    scan = scan._replace(body=body)
    late = set(range(len(body.outputs))) - early
    first = body.find_equations(scan.outputs(early))
    in_first = set(map(id, first))
    second = [e for e in body.find_equations(scan.outputs(late)) if id(e) not in in_first]
    if not early or not second:
        return bind(equation, *operands)
    # The intermediate values of the first scan that the second reads are stacked, one entry per
    # iteration.
    available = {a for e in second for a in e.outvars} | {*body.constants, *body.inputs}
    available -= set(scan.carry_inputs(early))
    reads = variables([*(a for e in second for a in e.invars), *scan.outputs(late)])
    intermediates = [a for a in reads if a not in available]
    results, values = scan.run(early, first, [], [], intermediates)
    results |= scan.run(late, second, intermediates, values, [])[0]
    return [results[i] for i in range(len(body.outputs))]


class _Scan(NamedTuple):
    """A scan equation: its body, and the values of its constants, initial carry and elements.

    An output of the body is identified by its position: the carries come first, then the stacked
    outputs.
    """

    body: Equations
    options: dict[str, Any]
    constants: Sequence[Value]
    init: Sequence[Value]
    elements: Sequence[Value]

    @classmethod
    def of(cls, params: dict[str, Any], operands: Sequence[Value]) -> "_Scan | None":
        """Return the scan, or None if the layout of its params is unknown or it has effects."""
        closed, groups = params["jaxpr"], count_scan_groups(params)
        if groups is None or closed.effects:
            return None
        body = Equations(jex.jaxpr_as_fun(closed), *shapes_of(closed.jaxpr.invars))
        options = {name: params[name] for name in ("length", "reverse", "unroll")}
        return cls(body, options, *split_operands(operands, groups))

    def outputs(self, positions: Iterable[int]) -> list[Atom]:
        """Return the body's output variables at these positions."""
        return [self.body.outputs[i] for i in sorted(positions)]

    def carry_inputs(self, positions: Iterable[int]) -> list[Variable]:
        """Return the body's input variables of the carries among these outputs."""
        start = len(self.constants)
        return [self.body.inputs[start + i] for i in sorted(positions) if i < len(self.init)]

    def close_over_carries(self, positions: set[int]) -> set[int]:
        """Return `positions`, and the positions of all carries that these outputs depend on."""
        while True:
            needed = self.body.find_dependencies(self.outputs(positions))
            carries = range(len(self.init))
            more = {i for i in carries if needed.issuperset(self.carry_inputs([i]))}
            if more <= positions:
                return positions
            positions = positions | more

    def run(
        self,
        positions: set[int],
        equations: Sequence[Equation],
        received: Sequence[Variable],
        received_values: Sequence[Value],
        passed_on: Sequence[Variable],
    ) -> tuple[dict[int, Value], list[Value]]:
        """Run a scan whose body is a segment of this one's.

        Args:
          positions: the outputs that `equations` compute.
          equations: the segment of the body.
          received: variables that the scan before it computes.
          received_values: their values, stacked over the iterations.
          passed_on: variables to stack for the scan after it.

        Returns:
          The outputs by position, and the stacked values of `passed_on`.
        """
        carried = [i for i in sorted(positions) if i < len(self.init)]
        stacked = [i for i in sorted(positions) if i >= len(self.init)]
        reads = {*variables(a for e in equations for a in e.invars), *passed_on}
        reads |= set(variables(self.outputs(positions)))
        element_inputs = self.body.inputs[len(self.constants) + len(self.init) :]
        pairs = [(a, x) for a, x in zip(element_inputs, self.elements, strict=True) if a in reads]
        per_iteration = [*(a for a, _ in pairs), *received]
        constants = bindings(self.body.inputs[: len(self.constants)], self.constants)

        def iteration(carry: list[Value], elements: list[Value]) -> Any:
            known = constants | bindings(self.carry_inputs(carried), carry)
            known |= bindings(per_iteration, elements)
            values = self.body.run(equations, known)
            carry, ys = read(values, self.outputs(carried)), read(values, self.outputs(stacked))
            return carry, (ys, read(values, passed_on))

        init = [self.init[i] for i in carried]
        xs = [*(x for _, x in pairs), *received_values]
        final, (ys, passed_values) = jax.lax.scan(iteration, init, xs, **self.options)
        return dict(zip([*carried, *stacked], [*final, *ys], strict=True)), passed_values
