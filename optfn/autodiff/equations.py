"""A function as the list of its equations: which need which, and running some of them."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import jax
import jax.extend.core as jex

# Values of variables.
Environment = dict[Any, Any]
_CALLS = ("jit", "pjit", "closed_call")


class Equations:
    """The equations of a function of trees, calls of jitted functions inlined.

    inputs: the variables of all leaves of the arguments, in order.
    outputs: the variables (or literals) of the leaves of the result.
    structure: the tree that the outputs are the leaves of.
    """

    def __init__(self, fn: Callable[..., Any], *args: Any) -> None:
        called, shape = jax.make_jaxpr(fn, return_shape=True)(*args)
        flat = jax.make_jaxpr(lambda *leaves: _inlined(called, leaves))(*jax.tree.leaves(args))
        self.structure: Any = jax.tree.structure(shape)
        self.inputs, self.outputs = list(flat.jaxpr.invars), list(flat.jaxpr.outvars)
        self.equations = list(flat.jaxpr.eqns)
        self.constants = dict(zip(flat.jaxpr.constvars, flat.consts, strict=True))

    def from_only(self, sources: Iterable[Any]) -> set[Any]:
        """Return the variables that can be had from `sources` and the constants alone."""
        known = {*sources, *self.constants}
        for equation in self.equations:
            if known.issuperset(variables(equation.invars)):
                known.update(equation.outvars)
        return known

    def needed_for(self, targets: Iterable[Any]) -> list[Any]:
        """Return the equations that `targets` are computed by, in order."""
        wanted = set(variables(targets))
        found = []
        for equation in reversed(self.equations):
            if not wanted.isdisjoint(equation.outvars):
                wanted.update(variables(equation.invars))
                found.append(equation)
        return found[::-1]

    @property
    def effects(self) -> bool:
        """Whether an equation does more than give its outputs (writes to a reference, prints)."""
        return any(e.effects for e in self.equations)

    def read_for(self, targets: Iterable[Any]) -> set[Any]:
        """Return the variables that `targets` are computed from, themselves included."""
        targets = list(targets)
        equations = self.needed_for(targets)
        return set(variables([*targets, *(a for e in equations for a in e.invars)]))

    def run(
        self,
        equations: Iterable[Any],
        known: Environment,
        instead: Mapping[int, Callable[..., list[Any]]] | None = None,
    ) -> Environment:
        """Return `known`, variables and their values, and what `equations` make of them.

        `instead` has functions that take the place of some: by the equation's id, from its
        arguments to its results.
        """
        values = {**self.constants, **known}
        for equation in equations:
            arguments = read(values, equation.invars)
            own = (instead or {}).get(id(equation))
            _assign(values, equation, own(*arguments) if own else _bind(equation, arguments))
        return values


def like(atoms: Iterable[Any]) -> list[jax.ShapeDtypeStruct]:
    """Return what values of `atoms` look like, to trace with."""
    return [jax.ShapeDtypeStruct(a.aval.shape, a.aval.dtype) for a in atoms]


def variables(atoms: Iterable[Any]) -> list[Any]:
    """Return those of `atoms` that are not literals, each once."""
    return list(dict.fromkeys(a for a in atoms if not isinstance(a, jex.Literal)))


def read(values: Environment, atoms: Iterable[Any]) -> list[Any]:
    """Return the values of `atoms`."""
    return [a.val if isinstance(a, jex.Literal) else values[a] for a in atoms]


def _assign(values: Environment, equation: Any, results: list[Any]) -> None:
    values.update(zip(equation.outvars, results, strict=True))


def _bind(equation: Any, arguments: list[Any]) -> list[Any]:
    primitive = equation.primitive
    with equation.ctx.manager:
        result = primitive.bind(*arguments, **primitive.get_bind_params(equation.params))
    return result if primitive.multiple_results else [result]


def _inlined(called: Any, arguments: Iterable[Any]) -> list[Any]:
    values = dict(zip(called.jaxpr.constvars, called.consts, strict=True))
    values.update(zip(called.jaxpr.invars, arguments, strict=True))
    for equation in called.jaxpr.eqns:
        given = read(values, equation.invars)
        inner = equation.params.get("jaxpr", equation.params.get("call_jaxpr"))
        if equation.primitive.name in _CALLS and isinstance(inner, jex.ClosedJaxpr):
            _assign(values, equation, _inlined(inner, given))
        else:
            _assign(values, equation, _bind(equation, given))
    return read(values, called.jaxpr.outvars)


def with_divided_scans(program: Equations, targets: Iterable[Any]) -> Equations:
    """Return `program` with each scan in two: for what `targets` need of it, and for the rest."""
    wanted = program.read_for(targets)

    def run(*leaves: Any) -> list[Any]:
        values = {**program.constants, **dict(zip(program.inputs, leaves, strict=True))}
        for equation in program.equations:
            given = read(values, equation.invars)
            if equation.primitive.name == "scan":
                results = _divided_scan(equation, given, wanted)
            else:
                results = _bind(equation, given)
            _assign(values, equation, results)
        return read(values, program.outputs)

    divided = Equations(run, *like(program.inputs))
    divided.structure = program.structure
    return divided


def _divided_scan(equation: Any, given: list[Any], wanted: set[Any]) -> list[Any]:
    """Return the results of a scan, by a first one for `wanted` and a second for the others."""
    whole = _Scan.of(equation.params, given)
    if whole is None:
        return _bind(equation, given)
    early = whole.closure({i for i, a in enumerate(equation.outvars) if a in wanted})
    body = with_divided_scans(whole.body, (whole.body.outputs[i] for i in early))
    scan = whole._replace(body=body)
    late = set(range(len(body.outputs))) - early
    first = body.needed_for(scan.outputs(early))
    done = set(map(id, first))
    second = [e for e in body.needed_for(scan.outputs(late)) if id(e) not in done]
    if not early or not second:
        return _bind(equation, given)
    # What the second reads of the first is handed over turn by turn.
    had = {a for e in second for a in e.outvars} | {*body.constants, *body.inputs}
    had -= set(scan.carried(early))
    reads = variables([*(a for e in second for a in e.invars), *scan.outputs(late)])
    handed = [a for a in reads if a not in had]
    results, values = scan.run(early, first, [], [], handed)
    results |= scan.run(late, second, handed, values, [])[0]
    return [results[i] for i in range(len(body.outputs))]


class _Scan(NamedTuple):
    """A scan equation: its body, and the values of its constants, first carry and elements.

    The outputs of the body are known by their positions: first what is carried, then what is
    stacked.
    """

    body: Equations
    options: dict[str, Any]
    constants: list[Any]
    init: list[Any]
    elements: list[Any]

    @classmethod
    def of(cls, params: dict[str, Any], given: list[Any]) -> "_Scan | None":
        """Return the scan, or None if its form is not known, or it has effects."""
        closed = params["jaxpr"]
        if "num_consts" in params:
            consts, carry = params["num_consts"], params["num_carry"]
        else:  # newer than JAX 0.10
            try:
                groups = params["ft_in"].update(given).unpack()
                consts, carry, _ = (len(list(group)) for group in groups)
            except (AttributeError, KeyError, TypeError, ValueError):
                return None
        if closed.effects:
            return None
        body = Equations(jex.jaxpr_as_fun(closed), *like(closed.jaxpr.invars))
        options = {name: params[name] for name in ("length", "reverse", "unroll")}
        start = consts + carry
        return cls(body, options, given[:consts], given[consts:start], given[start:])

    def outputs(self, which: Iterable[int]) -> list[Any]:
        """Return the variables of the outputs at these positions."""
        return [self.body.outputs[i] for i in sorted(which)]

    def carried(self, which: Iterable[int]) -> list[Any]:
        """Return the variables that those outputs among `which` that are carried arrive in."""
        start = len(self.constants)
        return [self.body.inputs[start + i] for i in sorted(which) if i < len(self.init)]

    def closure(self, which: set[int]) -> set[int]:
        """Return `which` and all that is carried from turn to turn to make them."""
        while True:
            needed = self.body.read_for(self.outputs(which))
            more = {i for i in range(len(self.init)) if needed.issuperset(self.carried([i]))}
            if more <= which:
                return which
            which = which | more

    def run(
        self,
        which: set[int],
        equations: list[Any],
        handed: list[Any],
        values: list[Any],
        out: list[Any],
    ) -> tuple[dict[int, Any], list[Any]]:
        """Scan by some of the equations.

        Args:
          which: the outputs that `equations` make.
          equations: part of the body.
          handed: variables that come from another part, turn by turn.
          values: their stacked values.
          out: variables to hand on.

        Returns:
          The outputs by position, and the stacked values of `out`.
        """
        state = [i for i in sorted(which) if i < len(self.init)]
        stacked = [i for i in sorted(which) if i >= len(self.init)]
        reads = {*variables(a for e in equations for a in e.invars), *out}
        reads |= set(variables(self.outputs(which)))
        names = self.body.inputs[len(self.constants) + len(self.init) :]
        pairs = [(a, x) for a, x in zip(names, self.elements, strict=True) if a in reads]
        per_turn = [*(a for a, _ in pairs), *handed]
        always = dict(zip(self.body.inputs, self.constants, strict=False))

        def turn(now: list[Any], elements: list[Any]) -> Any:
            known = always | dict(zip(self.carried(state), now, strict=True))
            known |= dict(zip(per_turn, elements, strict=True))
            made = self.body.run(equations, known)
            new, ys = read(made, self.outputs(state)), read(made, self.outputs(stacked))
            return new, (ys, read(made, out))

        init = [self.init[i] for i in state]
        xs = [*(x for _, x in pairs), *values]
        final, (ys, passed) = jax.lax.scan(turn, init, xs, **self.options)
        return dict(zip([*state, *stacked], [*final, *ys], strict=True)), passed
