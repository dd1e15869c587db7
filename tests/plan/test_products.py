"""FLOPs of products in the forms that compilers write, beside those of the matrices."""

import math

import pytest

from optfn.plan.hlo import Program
from optfn.plan.products import find_products


def flops(line, *shapes, before=""):
    operands = "\n".join(f"  %p{i} = {x} parameter({i})" for i, x in enumerate(shapes))
    program = Program(f"{before}\nENTRY %e () -> () {{\n{operands}\n  %x = {line}\n}}\n")
    home = program.computations["e"]
    return [*find_products(program, home["x"], home)]


# The products of heads of attention, a batch of 32, as a TPU's compiler writes them.
HEADS = 2 * 32 * 2048 * 2048 * 128
CONVOLUTIONS = {
    "plain": (
        "bf16[8,16] convolution(%p0, %p1), dim_labels=bf_io->bf", ("bf16[8,4]", "bf16[4,16]"),
        2 * 8 * 4 * 16,
    ),
    "a batch with holes": (
        "f32[32,2048,2048] convolution(%p0, %p1), window={size=32 stride=31 lhs_dilate=32}, "
        "dim_labels=b0f_o0i->0bf",
        ("bf16[2048,32,128]", "bf16[2048,32,128]"), HEADS,
    ),
    "a batch of results with padding": (
        "bf16[2048,32,128] convolution(%p0, %p1), window={size=32 pad=31_31 rhs_reversal=1}, "
        "dim_labels=bf0_0oi->b0f",
        ("bf16[2048,4096,1]", "bf16[32,128,4096]"), 2 * 2048 * 4096 * 32 * 128,
    ),
    "holes and padding": (
        "bf16[32,2048,2048] convolution(%p0, %p1), "
        "window={size=32 stride=32 pad=31_31 lhs_dilate=31 rhs_reversal=1}, "
        "dim_labels=b0f_0io->0fb",
        ("bf16[2048,32,128]", "bf16[32,128,2048]"), HEADS,
    ),
    "two parts of a sum": (
        "bf16[2048,11008,1] convolution(%p0, %p1), window={size=2}, dim_labels=b0f_0io->bf0",
        ("bf16[2048,2,256]", "bf16[2,256,11008]"), 2 * 2048 * 512 * 11008,
    ),
    "an image": (
        "f32[1,6,7,8] convolution(%p0, %p1), window={size=3x1 pad=0_0x0_0}, "
        "dim_labels=b01f_01io->b01f",
        ("f32[1,8,7,4]", "f32[3,1,4,8]"), 2 * 6 * 7 * 8 * 3 * 4,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_products_of_a_tpu_are_convolutions(name):
    line, shapes, expected = CONVOLUTIONS[name]
    (found,) = flops(line, *shapes)
    assert found.flops == expected and found.bits == (32 if name == "an image" else 16)


def test_products_of_a_gpu():
    dims = (
        "lhs_batch_dims={0}, lhs_contracting_dims={2}, rhs_batch_dims={0}, rhs_contracting_dims={1}"
    )
    (dot,) = flops(f"f32[3,4,6] dot(%p0, %p1), {dims}", "f32[3,4,5]", "f32[3,5,6]")
    assert dot.flops == 2 * math.prod((3, 4, 5, 6)) and not dot.is_recomputed
    (gemm,) = flops(
        '(bf16[4,6], s8[99]) custom-call(%p0, %p1), custom_call_target="__cublas$gemm", '
        'backend_config={"gemm_backend_config":{"dot_dimension_numbers":'
        '{"lhs_contracting_dimensions":["1"],"rhs_contracting_dimensions":["0"]}}}',
        "bf16[4,5]",
        "bf16[5,6]",
    )
    assert gemm.flops == 2 * 4 * 5 * 6


def test_products_in_fusions_and_what_runs_again():
    inner = """
%inner () -> f32[] {
  %a = bf16[8,8] parameter(0)
  %d = bf16[8,8] dot(%a, %a), lhs_contracting_dims={1}, metadata={op_name="jit/checkpoint/rematted_computation/dot"}
  ROOT %e.remat = bf16[8,8] dot(%d, %a), lhs_contracting_dims={1}
}

%outer () -> f32[] {
  %a = bf16[8,8] parameter(0)
  ROOT %f = bf16[8,8] fusion(%a), kind=kOutput, calls=%inner
}
"""  # noqa: E501
    found = flops("bf16[8,8] fusion(%p0), kind=kOutput, calls=%outer", "bf16[8,8]", before=inner)
    assert [x.flops for x in found] == [1024, 1024] and all(x.is_recomputed for x in found)
