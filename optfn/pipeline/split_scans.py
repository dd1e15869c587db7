"""Scans split in two: the first computes all that some results need, the second all the rest."""

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.extend.core as jex

from optfn.loss.jaxprs.equations import Equations, Value, bind, bindings, read, shapes_of, variables
from optfn.loss.jaxprs.primitives import Atom, Equation, Scan, Variable, as_scan


def split_scans(program: Equations, targets: Iterable[Atom]) -> Equations:
    """Trace `program` again with each scan split in two, except scans that cannot be split. The
    first scan of two computes all that `targets` need."""
    needed = program.find_dependencies(targets)
    scans = [(e, scan) for e in program.equations if (scan := as_scan(e)) is not None]
    instead = {id(e): partial(_run_split_scan, e, scan, needed) for e, scan in scans}
    return program.retrace(instead, shapes_of(program.inputs))


def _run_split_scan(
    equation: Equation, given: Scan, needed: set[Variable], *operands: Value
) -> list[Value]:
    """Run a scan in two, the first for results in `needed` and the second for the remaining ones,
    or whole if it has effects or one of the two would be empty."""
    if given.body.effects:
        return bind(equation, *operands)
    scan = _Scan.of(given, operands)
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
    def of(cls, scan: Scan, operands: Sequence[Value]) -> "_Scan":
        """Trace the body of a scan into equations, and return it with the values of the scan's
        operands."""
        body = Equations(jex.jaxpr_as_fun(scan.body), *shapes_of(scan.body.jaxpr.invars))
        return cls(body, scan.options, *scan.split(operands))

    def outputs(self, positions: Iterable[int]) -> list[Atom]:
        """Return the body's output variables at these positions, in ascending order."""
        return [self.body.outputs[i] for i in sorted(positions)]

    def carry_inputs(self, positions: Iterable[int]) -> list[Variable]:
        """Return the body's input variables of the carries at these positions, in ascending order
        and without stacked outputs, which have none."""
        start = len(self.constants)
        return [self.body.inputs[start + i] for i in sorted(positions) if i < len(self.init)]

    def close_over_carries(self, positions: set[int]) -> set[int]:
        """Return `positions`, and the positions of all carries that these outputs depend on,
        directly or through carries."""
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
        """Run a scan of some equations of this one's body, and return the outputs that they compute
        by position, and the stacked values to pass on.

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
