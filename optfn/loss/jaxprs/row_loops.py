"""A function whose arguments lie in the memory of the host, run in loops over chunks of rows.

A program that fetches its arguments from the host is no smaller for it: XLA schedules nearly all of
the fetches first. It does not move operations out of a loop that updates its carry. So the
equations of the function that work on each row alone run in one loop for each leaf, which fetches,
computes and stores a chunk at a time:

    equations    row rules?    yes, and read host arrays:  loops
                               no, or read none:           as they are, between the loops

An equation that needs the result of a loop as a whole, such as a norm, waits for this loop, and the
loops that need the equation's result come after it. They are the phases of a program. An array on
the host that such an equation reads is fetched whole.
"""

import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from optfn.core.types import PyTree
from optfn.loss.jaxprs import equations as programs
from optfn.loss.jaxprs import primitives
from optfn.loss.jaxprs.equations import Equations, Override, Value, run_equations, variables
from optfn.loss.jaxprs.primitives import Atom, Call, Equation, Variable, type_of
from optfn.mesh.compilers import memories

# From the shape of an array to how many devices divide its first axis, and the remaining axes
# together.
Divide = Callable[[tuple[int, ...]], tuple[int, int]]

CHUNK = 16 << 20  # bytes of a chunk of one array, on one device


def run_by_rows(
    fn: Callable[..., Any], args: Sequence[PyTree], divide: Divide, platform: str
) -> PyTree:
    """Return fn(*args), traced, with loops over chunks of the arguments that lie on the host.

    Args:
      fn: a function of trees of arrays, whose result begins with the leaves that replace the leaves
        of its arguments, in order. They are updated in place, and lie in the same memory.
      args: its arguments.
      divide: how devices divide an array of a shape.
      platform: the platform whose branches run, as `jax.lax.platform_dependent` names it.
    """
    leaves = jax.tree.leaves(args)
    if not any(map(memories.is_on_host, leaves)):
        return fn(*args)
    types = jax.tree.map(memories.type_on_device, args)
    program = Equations(fn, *types, inline=False)
    program = program.retrace(_open(program.equations, platform), jax.tree.leaves(types))
    return _RowProgram(program, leaves, divide, platform).run()


def _open(equations: Iterable[Equation], platform: str) -> dict[int, Override]:
    """Return functions that run in place of equations, so that the equations inside of calls show:
    the equations of each call and of the branches for a platform, without barriers of several
    arrays."""
    found: dict[int, Override] = {}
    for equation in equations:
        call = primitives.as_call(equation)
        branch = primitives.as_platform_branch(equation, platform)
        if primitives.is_barrier(equation):
            # Of several arrays it is an order, which the loops have; of one it hides the value.
            found[id(equation)] = lambda *x: [*x] if len(x) > 1 else [lax.optimization_barrier(*x)]
        elif branch is not None:
            found[id(equation)] = lambda _, *x, of=branch: _run_open(of, platform, *x)
        elif call is not None and not primitives.find_bound_axes(equation):
            found[id(equation)] = partial(_run_open, call, platform)
    return found


def _run_open(call: Call, platform: str, *operands: Value) -> list[Value]:
    """Run the equations of a call as `_open` says, and return its results."""
    body = call.body
    values = programs.bindings([*body.constvars, *body.invars], [*call.constants, *operands])
    return programs.read(run_equations(body.eqns, values, _open(body.eqns, platform)), body.outvars)


