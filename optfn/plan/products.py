"""FLOPs of the matrix products that an instruction runs."""

import math
import re
from collections.abc import Iterator
from typing import NamedTuple

from optfn.loss.jaxprs.flops import count_pairs
from optfn.loss.jaxprs.primitives import Window
from optfn.plan.hlo import (
    BITS,
    Array,
    Computation,
    Instruction,
    Program,
    read_arrays,
    read_integers,
)

# The compilers mark an operation that runs again in the backward pass in its name.
_RECOMPUTED = re.compile(r"rematted_computation|\.remat\b")


class Product(NamedTuple):
    """A product of matrices: its FLOPs, the bits of an entry, and whether it runs again."""

    flops: float
    bits: int
    is_recomputed: bool


def find_products(program: Program, x: Instruction, home: Computation) -> Iterator[Product]:
    """Yield each dot, convolution and GEMM call that an instruction is or runs, in a computation
    that it calls."""
    for body, y in [(home, x), *program.inside(x)]:
        if y.opcode == "dot":
            contracted = read_integers(y.attribute("lhs_contracting_dims"))
            flops = _dot_flops(y, body, contracted)
        elif y.opcode == "convolution":
            flops = _convolution_flops(y, body)
        elif y.opcode == "custom-call" and is_gemm(y):
            found = re.search(r'"lhs_contracting_dimensions":\[([^\]]*)\]', y.attributes)
            flops = _dot_flops(y, body, read_integers(found[1] if found else ""))
        else:
            continue
        bits = BITS[_operand_array(y, body, 0).dtype]
        yield Product(flops, bits, bool(_RECOMPUTED.search(y.name + y.attributes)))


def is_gemm(x: Instruction) -> bool:
    """Tell whether a custom call is a product of cuBLAS."""
    return x.target.startswith("__cublas$")


def _dot_flops(x: Instruction, home: Computation, contracted: tuple[int, ...]) -> float:
    """Return 2·size of the result·size of the `contracted` dimensions of the left operand."""
    lhs = _operand_array(x, home, 0)
    summed = math.prod(lhs.shape[i] for i in contracted)
    return 2 * read_arrays(x.shape)[0].size * summed


def _convolution_flops(x: Instruction, home: Computation) -> float:
    """Return the FLOPs of a convolution, as a TPU writes all products.

    A batch of products is a convolution with holes or padding, so only pairs of a kernel's place
    and an entry count, none with a hole or with padding.
    """
    lhs, rhs = _operand_array(x, home, 0), _operand_array(x, home, 1)
    result = read_arrays(x.shape)[0]
    labels = re.fullmatch(r"(\w+)_(\w+)->(\w+)", x.attribute("dim_labels"))
    if labels is None:
        raise ValueError(f"estimate_step: dimensions of another form in the convolution {x.name}")
    flops = 2.0 * rhs.shape[labels[2].index("i")]
    flops *= result.shape[labels[3].index("b")] * result.shape[labels[3].index("f")]
    window = x.attribute("window")
    for spatial in filter(str.isdigit, labels[3]):
        size = lhs.shape[labels[1].index(spatial)]
        moves = result.shape[labels[3].index(spatial)]
        flops *= _read_window(window, int(spatial), size, moves)
    return flops


def _read_window(window: str, i: int, size: int, moves: int) -> int:
    """Return the pairs of `count_pairs` along dimension i of a window's text."""

    def setting(name: str, default: str) -> str:
        found = re.search(rf"\b{name}=(\S+)", window)
        return found[1].split("x")[i] if found else default

    kernel, stride, apart = (int(setting(name, "1")) for name in ("size", "stride", "rhs_dilate"))
    low, hole = int(setting("pad", "0_0").split("_")[0]), int(setting("lhs_dilate", "1"))
    return count_pairs(Window(size, moves, kernel, stride, low, hole, apart))


def _operand_array(x: Instruction, home: Computation, i: int) -> Array:
    return read_arrays(home[x.operands[i]].shape)[0]
