"""A function whose arguments lie in the memory of the host, run in loops over chunks of rows.

A program that fetches its arguments from the host is no smaller for it: XLA schedules nearly all of
the fetches first. It does not move operations out of a loop that updates its carry. So the
equations of the function that work on each row alone run in one loop for each leaf, which fetches,
computes and stores a chunk at a time:

    equations    row rules?    yes, and read host arrays:  loops
                               no, or read none:           as they are, between the loops

An equation that needs the result of a loop as a whole, such as a norm, waits for this loop, and the
loops that need its own result come after it. They are the phases of a program. An array on the host
that such an equation reads is fetched whole.
"""

import dataclasses
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from optfn.core.types import PyTree
from optfn.loss.jaxprs.equations import (
    Environment,
    Equations,
    Override,
    Value,
    bind,
    bindings,
    read,
    run_equations,
    variables,
)
from optfn.loss.jaxprs.primitives import (
    Atom,
    Call,
    Equation,
    Variable,
    as_call,
    as_platform_branch,
    as_row_rule,
    as_slice,
    counts_rows,
    cut_rows,
    find_bound_axes,
    is_barrier,
    type_of,
)
from optfn.mesh.compilers import memories

# From the shape of an array to how many devices divide its first axis, and all others together.
Divide = Callable[[tuple[int, ...]], tuple[int, int]]

CHUNK = 16 << 20  # bytes of a chunk of one array, on one device


def run_by_rows(
    fn: Callable[..., Any], args: Sequence[PyTree], divide: Divide, platform: str
) -> PyTree:
    """Return fn(*args), traced, with loops over chunks of the arguments that lie on the host.

    Args:
      fn: a function of trees of arrays, whose result begins with the leaves that replace those of
        its arguments, in order. They are updated in place, and lie in the same memory.
      args: its arguments.
      divide: how devices divide an array of a shape.
      platform: the platform whose branches run, as `jax.lax.platform_dependent` names it.
    """
    leaves = jax.tree.leaves(args)
    on_host = [memories.is_on_host(x) for x in leaves]
    if not any(on_host):
        return fn(*args)
    types = jax.tree.map(memories.type_on_device, args)
    program = Equations(fn, *types, inline=False)
    program = program.retrace(_open(program.equations, platform), jax.tree.leaves(types))
    return _RowProgram(program, leaves, on_host, divide).run()


def _open(equations: Iterable[Equation], platform: str) -> dict[int, Override]:
    """Return what runs in place of equations so that those inside of calls show: the equations of
    each call and of the branches for a platform, and a barrier for each array."""
    found: dict[int, Override] = {}
    for equation in equations:
        call = None if find_bound_axes(equation) else as_call(equation)
        branch = as_platform_branch(equation, platform)
        if is_barrier(equation):
            found[id(equation)] = lambda *x: list(map(lax.optimization_barrier, x))
        elif call is not None:
            found[id(equation)] = partial(_run_open, call, platform)
        elif branch is not None:
            found[id(equation)] = lambda _, *x, of=branch: _run_open(of, platform, *x)
    return found


def _run_open(call: Call, platform: str, *operands: Value) -> list[Value]:
    """Run the equations of a call as `_open` says, and return its results."""
    values = bindings(call.body.constvars, call.constants)
    values |= bindings(call.body.invars, operands)
    equations = call.body.eqns
    return read(run_equations(equations, values, _open(equations, platform)), call.body.outvars)


@dataclasses.dataclass(frozen=True)
class _Loop:
    """Equations that run on the rows of one leaf.

    equations: in order.
    rows: the arrays that they read by row.
    results: those of their results that are kept.
    """

    equations: list[Equation]
    rows: list[Variable]
    results: list[Variable]