class _RowProgram:
    """A program with arguments on the host.

    program: the program; equations: those that count.
    divide: how devices divide an array of a shape; platform: whose branches run.
    values: of the variables that are known so far; kept: those that loops have made.
    host: the arguments on the host, and the arrays that a `while` of the program keeps there.
    rules: the row rules of equations that have one and read no array on the host as a whole, by id.
    folds: how a loop makes the variables that are reductions of rows.
    makers: the number of the equation with a row rule that makes each variable.
    replaced: the argument of the same shape and dtype that each result replaces, one on the host if
      there are several.
    """

    def __init__(
        self, program: Equations, leaves: Sequence[Value], divide: Divide, platform: str
    ) -> None:
        self.program, self.divide, self.platform = program, divide, platform
        self.equations = program.find_live_equations()
        self.values = program.constants | programs.bindings(program.inputs, leaves)
        self.kept: set[Variable] = set()
        self.host = {v for v in program.inputs if memories.is_on_host(self.values[v])}
        pairs = zip(program.outputs, program.inputs, strict=False)
        ordered = sorted(pairs, key=lambda pair: pair[1] in self.host)
        alike = ((v, x) for v, x in ordered if programs.shapes_of([v]) == programs.shapes_of([x]))
        self.replaced = {v: old for v, old in alike if variables([v])}
        self._follow_carries()
        folds = ((e.outvars[0], primitives.as_fold(e)) for e in self.equations if e.outvars)
        self.folds = {v: fold for v, fold in folds if fold is not None}
        rules = {id(e): self._find_rule(e) for e in self.equations}
        self.rules = {number: rule for number, rule in rules.items() if rule is not None}
        made = ((i, e.outvars) for i, e in enumerate(self.equations) if id(e) in self.rules)
        self.makers = {v: i for i, outvars in made for v in outvars}

    def _follow_carries(self) -> None:
        """Let each array that a `while` updates lie where the argument lies that its last value
        replaces."""
        loops = ((primitives.as_while(e), e) for e in self.equations)
        carries = [
            (v, new)
            for loop, e in loops if loop is not None
            for v, new in zip(loop.split(e.invars)[2], e.outvars, strict=True) if variables([v])
        ]  # fmt: skip
        for v, new in reversed(carries):
            if new in self.replaced:
                self.replaced.setdefault(v, self.replaced[new])
        for v, new in carries:
            if self.host.intersection((v, self.replaced.get(v))):
                self.host.add(new)

    def _find_rule(self, equation: Equation) -> dict[Variable, bool] | None:
        """Return for each variable that an equation with a row rule reads whether it does so by
        row, or None if it has no rule, or reads a variable in both ways, or one on the host
        whole."""
        rule = (True,) if primitives.as_fold(equation) else primitives.as_row_rule(equation)
        if rule is None:
            return None
        pairs = zip(equation.invars, rule, strict=True)
        ways = {(v, by_row) for a, by_row in pairs for v in variables([a])}
        found = dict(ways)
        fits = len(found) == len(ways) and all(found[v] for v in self.host.intersection(found))
        return found if fits else None

    def run(self) -> PyTree:
        """Return the result of the program."""
        phases, wanted = self._find_phases()
        rule = partial(self._run_whole, {})
        for phase in range(max([*phases.values(), *wanted], default=0) + 1):
            now = [e for e in self.equations if phases.get(id(e)) == phase]
            self.values = run_equations(now, self.values, rule=rule)
            for results in self._group_results(wanted[phase]):
                self._run_loop(*self._find_loop(results), results)
            self.kept |= wanted[phase]
        outputs = programs.read(self.values, self.program.outputs)
        homes = [*self.program.inputs, *[None] * len(outputs)]
        return jax.tree.unflatten(self.program.structure, self._place(outputs, homes))

    def _run_whole(
        self, fetched: dict[int, Value], equation: Equation, *operands: Value
    ) -> list[Value]:
        """Run an equation outside of the loops over chunks, and fetch its operands from the host.

        Of a slice only its part is fetched, and of a `while` that updates arrays on the host only
        the rows that its body reads.

        Args:
          fetched: the arrays that have been fetched, by the id of the one on the host.
          equation: the equation.
          *operands: its operands.
        """
        cut, loop = primitives.as_slice(equation), primitives.as_while(equation)
        if cut is not None and memories.is_on_host(operands[0]):
            starts, ends, strides = cut
            part = memories.to_device(lax.slice(operands[0], starts, ends))
            return [lax.slice(part, [0] * part.ndim, part.shape, strides)]
        if loop is not None and not self.host.isdisjoint(equation.outvars):
            return self._run_while(loop, equation.outvars, operands)
        for x in filter(memories.is_on_host, operands):
            if id(x) not in fetched:
                fetched[id(x)] = memories.to_device(x)
        return programs.bind(equation, *(fetched.get(id(x), x) for x in operands))

    def _run_while(
        self, loop: primitives.While, made: Sequence[Variable], operands: Sequence[Value]
    ) -> list[Value]:
        """Run a loop whose body runs by rows, so that a loop of no turn moves nothing."""
        of_condition, of_body, carry = loop.split(operands)
        condition, body = (Call(x, [], False) for x in (loop.condition, loop.body))

        def is_next(carry: list[Value]) -> Value:
            return _run_open(condition, self.platform, *of_condition, *carry)[0]

        def run_body(carry: list[Value], constants: Sequence[Value]) -> list[Value]:
            return _run_open(body, self.platform, *constants, *carry)

        def turn(carry: list[Value]) -> list[Value]:
            return run_by_rows(run_body, (carry, of_body), self.divide, self.platform)

        return lax.while_loop(is_next, turn, self._place(carry, made))

    def _place(self, values: Iterable[Value], homes: Iterable[Variable | None]) -> list[Value]:
        """Return each value in the memory where the variable beside it lies."""
        return [
            memories.to_host(x) if home in self.host else memories.to_device(x)
            for x, home in zip(values, homes, strict=False)
        ]

    def _find_phases(self) -> tuple[dict[int, int], defaultdict[int, set[Variable]]]:
        """Return the phase of each equation that runs outside of loops, by id, and for each phase
        the variables that its loops make for later equations."""
        phases: dict[int, int] = {}
        wanted: defaultdict[int, set[Variable]] = defaultdict(set)
        phase_of: defaultdict[Atom, int] = defaultdict(int)
        looped: set[Variable] = set()
        for equation in self.equations:
            rule = self.rules.get(id(equation), {})
            reads = variables(equation.invars)
            waits = [v for v in reads if v in looped and (v in self.folds or not rule.get(v))]
            for v in waits:
                wanted[phase_of[v]].add(v)
            phase = max([0, *(phase_of[v] for v in reads), *(phase_of[v] + 1 for v in waits)])
            phase_of |= dict.fromkeys(equation.outvars, phase)
            if any(by_row and (v in self.host or v in looped) for v, by_row in rule.items()):
                looped.update(equation.outvars)
            else:
                phases[id(equation)] = phase
        for v in looped.intersection(variables(self.program.outputs)):
            wanted[phase_of[v]].add(v)
        return phases, wanted

    def _find_loop(self, results: Sequence[Variable]) -> tuple[list[Equation], list[Variable]]:
        """Return the equations that make some variables from known values and from the results of
        earlier loops, in order, and the variables that they read by row."""
        stack, found, rows = [*results], set(), dict[Variable, None]()
        while stack:
            v = stack.pop()
            is_known = v in self.kept or (v in self.folds and v not in results)
            number = None if is_known else self.makers.get(v)
            if number is None:
                rows[v] = None
            elif number not in found:
                found.add(number)
                rule = self.rules[id(self.equations[number])]
                stack += [v for v, by_row in rule.items() if by_row]
        return [self.equations[i] for i in sorted(found)], [*rows]

    def _group_results(self, wanted: Iterable[Variable]) -> list[list[Variable]]:
        """Return the variables that loops make, in a group for each loop: those that read an array
        in common."""
        groups: list[tuple[set[Variable], list[Variable]]] = []
        for v in sorted(wanted, key=self.makers.__getitem__):
            reads = {*self._find_loop([v])[1]}
            joined = [group for group in groups if not group[0].isdisjoint(reads)]
            groups = [group for group in groups if group[0].isdisjoint(reads)]
            results = [*itertools.chain.from_iterable(made for _, made in joined), v]
            groups.append((reads.union(*(rows for rows, _ in joined)), results))
        return [results for _, results in groups]

    def _run_loop(
        self, equations: list[Equation], rows: list[Variable], results: list[Variable]
    ) -> None:
        """Make the results of a loop, each in place of the array that it replaces, if there is one.

        Args:
          equations: the equations of the loop, in order.
          rows: the arrays that they read by row.
          results: their results that are kept.
        """
        shape = max((type_of(v).shape for v in (*rows, *results)), key=math.prod)
        view = _View.of(shape, *self.divide(shape))
        folds = [self.folds.get(v) for v in results]
        replaced = [None if v in self.folds else self.replaced.get(v) for v in results]
        # A loop must read an array that it overwrites from its carry: another use would keep a
        # copy.
        fixed = {v: view.split(self.values[v]) for v in rows if v not in replaced}

        def run_chunk(start: Value, size: int, carry: list[Value]) -> list[Value]:
            arrays = fixed | {v: x for v, x in zip(replaced, carry, strict=True) if v in rows}
            made = {v: memories.to_device(view.cut(x, start, size)) for v, x in arrays.items()}
            for equation in equations:
                rule = self.rules[id(equation)]
                given = {v: (made if by_row else self.values)[v] for v, by_row in rule.items()}
                cut, instead = primitives.cut_rows(equation, view.devices * size), {}
                if primitives.counts_rows(cut):
                    instead[id(cut)] = partial(view.number, cut, start, size)
                made |= run_equations([cut], given, instead)
            return [
                view.put(x, made[v], start) if fold is None else fold.join(x, made[v])
                for v, fold, x in zip(results, folds, carry, strict=True)
            ]

        def turn(i: Value, carry: list[Value]) -> list[Value]:
            return run_chunk(i * view.size, view.size, carry)

        turns, rest = divmod(view.rows, view.size)
        begin = [self._begin(v, view) for v in results]
        carry = turn(0, begin) if turns == 1 else lax.fori_loop(0, turns, turn, begin)
        carry = run_chunk(view.rows - rest, rest, carry) if rest else carry
        for v, fold, x in zip(results, folds, carry, strict=True):
            self.values[v] = view.join(x) if fold is None else x

    def _begin(self, v: Variable, view: "_View") -> Value:
        """Make the array for a variable of a loop: the array that it replaces, split, or a new
        one."""
        shape, dtype, old = type_of(v).shape, type_of(v).dtype, self.replaced.get(v)
        if v in self.folds:
            return jnp.full(shape, self.folds[v].first, dtype)
        return view.split(jnp.zeros(shape, dtype) if old is None else self.values[old])


