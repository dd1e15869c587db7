"""FLOPs of the products of matrices in a program, counted from its equations."""

import math

from optfn.estimate.products import count_pairs
from optfn.jaxprs.equations import (
    RECOMPUTED,
    Equation,
    Jaxpr,
    find_inner_jaxprs,
    kind_of,
    options_of,
    type_of,
)

# Kernels and library calls, whose products no equation shows.
_OPAQUE = ("pallas_call", "ffi_call", "dot_product_attention", "scaled_matmul", "tpu_custom_call")


class UncountableError(Exception):
    """The equations of a program do not tell its FLOPs."""


def count_product_flops(equation: Equation) -> float | None:
    """Return the FLOPs of a product or a convolution, 2 for each multiply-add; None for others.

    The holes and the padding of a convolution, such as the gradient of a strided one has, do not
    count.
    """
    name = equation.primitive.name
    if name == "dot_general":
        (contracted, _), _ = equation.params["dimension_numbers"]
        return 2.0 * _size(equation) * _lengths(equation, contracted)
    if name == "ragged_dot_general":
        numbers = equation.params["ragged_dot_dimension_numbers"]
        (contracted, _), _ = numbers.dot_dimension_numbers
        # Groups along a contracted dimension divide it: all groups have its length together.
        is_divided = set(numbers.lhs_ragged_dimensions) <= set(contracted)
        groups = type_of(equation.outvars[0]).shape[0] if is_divided else 1
        return 2.0 * _size(equation) * _lengths(equation, contracted) / groups
    if name == "conv_general_dilated":
        return _count_convolution(equation)
    return None


def count_model_flops(jaxpr: Jaxpr, left_out: str) -> float:
    """Return the FLOPs of the products of a program on all devices; a loop counts all its turns.

    Products that run again in the backward pass under `jax.checkpoint` do not count, nor do those
    under the `jax.named_scope` called `left_out`. Inside `shard_map` each device counts.

    Raises:
      UncountableError: a kernel, a loop of an unknown number of turns, or branches with different
        products.
    """
    return sum(_count_equation(equation, left_out) for equation in jaxpr.eqns)


def _count_equation(equation: Equation, left_out: str) -> float:
    names = str(equation.source_info.name_stack)
    if RECOMPUTED in names or left_out in names:
        return 0.0
    flops = count_product_flops(equation)
    if flops is not None:
        return flops
    name, params = kind_of(equation), options_of(equation)
    if name.startswith(_OPAQUE):
        raise UncountableError(f"the products of {name} are not known")
    inner = [count_model_flops(jaxpr, left_out) for jaxpr in find_inner_jaxprs(equation)]
    if name == "while" and any(inner):
        raise UncountableError("a while loop does not say how often it runs")
    if name == "cond":
        if len({*inner}) > 1:
            raise UncountableError("the branches of a cond have different products")
        return inner[0]
    times = params["length"] if name == "scan" else 1
    if name == "shard_map":
        times = math.prod(params["mesh"].shape[axis] for axis in params["newly_manual_axes"])
    return sum(inner) * times


def _size(equation: Equation) -> int:
    return math.prod(type_of(equation.outvars[0]).shape)


def _lengths(equation: Equation, dims: tuple[int, ...]) -> int:
    left = type_of(equation.invars[0]).shape
    return math.prod(left[i] for i in dims)


def _count_convolution(equation: Equation) -> float:
    params = equation.params
    lhs, rhs = (type_of(x).shape for x in equation.invars)
    result = type_of(equation.outvars[0]).shape
    left, right, out = params["dimension_numbers"]
    flops = 2.0 * result[out[0]] * result[out[1]] * rhs[right[1]]
    for i, (stride, pad, hole, apart) in enumerate(
        zip(
            params["window_strides"], params["padding"], params["lhs_dilation"],
            params["rhs_dilation"], strict=True,
        ), 2,
    ):  # fmt: skip
        flops *= count_pairs(
            lhs[left[i]], result[out[i]], rhs[right[i]],
            stride=stride, low=pad[0], hole=hole, apart=apart,
        )  # fmt: skip
    return flops