@dataclasses.dataclass(frozen=True)
class _RowProgram:
    """A program with arguments on the host.

    program: its equations.
    leaves: its arguments.
    on_host: whether each lies on the host, and with it the result in its place.
    divide: how devices divide an array of a shape.
    """

    program: Equations
    leaves: Sequence[Value]
    on_host: Sequence[bool]
    divide: Divide

    @cached_property
    def equations(self) -> list[Equation]:
        """The equations that count."""
        return self.program.find_live_equations()

    @cached_property
    def host(self) -> set[Variable]:
        """The arguments on the host."""
        return {
            v for v, is_there in zip(self.program.inputs, self.on_host, strict=True) if is_there
        }

    @cached_property
    def rules(self) -> dict[int, tuple[bool, ...]]:
        """The row rules of equations that have one and read no array on the host as a whole, by
        id."""
        found = {}
        for equation in self.equations:
            rule = as_row_rule(equation)
            if rule is None:
                continue
            by_row = {*variables(a for a, r in zip(equation.invars, rule, strict=True) if r)}
            whole = {*variables(a for a, r in zip(equation.invars, rule, strict=True) if not r)}
            if not whole & (by_row | self.host):
                found[id(equation)] = rule
        return found

    @cached_property
    def makers(self) -> dict[Variable, int]:
        """The number of the equation with a row rule that makes each variable."""
        made = ((e.outvars, i) for i, e in enumerate(self.equations) if id(e) in self.rules)
        return {v: i for outvars, i in made for v in outvars}

    @cached_property
    def replaced(self) -> dict[Variable, int]:
        """The number of the argument that each result replaces, one on the host if there are
        several."""
        pairs = list(zip(self.program.outputs, range(len(self.leaves)), strict=False))
        ordered = sorted(pairs, key=lambda pair: self.on_host[pair[1]])
        return {v: i for v, i in ordered if variables([v])}

    def run(self) -> PyTree:
        """Return the result of the program."""
        phases, wanted = self._find_phases()
        values = self.program.constants | bindings(self.program.inputs, self.leaves)
        fetched: dict[int, Value] = {}
        kept: set[Variable] = set()
        for phase in range(max([*phases.values(), *wanted], default=0) + 1):
            now = [e for e in self.equations if phases.get(id(e)) == phase]
            values = run_equations(now, values, rule=partial(_bind_fetched, fetched))
            for loop in self._join_loops(wanted[phase], kept):
                values |= self._run_loop(loop, values)
            kept |= wanted[phase]
        results = read(values, self.program.outputs)
        for i, is_there in enumerate(self.on_host[: len(results)]):
            move = memories.to_host if is_there else memories.to_device
            if memories.is_on_host(results[i]) != is_there:
                results[i] = move(results[i])
        for i in range(len(self.on_host), len(results)):
            results[i] = memories.to_device(results[i])
        return jax.tree.unflatten(self.program.structure, results)

    def _find_phases(self) -> tuple[dict[int, int], defaultdict[int, set[Variable]]]:
        """Return the phase of each equation that runs outside of loops, by id, and for each phase
        the variables that its loops make for others."""
        phases: dict[int, int] = {}
        wanted: defaultdict[int, set[Variable]] = defaultdict(set)
        phase_of: defaultdict[Atom, int] = defaultdict(int)
        looped: set[Variable] = set()
        for equation in self.equations:
            operands = variables(equation.invars)
            rule = self.rules.get(id(equation))
            by_row = {a for a, r in zip(equation.invars, rule or (), strict=False) if r is True}
            is_looped = not by_row.isdisjoint(self.host | looped) if rule else False
            waits = [v for v in operands if v in looped and v not in by_row]
            for v in waits:
                wanted[phase_of[v]].add(v)
            later = [phase_of[v] + 1 for v in waits]
            phase = max([*later, *(phase_of[v] for v in operands)], default=0)
            phase_of |= dict.fromkeys(equation.outvars, phase)
            if is_looped:
                looped.update(equation.outvars)
            else:
                phases[id(equation)] = phase
        for v in variables(self.program.outputs):
            if v in looped:
                wanted[phase_of[v]].add(v)
        return phases, wanted

    def _find_loop(self, results: Iterable[Variable], kept: set[Variable]) -> _Loop:
        """Return the loop that makes some variables from what is known and from the results of
        earlier loops."""
        stack, found, rows = [*results], set(), dict[Variable, None]()
        while stack:
            v = stack.pop()
            number = None if v in kept else self.makers.get(v)
            if number is None:
                rows[v] = None
            elif number not in found:
                found.add(number)
                equation = self.equations[number]
                rule = self.rules[id(equation)]
                by_row = zip(equation.invars, rule, strict=True)
                stack += variables(a for a, is_by_row in by_row if is_by_row)
        return _Loop([self.equations[i] for i in sorted(found)], [*rows], [*results])

    def _join_loops(self, wanted: Iterable[Variable], kept: set[Variable]) -> list[_Loop]:
        """Return the loops that make the wanted variables, one for all that read an array in
        common."""
        order = {v: i for i, e in enumerate(self.equations) for v in e.outvars}
        groups: list[tuple[set[Variable], list[Variable]]] = []
        for v in sorted(wanted, key=order.__getitem__):
            read, made = {*self._find_loop([v], kept).rows}, [v]
            others = []
            for rows, results in groups:
                if rows.isdisjoint(read):
                    others.append((rows, results))
                else:
                    read, made = read | rows, [*results, *made]
            groups = [*others, (read, made)]
        return [self._find_loop(made, kept) for _, made in groups]

    def _run_loop(self, loop: _Loop, values: Environment) -> Environment:
        """Return the results of a loop, each in place of the array that it replaces if it has the
        same shape and dtype."""
        shapes = [type_of(v).shape for v in (*loop.rows, *loop.results)]
        shape = max(shapes, key=math.prod)
        devices, others = self.divide(shape)
        view = _View.of(shape, devices, others)
        begin = [view.split(self._find_storage(v, values)) for v in loop.results]
        # What a loop overwrites it must read from its carry: another use would keep a copy.
        carried = {}
        for i, v in enumerate(loop.results):
            old = self.program.inputs[self.replaced[v]] if v in self.replaced else None
            if old in loop.rows and _are_alike(old, v):
                carried[old] = i
        fixed = {v: view.split(values[v]) for v in loop.rows if v not in carried}

        def run_chunk(start: Value, size: int, carry: list[Value]) -> list[Value]:
            arrays = fixed | {v: carry[i] for v, i in carried.items()}
            known = {v: memories.to_device(view.cut(x, start, size)) for v, x in arrays.items()}
            numbers = partial(view.number, start, size)
            made = self._run_rows(loop.equations, known, values, size * view.devices, numbers)
            stored = []
            for v, x in zip(loop.results, carry, strict=True):
                chunk = memories.to_host(made[v]) if memories.is_on_host(x) else made[v]
                stored.append(view.put(x, chunk, start))
            return stored

        def turn(i: Value, carry: list[Value]) -> list[Value]:
            return run_chunk(i * view.size, view.size, carry)

        end = view.rows - view.rows % view.size
        carry = (
            turn(0, begin) if end == view.size else lax.fori_loop(0, end // view.size, turn, begin)
        )
        if end < view.rows:
            carry = run_chunk(end, view.rows - end, carry)
        return {v: view.join(x) for v, x in zip(loop.results, carry, strict=True)}

    def _find_storage(self, v: Variable, values: Environment) -> Value:
        """Return an array for a result of a loop: the one that it replaces, or zeros."""
        number = self.replaced.get(v)
        if number is not None and _are_alike(self.program.inputs[number], v):
            return self.leaves[number]
        blank = jnp.zeros(type_of(v).shape, type_of(v).dtype)
        return memories.to_host(blank) if number is not None and self.on_host[number] else blank

    def _run_rows(
        self,
        equations: Iterable[Equation],
        known: Environment,
        values: Environment,
        count: int,
        numbers: Callable[[], Value],
    ) -> Environment:
        """Run equations on some rows, and return their results.

        Args:
          equations: the equations, in order.
          known: the rows of what they read by row.
          values: what they read as a whole.
          count: how many rows.
          numbers: returns their numbers.
        """
        known = dict(known)
        for equation in equations:
            operands = zip(equation.invars, self.rules[id(equation)], strict=True)
            given = {
                a: (known if is_row else values)[a] for a, is_row in operands if variables([a])
            }
            cut = cut_rows(equation, count)
            instead = (
                {id(cut): lambda cut=cut: [_count(cut, numbers())]} if counts_rows(cut) else None
            )
            made = run_equations([cut], given, instead)
            known |= {v: made[v] for v in equation.outvars}
        return known


@dataclasses.dataclass(frozen=True)
class _View:
    """An array as (devices, rows, …), of which each device has `rows` rows, a `size` at a time.

    With one device along the first axis, it is the array as it is.
    """

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
        # Twice as many equal chunks before a smaller one at the end.
        even = [n for n in range(least, min(2 * least, rows) + 1) if rows % n == 0]
        return cls(devices, rows, rows // even[0] if even else max(1, rows // least))

    def split(self, x: Value) -> Value:
        """Return an array as (devices, rows, …)."""
        return x if self.devices == 1 else x.reshape(self.devices, self.rows, *x.shape[1:])

    def join(self, x: Value) -> Value:
        """Return a split array as it was."""
        return x if self.devices == 1 else x.reshape(self.devices * self.rows, *x.shape[2:])

    @property
    def axis(self) -> int:
        """The axis of a device's rows."""
        return int(self.devices > 1)

    def cut(self, x: Value, start: Value, size: int) -> Value:
        """Return rows of each device in a split array, one device after the other."""
        rows = lax.dynamic_slice_in_dim(x, start, size, self.axis)
        return rows if self.devices == 1 else rows.reshape(self.devices * size, *x.shape[2:])

    def put(self, x: Value, rows: Value, start: Value) -> Value:
        """Return a split array with other rows."""
        if self.devices > 1:
            rows = rows.reshape(self.devices, -1, *x.shape[2:])
        return lax.dynamic_update_slice_in_dim(x, rows, start, self.axis)

    def number(self, start: Value, size: int) -> Value:
        """Return the numbers of these rows in the array."""
        first = jnp.arange(self.devices)[:, None] * self.rows
        return (first + start + jnp.arange(size)[None]).reshape(-1)


def _count(equation: Equation, numbers: Value) -> Value:
    """Return the result of an equation that counts rows, for rows with these numbers."""
    like = type_of(equation.outvars[0])
    shape = (len(numbers), *like.shape[1:])
    return lax.broadcast_in_dim(numbers.astype(like.dtype), shape, (0,))


def _are_alike(a: Variable, b: Variable) -> bool:
    """Tell whether two variables have the same shape and dtype."""
    (x, y) = type_of(a), type_of(b)
    return bool(x.shape == y.shape and x.dtype == y.dtype)


def _bind_fetched(fetched: dict[int, Value], equation: Equation, *operands: Value) -> list[Value]:
    """Run an equation with those of its operands fetched that lie on the host.

    Of a slice only its part is fetched.

    Args:
      fetched: the arrays that have been fetched, by the id of the one on the host.
      equation: the equation.
      *operands: its operands.
    """
    cut = as_slice(equation)
    if cut is not None and memories.is_on_host(operands[0]):
        starts, ends, strides = cut
        part = memories.to_device(lax.slice(operands[0], starts, ends))
        return [lax.slice(part, [0] * part.ndim, part.shape, strides)]

    for x in filter(memories.is_on_host, operands):
        if id(x) not in fetched:
            fetched[id(x)] = memories.to_device(x)
    return bind(equation, *(fetched.get(id(x), x) for x in operands))