class _View(NamedTuple):
    """An array as (devices, rows, …): each device has `rows` rows, and a chunk `size` of them."""

    devices: int
    rows: int
    size: int

    @classmethod
    def of(cls, shape: tuple[int, ...], devices: int, others: int) -> "_View":
        """Return the view for chunks of at most about `CHUNK` bytes of an array of four bytes an
        entry, whose other axes `others` devices divide."""
        devices = devices if shape[0] % devices == 0 else 1
        rows = shape[0] // devices
        least = -(-rows * math.prod(shape[1:]) * 4 // (others * CHUNK))
        # Up to twice as many equal chunks, before a smaller one at the end.
        even = [n for n in range(least, min(2 * least, rows) + 1) if rows % n == 0]
        return cls(devices, rows, rows // even[0] if even else max(1, rows // least))

    def split(self, x: Value) -> Value:
        """Return an array as (devices, rows, …)."""
        return x.reshape(self.devices, self.rows, *x.shape[1:])

    def join(self, x: Value) -> Value:
        """Return a split array as it was."""
        return x.reshape(self.devices * self.rows, *x.shape[2:])

    def cut(self, x: Value, start: Value, size: int) -> Value:
        """Return rows of each device in a split array, in the order of devices."""
        rows = lax.dynamic_slice_in_dim(x, start, size, 1)
        return rows.reshape(self.devices * size, *x.shape[2:])

    def put(self, x: Value, rows: Value, start: Value) -> Value:
        """Return a split array with new rows, which go to its memory."""
        rows = memories.to_host(rows) if memories.is_on_host(x) else rows
        rows = rows.reshape(self.devices, -1, *x.shape[2:])
        return lax.dynamic_update_slice_in_dim(x, rows, start, 1)

    def number(self, equation: Equation, start: Value, size: int) -> list[Value]:
        """Return the result of an equation that counts rows, for the same rows as `cut`."""
        like = type_of(equation.outvars[0])
        first = jnp.arange(self.devices)[:, None] * self.rows
        numbers = (first + start + jnp.arange(size)).reshape(-1).astype(like.dtype)
        return [lax.broadcast_in_dim(numbers, (len(numbers), *like.shape[1:]), (0,))]
