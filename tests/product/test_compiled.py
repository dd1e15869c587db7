"""What the text of a compiled program says, and the rows of `benchmarks.compiled`.

The recordings are of a loop over three of five layers, each halved in place, and a sum over the
first 128 columns of another array, compiled for a v5e and an H100.
"""

from pathlib import Path

import jax
import pytest

from benchmarks import compiled, hlo

RECORDINGS = Path(__file__).parents[1] / "recordings"
LOOP = 3 * 2 * 4096 * 4096 * 4  # each layer is read and written
SLICE = 1000 * 128 * 2


@pytest.mark.parametrize("target", ["v5e", "H100"])
def test_a_loop_over_slices_counts_what_they_touch(target):
    found = hlo.cost((RECORDINGS / f"scan_{target}.hlo").read_text())
    assert LOOP + SLICE <= found.num_bytes < LOOP + SLICE + 4096  # scalars, and sums of a warp
    assert found.loops == 1


def test_cycles_are_those_of_all_iterations():
    found = hlo.cost((RECORDINGS / "scan_v5e.hlo").read_text())
    assert found.cycles == 3 * 306_828 + 3_533


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        ("f32[5,100]{1,0:T(8,128)}", [8 * 128 * 4]),
        ("f32[5,100]{0,1:T(8,128)}", [104 * 128 * 4]),  # the five lie along 128 lanes
        ("bf16[16,256]{1,0:T(8,128)(2,1)}", [16 * 256 * 2]),
        ("f32[5,100]{1,0:T(8,128)S(1)}", [0]),  # in fast memory
        ("f32[5,100]{1,0}", [2000]),
        ("(f32[10]{0}, s8[3]{0}, pred[])", [40, 3, 1]),
        ("u4[7]{0}", [3.5]),
    ],
)
def test_bytes_of_arrays_with_the_padding_of_tiles(shape, expected):
    assert hlo.hbm_bytes(shape) == expected


PREFETCH = """
ENTRY %main (p: f32[1024]) -> f32[1024] {
  %p = f32[1024]{0:T(1024)} parameter(0)
  %s = (f32[1024]{0:T(1024)S(1)}, f32[1024]{0:T(1024)}, u32[]{:S(2)}) copy-start(%p)
  %d = f32[1024]{0:T(1024)S(1)} copy-done(%s)
  ROOT %n = f32[1024]{0:T(1024)} negate(%d)
}
"""


def test_a_prefetch_into_fast_memory_counts_once():
    assert hlo.cost(PREFETCH) == hlo.Cost(2 * 4096, kernels=2, loops=0, cycles=0)


SLICES = """
ENTRY %main (p: s8[4096,128]) -> s8[1024,128] {
  %p = s8[4096,128]{1,0:T(32,128)(4,1)} parameter(0)
  %s = ((s8[4096,128]{1,0:T(32,128)(4,1)}), s8[1024,128]{1,0:T(32,128)(4,1)S(1)}, s32[]{:S(2)}) slice-start(%p)
  ROOT %d = s8[1024,128]{1,0:T(32,128)(4,1)S(1)} slice-done(%s)
}
"""  # noqa: E501


def test_a_slice_that_goes_to_fast_memory_counts_as_what_it_touches():
    assert hlo.cost(SLICES).num_bytes == 1024 * 128


@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        ("adam", 28),  # p, g, m and v are read, p, m and v written
        ("lamb", 40),  # p, m and v again, behind the norm
        ("lars", 28),
        ("asgd", 12),
        ("adam, bfloat16 moments", 20),
        ("adam, masters of 32 bits", 26),
        ("adam, masters of 24 bits", 24),
        ("model_average(adam)", 52),
    ],
)
def test_floors(rule, expected):
    assert compiled.floor(compiled.RULES[rule], "matrix") == pytest.approx(expected, abs=1e-3)


@pytest.mark.parametrize(("name", "beside"), [("adam",) * 2, ("momentum", "adam"), ("lamb",) * 2])
def test_8_bit_moments_as_a_tpu_compiles_them(name, beside):
    """Within the bound on bytes, without loops, and of no more cycles than a rule in float32."""
    pytest.importorskip("libtpu")
    rules = [beside, f"{name}, int8 moments"]
    wide, small = compiled.found_rows([("v5e", "matrix", rule) for rule in rules])
    assert small["over_floor"] <= small["most"] == 1.3
    assert small["temporaries"] <= 0.3 and small["loops"] == 0
    assert small["cycles"] <= wide["cycles"]


def test_the_floor_of_a_table_is_its_touched_rows():
    rows = compiled.TOUCHED * (64 * 28 + 4) / 1e6  # MB, with an index each
    found = compiled.floor(compiled.rules_of("table of 64")["lazy adam"], "table of 64")
    assert found == pytest.approx(rows, rel=1e-5)


def test_rows_replace_those_of_the_same_programs(tmp_path, monkeypatch):
    monkeypatch.setattr(compiled, "KEPT", tmp_path / "compiled.json")
    monkeypatch.setattr(compiled, "versions", lambda: {"jax": jax.__version__})
    row = {"target": "v5e", "tree": "matrix", "rule": "adam", "bytes": 30.0}
    compiled.keep([row, row | {"tree": "gpt2"}])
    compiled.keep([row | {"bytes": 28.0}])
    assert [(x["tree"], x["bytes"]) for x in compiled.kept()] == [("matrix", 28.0), ("gpt2", 30.0)]
