"""A function as the list of its equations: their dependencies, and running some of them."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, TypeAlias

import jax
import jax.extend.core as jex
from jax.extend import source_info_util

from optfn.core.types import PyTree
from optfn.loss.jaxprs import primitives
from optfn.loss.jaxprs.primitives import Atom, Equation, Variable

Value: TypeAlias = Any  # the value of an atom: an array, a tracer or a Python scalar
Environment: TypeAlias = dict[Any, Value]  # the values of variables
Override: TypeAlias = Callable[..., list[Value]]  # it runs in place of an equation
Rule: TypeAlias = Callable[..., list[Value]]  # (equation, *operands) -> results


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
            closed = jax.make_jaxpr(partial(_run_inlined, closed))(*jax.tree.leaves(args))
        self.shapes: Any = shape
        self.inputs, self.outputs = list(closed.jaxpr.invars), list(closed.jaxpr.outvars)
        self.equations = list(closed.jaxpr.eqns)
        self.constants = bindings(closed.jaxpr.constvars, closed.consts)

    @property
    def structure(self) -> Any:
        """The tree structure of the result."""
        return jax.tree.structure(self.shapes)

    def find_computable(self, sources: Iterable[Variable]) -> set[Variable]:
        """Return the variables that `sources` and the constants alone determine, and these
        themselves."""
        known = {*sources, *self.constants}
        for equation in self.equations:
            if known.issuperset(variables(equation.invars)):
                known.update(equation.outvars)
        return known

    def find_equations(self, targets: Iterable[Atom]) -> list[Equation]:
        """Return the equations that `targets` depend on, in the order of the program."""
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
        """Return the equations that have side effects, or that the outputs or side effects depend
        on, in order."""
        effects = [e for e in self.equations if e.effects]
        needed = self.find_equations([*self.outputs, *(a for e in effects for a in e.invars)])
        found = {id(e) for e in [*needed, *effects]}
        return [e for e in self.equations if id(e) in found]

    def evaluate(self, leaves: Sequence[Value]) -> PyTree:
        """Run all equations on the leaves of the arguments, and return the result of the function
        as a tree."""
        values = self.run(self.equations, bindings(self.inputs, leaves))
        return jax.tree.unflatten(self.structure, read(values, self.outputs))

    def retrace(self, overrides: Mapping[int, Override], values: Sequence[Value]) -> "Equations":
        """Trace this program again, with `overrides` in place of some equations and with jitted
        functions inlined, and return the new program.

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
        """Run some equations, and return a new environment of `known`, the constants, and their
        results.

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
    """Return `fn` as a function of the JAX arrays among its arguments, in a list, with the
    remaining arguments, such as flags and sizes, bound, and that list."""

    def is_array(x: object) -> bool:
        return isinstance(x, jax.Array)

    def call(arrays: list[jax.Array]) -> PyTree:
        bound_args, bound_kwargs = replace_leaves(is_array, (args, kwargs), arrays)
        return fn(*bound_args, **bound_kwargs)

    return call, list(filter(is_array, jax.tree.leaves((args, kwargs))))


def replace_leaves(chosen: Callable[[Any], bool], tree: PyTree, leaves: Iterable[Value]) -> PyTree:
    """Return `tree` with each leaf that `chosen` accepts replaced by the next of `leaves`."""
    remaining = iter(leaves)
    return jax.tree.map(lambda x: next(remaining) if chosen(x) else x, tree)


def shapes_of(atoms: Iterable[Atom]) -> list[jax.ShapeDtypeStruct]:
    """Return the shapes and dtypes of `atoms`, to trace with."""
    return [jax.ShapeDtypeStruct(t.shape, t.dtype) for t in map(primitives.type_of, atoms)]


def variables(atoms: Iterable[Atom]) -> list[Variable]:
    """Return the variables among `atoms`, each once and without the literals."""
    return list(dict.fromkeys(a for a in atoms if not isinstance(a, jex.Literal)))


def read(values: Environment, atoms: Iterable[Atom]) -> list[Value]:
    """Return the values of `atoms`: a literal has its value, and the environment has a
    variable's."""
    return [a.val if isinstance(a, jex.Literal) else values[a] for a in atoms]


def bindings(names: Iterable[Variable], values: Iterable[Value]) -> Environment:
    """Return an environment that gives each variable the value at its place, the inverse of `read`,
    and raise a ValueError if their numbers differ."""
    return dict(zip(names, values, strict=True))


def bind(equation: Equation, *arguments: Value) -> list[Value]:
    """Run an equation's primitive, with its params and context, on new values of its arguments, and
    return the list of its results."""
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
    """Run equations in order, each by its override if it has one, else by `rule`, else by its
    primitive, add their results to `values`, and return it.

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
    """Run a jaxpr equation by equation, and the jitted functions in it the same way, but calls of
    any other kind as one equation, and return its results."""
    values = bindings(closed.jaxpr.constvars, closed.consts)
    values |= bindings(closed.jaxpr.invars, arguments)
    equations = list(closed.jaxpr.eqns)
    instead = {
        id(e): partial(_run_inlined, jex.ClosedJaxpr(call.body, call.constants))
        for e in equations
        if (call := primitives.as_call(e)) is not None and call.is_jitted
    }
    return read(run_equations(equations, values, instead), closed.jaxpr.outvars)


def draws_random_numbers(fn: Callable[..., PyTree], *args: PyTree) -> bool:
    """Trace a function, and tell whether it, or a function that it calls, draws random numbers."""
    call, arrays = function_of_arrays(fn, args, {})
    program = jax.make_jaxpr(call)(arrays).jaxpr
    return any(primitives.draws_bits(equation) for equation in primitives.walk(program))
