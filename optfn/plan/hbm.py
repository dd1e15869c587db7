"""Bytes that an instruction reads from a device's main memory (HBM) and writes to it.

A fusion reads slices of operands and updates results in place, so the types of its operands and
results say too much: its computation is read as well.
"""

import functools

from optfn.plan.hlo import Computation, Instruction, Program, read_arrays

# Instructions that neither compute nor move: names, views, and the ends of asynchronous ones.
FREE = {
    "parameter", "constant", "tuple", "get-tuple-element", "bitcast", "iota", "after-all",
    "opt-barrier", "optimization-barrier", "add-dependency", "partition-id", "replica-id",
    "copy-done", "slice-done", "async-done", "async-update", "all-reduce-done", "all-gather-done",
}  # fmt: skip
COPIES = {"copy-start", "slice-start", "async-start"}
SLICES = {"slice", "dynamic-slice", "gather"}
VIEWS = {"bitcast", "reshape", "copy"}


class Traffic:
    """The bytes that the instructions of a program move."""

    def __init__(self, program: Program) -> None:
        self.computations = program.computations
        self._of_fusion = functools.cache(self._count_fusion_bytes)

    def num_bytes(self, x: Instruction, home: Computation) -> float:
        """Return the bytes of HBM that an instruction of the computation `home` reads and writes. A
        slice or an update in place counts only its part."""
        shapes = [home[name].shape for name in x.operands if name in home]
        if x.opcode in COPIES:  # a slice may go to fast memory, or come from it
            ends = [end for end in read_arrays(x.shape) if end.shape][:2]
            sizes = [end.tiled_bytes for end in ends]
            return min(sizes, default=0) * sum(end.hbm_bytes > 0 for end in ends)
        # Of the larger operand of these, only the slice is read or overwritten.
        if x.opcode in SLICES:
            return 2 * _total(x.shape)
        if x.opcode == "dynamic-update-slice":
            return 2 * _total(shapes[1])
        reads = [_total(shape) for shape in shapes]
        written = _total(x.result)
        if x.opcode in ("fusion", "fusion-start"):
            within, results = self._of_fusion(x.called[0])
            reads = [min(read, within.get(i, read)) for i, read in enumerate(reads)]
            written = min(written, results)
        return sum(reads) + written

    def _count_fusion_bytes(self, name: str) -> tuple[dict[int, float], float]:
        """Return the bytes that a fusion reads of each operand that it only slices, by its number,
        and the bytes that it writes."""
        body = self.computations[name]
        within = {}
        for x in body.values():
            if x.opcode == "parameter":
                found = self._count_read_slices(body, x.name)
                if found is not None:
                    within[int(x.argument)] = found
        root = next(x for x in body.values() if x.is_root)
        return within, self._count_written(body, root)

    def _count_read_slices(self, body: Computation, name: str) -> float | None:
        """Return the bytes of the slices that a fusion reads of a value, or None if it reads all of
        it."""
        total = 0.0
        for x in body.values():
            for i in (i for i, operand in enumerate(x.operands) if operand == name):
                read: float | None = None
                if x.opcode in SLICES and i == 0:
                    read = _total(x.shape)
                elif x.opcode in ("dynamic-update-slice", "scatter") and i == 0:
                    read = 0.0
                elif x.opcode in VIEWS:
                    read = self._count_read_slices(body, x.name)
                elif x.opcode == "fusion":
                    read = self._of_fusion(x.called[0])[0].get(i)
                if read is None:
                    return None
                total += read
        return total

    def _count_written(self, body: Computation, x: Instruction) -> float:
        """Return the bytes that a fusion writes for its result x: an update in place writes only
        its slice."""
        if x.opcode == "dynamic-update-slice":
            return _total(body[x.operands[1]].shape)
        if x.opcode == "scatter":
            return _total(body[x.operands[-1]].shape)
        if x.opcode == "tuple":
            return sum(self._count_written(body, body[name]) for name in x.operands)
        if x.opcode == "bitcast":
            return self._count_written(body, body[x.operands[0]])
        return self._of_fusion(x.called[0])[1] if x.opcode == "fusion" else _total(x.shape)


def _total(shape: str) -> float:
    """Return the bytes in HBM of all arrays of a type, with the padding of tiles."""
    return sum(array.hbm_bytes for array in read_arrays(shape))
