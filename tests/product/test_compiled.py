"""What the text of a compiled program says, and the rows of `benchmarks.compiled`.

The recordings are of a loop over three of five layers, each halved in place, and a sum over the
first 128 columns of another array, compiled for a v5e and an H100.
"""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import pytest

from benchmarks import compiled, compiled_exchange, hlo, host, pods, wire

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


def test_the_floor_of_a_table_is_its_touched_rows():
    rows = compiled.TOUCHED * (64 * 28 + 4) / 1e6  # MB, with an index each
    found = compiled.floor(compiled.rules_of("table of 64")["lazy adam"], "table of 64")
    assert found == pytest.approx(rows, rel=1e-5)


def test_rows_replace_those_of_the_same_programs(tmp_path, monkeypatch):
    file = tmp_path / "rows.json"
    kept = compiled.KEPT._replace(file=file, packages=("jax",))
    monkeypatch.setattr(compiled, "KEPT", kept)
    row = {"target": "v5e", "tree": "gpt2", "rule": "adam", "bytes": 30.0}
    for found in (row, row | {"tree": "matrix"}, row | {"bytes": 28.0}, row | {"rule": "of old"}):
        compiled.keep(found)
    assert [(x["tree"], x["bytes"]) for x in kept.rows().values()] == [
        ("matrix", 30.0),
        ("gpt2", 28.0),
    ]
    assert json.loads(file.read_text())["about"] == {"jax": jax.__version__}


ON_A_TPU = """
%scattered.1 (x: f32[8,128]) -> f32[2,128] {
  %x = f32[8,128]{1,0} parameter(0)
  %all = f32[8,128]{1,0} all-reduce(%x), channel_id=1, replica_groups={{0,1,2,3}}, to_apply=%add
  ROOT %mine = f32[2,128]{1,0} dynamic-slice(%all), dynamic_slice_sizes={2,128}
}

%start (x: bf16[2,128]) -> (bf16[2,128], bf16[8,128]) {
  %x = bf16[2,128]{1,0} parameter(0)
  %g = bf16[8,128]{1,0} all-gather(%x), channel_id=4, replica_groups={{0,1,2,3}}, dimensions={0}
  ROOT %c = (bf16[2,128], bf16[8,128]) custom-call(%g), custom_call_target="AsyncCollectiveStart"
}

%async_collective_fusion.1 (x: bf16[2,128]) -> bf16[8,128] {
  %x = bf16[2,128]{1,0} parameter(0)
  ROOT %g = bf16[8,128]{1,0} all-gather(%x), channel_id=4, replica_groups={{0,1,2,3}}
}

%end (x: bf16[2,128]) -> bf16[8,128] {
  %x = bf16[2,128]{1,0} parameter(0)
  %g = bf16[8,128]{1,0} all-gather(%x), channel_id=4, replica_groups={{0,1,2,3}}
  ROOT %c = bf16[8,128]{1,0} custom-call(%g), custom_call_target="AsyncCollectiveDone"
}

ENTRY %main (p: f32[8,128], q: bf16[2,128]) -> bf16[8,128] {
  %p = f32[8,128]{1,0} parameter(0)
  %q = bf16[2,128]{1,0} parameter(1)
  %s = f32[2,128]{1,0} fusion(%p), kind=kCustom, calls=%scattered.1
  %a = (bf16[2,128], bf16[8,128]) fusion(%q), kind=kCustom, calls=%start
  %b = bf16[8,128]{1,0} fusion(%q), kind=kOutput, calls=%async_collective_fusion.1
  ROOT %r = bf16[8,128]{1,0} fusion(%q), kind=kCustom, calls=%end
}
""".replace("scattered", "all-reduce-scatter")


def test_collectives_of_a_tpu():
    """A reduce-scatter is a fusion, and an asynchronous gather lies in several."""
    found = wire.of_text(ON_A_TPU)
    four = (0, 1, 2, 3)
    assert found == [
        wire.Collective("reduce-scatter", 2 * 128 * 4, four, 1),
        wire.Collective("all-gather", 8 * 128 * 2, four, 1, is_async=True),
    ]
    assert [x.sent for x in found] == [3 * 2 * 128 * 4, 3 / 4 * 8 * 128 * 2]


ON_A_GPU = """
%one (x: f32[8]) -> f32[2] {
  %x = f32[8]{0} parameter(0)
  ROOT %r = f32[2]{0} reduce-scatter(%x), replica_groups={{0,1,2,3}}, dimensions={0}
}

ENTRY %main (p: f32[2], q: f32[8]) -> f32[8] {
  %p = f32[2]{0} parameter(0)
  %q = f32[8]{0} parameter(1)
  %g = (f32[2]{0}, f32[8]{0}) all-gather-start(%p), replica_groups={{0,1,2,3}}, dimensions={0}
  %s = ((f32[8]{0}), f32[2]{0}) async-start(%q), calls=%one
  %t = f32[2]{0} async-done(%s)
  %c = (f32[2]{0}, f32[2]{0}) collective-permute-start(%t), source_target_pairs={{0,1},{1,0}}
  %u = f32[2]{0} collective-permute-done(%c)
  ROOT %d = f32[8]{0} all-gather-done(%g)
}
"""


WITH_OPERANDS = """
ENTRY %main (p: f32[8], q: f32[16]) -> f32[8] {
  %p = f32[8]{0} parameter(0)
  %q = f32[16]{0} parameter(1)
  %a = ((f32[8]{0}), f32[8]{0}) all-reduce-start(%p), replica_groups={{0,1,2,3}}, to_apply=%add
  %b = ((f32[8]{0}, f32[16]{0}), (f32[2]{0}, f32[4]{0})) reduce-scatter-start(%p, %q), replica_groups={{0,1,2,3}}
  %c = ((f32[8]{0}), f32[8]{0}) all-to-all-start(%p), replica_groups={{0,1,2,3}}, dimensions={0}
  %d = (f32[8]{0:T(256)}, f32[8]{0:T(256)}, u32[]{:S(2)}, u32[]{:S(2)}) collective-permute-start(%p), source_target_pairs={{0,1},{1,0}}
  %e = ((f32[8]{0}, f32[16]{0}), (f32[32]{0}, f32[64]{0})) all-gather-start(%p, %q), replica_groups={{0,1,2,3}}
  %f = (f32[8]{0}, f32[16]{0}) all-reduce-start(%p, %q), replica_groups={{0,1,2,3}}, to_apply=%add
  ROOT %r = f32[8]{0} all-reduce-done(%a)
}
"""  # noqa: E501


def test_a_start_counts_what_it_gives_and_not_its_operands():
    found = wire.of_text(WITH_OPERANDS)
    assert all(x.is_async for x in found)
    assert [(x.kind, x.size) for x in found] == [
        ("all-reduce", 8 * 4),
        ("reduce-scatter", (2 + 4) * 4),
        ("all-to-all", 8 * 4),
        ("collective-permute", 8 * 4),
        ("all-gather", (32 + 64) * 4),
        ("all-reduce", (8 + 16) * 4),
    ]


ON_A_SPARSE_CORE = """
%called.1 (x: bf16[2,128]) -> bf16[8,128] {
  %x = bf16[2,128]{1,0} parameter(0)
  ROOT %g = bf16[8,128]{1,0} all-gather(%x), channel_id=4, replica_groups={{0,1,2,3}}, dimensions={0}
}, execution_thread="sparsecore"

ENTRY %main (q: bf16[2,128]) -> bf16[8,128] {
  %q = bf16[2,128]{1,0} parameter(0)
  %s = ((), (), (s32[8192]{0}, s32[51]{0:S(11)})) custom-call-start(), async_execution_thread="sparsecore", custom_call_target="call", called_computations={%called.1}
  %u = ((bf16[2,128]{1,0}), bf16[8,128]{1,0}, (s32[8192]{0})) custom-call-update(%s, %q)
  ROOT %d = bf16[8,128]{1,0} custom-call-done(%u)
}
"""  # noqa: E501


def test_collectives_of_a_sparse_core():
    expected = wire.Collective("all-gather", 8 * 128 * 2, (0, 1, 2, 3), 1, is_async=True)
    assert wire.of_text(ON_A_SPARSE_CORE) == [expected]


def test_collectives_of_a_gpu():
    found = {x.kind: x for x in wire.of_text(ON_A_GPU)}
    assert {kind: x.size for kind, x in found.items()} == {
        "all-gather": 32,
        "reduce-scatter": 8,
        "collective-permute": 8,
    }
    assert all(x.is_async for x in found.values())


@pytest.mark.parametrize("way", [*pods.divisions("toy"), "GSPMD"])
def test_each_way_of_dividing_a_llama_lowers(way):
    found = pods.lowered("toy", way, jax.devices()[:8])
    assert "num_partitions = 8" in found.as_text()


@pytest.mark.parametrize("step", compiled_exchange.STEPS)
def test_each_exchange_is_compiled_and_counted(step):
    row = compiled_exchange.measured("cpu:8", "toy", step)
    assert (row["step"], row["of"]) == (step, compiled_exchange.STEPS[step][2])
    assert row["hbm"] > 4  # a device reads its gradient, or the state of its shard


# Ways of dividing the model of `make scale`, and bounds on bytes of temporaries a parameter.
BOUNDS = {"data": 2.2, "ZeRO": 0.1, "FSDP": 0.12, "two levels": 0.12, "GSPMD": 0.2}


def compiled_rows(module, path, *options):
    """Return the rows of a benchmark, from an environment that has compilers of TPUs and GPUs."""
    root = Path(pods.__file__).parents[1]
    made = root / ".venv-compiled" / "bin" / "python"  # by `make pods`
    python = sys.executable if importlib.util.find_spec("libtpu") else str(made)
    if not Path(python).exists():
        pytest.skip("there is no libtpu here; make pods installs it")
    command = ["-m", f"benchmarks.{module}", *options, "--json", str(path)]
    environment = os.environ | {"PYTHONPATH": str(root), "XLA_FLAGS": "", "JAX_PLATFORMS": "cpu"}
    subprocess.run([python, *command], check=True, cwd=root, env=environment, timeout=1200)
    return json.loads(path.read_text())


def rows_of(topology, path, model="small", ways=tuple(BOUNDS)):
    options = ["--model", model, "--topology", topology, "--only", ";".join(ways)]
    return {row["way"]: row for row in compiled_rows("pods", path, *options)}


# The programs that miss their bounds: what they have, as bytes over the floor, bytes of temporaries
# a parameter, and loops. benchmarks/compiled.py says why.
MISSED = {
    ("v5e", "accumulate(adam, 4)"): (1.33, 0.1, 1),
    ("v5e", "muon"): (3.41, 8.0, 0),
    ("v5e", "muon, bfloat16 moments"): (3.76, 8.0, 0),
    ("v5e", "muon, int8 moments"): (4.30, 8.0, 0),
    ("v5e", "lars, int8 moments"): (1.36, 0.3, 0),
    ("v5e", "model_average(adam)"): (1.16, 0.1, 1),
    ("v5e", "skip_spikes(adam)"): (1.20, 4.0, 0),
    ("v5p", "adam, masters of 32 bits"): (1.39, 4.0, 0),
    ("v5p", "adam, masters of 24 bits"): (1.42, 4.0, 0),
    ("v5p", "model_average(adam)"): (1.16, 0.1, 1),
    ("v5p", "skip_spikes(adam)"): (1.20, 4.0, 0),
    ("v6e", "model_average(adam)"): (1.16, 0.1, 1),
    ("v6e", "skip_spikes(adam)"): (1.20, 4.0, 0),
    ("H100", "accumulate(adam, 4)"): (1.33, 0.1, 1),
    ("H100", "muon"): (9.16, 12.0, 0),
    ("H100", "muon, bfloat16 moments"): (11.07, 12.0, 0),
    ("H100", "muon, int8 moments"): (12.72, 12.0, 0),
    ("H100", "lars, int8 moments"): (1.37, 0.3, 0),
    ("H100", "skip_spikes(adam)"): (1.20, 4.0, 0),
}
A_FEW = "adam,ftrl,lamb,adam? bfloat16 moments,adam? int8 moments,adam? masters of 24 bits"
OFTEN = "adam*,lamb*,ftrl,model_average*,skip_*,record_metrics*"


@pytest.mark.parametrize(
    ("target", "rules"),
    [
        ("v5e", A_FEW),
        *(
            pytest.param(target, rules, marks=pytest.mark.nightly)
            for target, rules in (("v5e", "*"), ("H100", "*"), ("v5p", OFTEN), ("v6e", OFTEN))
        ),
    ],
)
def test_rules_keep_within_their_bounds(target, rules, tmp_path):
    options = ["--tree", "matrix", "--target", target, "--only", rules]
    rows = {row["rule"]: row for row in compiled_rows("compiled", tmp_path / "rows.json", *options)}
    assert len(rows) >= 6
    for rule, row in rows.items():
        is_small = any(word in rule for word in ("bfloat16", "int8", "masters"))
        within = row["most"], 0.3 if is_small else 0.1, 0
        over, held, loops = MISSED.get((target, rule), within)
        found = row["over_floor"], row["temporaries"], row["loops"]
        assert found[0] <= over + 0.005, (rule, found)
        assert found[1] <= held + 0.005 and found[2] <= loops, (rule, found)
    if target == "v5e":
        assert rows["adam, int8 moments"]["cycles"] <= rows["adam"]["cycles"]
        assert rows["adam, bfloat16 moments"]["cycles"] <= 0.75 * rows["adam"]["cycles"]


@pytest.mark.parametrize(
    "topology",
    ["v5e:4x4"]
    + [
        pytest.param(topology, marks=pytest.mark.nightly)
        for topology in ("v5e:8x8", "v5e:16x16", "v6e:16x16", "v5p:4x4x4", "v5p:8x8x8")
    ],
)
def test_no_chip_reduces_or_gathers_a_whole_model(topology, tmp_path):
    rows = rows_of(topology, tmp_path / "rows.json")
    assert set(rows) == set(BOUNDS)
    size = 4 * 2 * 512 * 2048
    for way in ("ZeRO", "FSDP", "two levels"):
        row = rows[way]
        assert row["whole"] == 0 and row["reduce-scatter"] and row["all-gather"], way
        # Gathers of float32 for products in bfloat16 take half of what is planned.
        assert 0.6 < row["sent"] / row["planned"] < 1.02, way
        if topology == "v5e:4x4":
            assert row["temporaries"] / size < BOUNDS[way], way
    assert rows["GSPMD"]["whole"] and rows["data"]["whole"] == 1


def products_of(llama):
    """Return the FLOPs of products on a chip: forward, backward, again without the last of a layer.

    The scores of attention are computed whole, and masked.
    """
    d, k, h, n = llama.width, llama.keys, llama.hidden, llama.tokens
    weights, scores = 2 * d * d + 2 * d * k + 3 * d * h, 2 * n * n * d
    layer = 2 * n * (4 * weights - d * h) + 8 * scores
    return llama.layers * layer + 6 * n * d * llama.vocabulary


# Seconds of a step of 7B, as `estimate_step` reads them: most milliseconds that are exposed,
# without and with `overlap_options`, and the step over GSPMD's step.
EXPOSED = {"1x8x1": (16.5, 8.6, 0.93)}


@pytest.mark.parametrize("topology", EXPOSED)
def test_what_a_llama_exposes(topology, tmp_path):
    with_options = "FSDP" + pods.OPTIONS
    rows = rows_of(topology, tmp_path / "rows.json", "7B", ("FSDP", with_options, "GSPMD"))
    most, most_with_options, over = EXPOSED[topology]
    for row in rows.values():
        assert row["products"] == pytest.approx(products_of(pods.LLAMAS["7B"]), rel=1e-3)
        assert row["step"] == pytest.approx(row["compute"] + row["exposed"])
        assert row["exposed"] < row["communication"]
    assert 1e3 * rows["FSDP"]["exposed"] <= most
    assert 1e3 * rows[with_options]["exposed"] <= most_with_options
    assert rows["FSDP"]["step"] <= over * rows["GSPMD"]["step"]
    assert rows["FSDP"]["sent"] == pytest.approx(rows["FSDP"]["planned"], rel=0.01)


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("model", "topology", "way", "most_gb", "exposed", "step"),
    [
        ("7B", "v5e:4x4", "FSDP", 3.5, 0.58, 1325),
        ("7B", "v5e:4x4", "FSDP" + pods.OPTIONS, 3.4, 0.24, 1226),
        ("7B", "v5e:16x16", "FSDP", 2.5, 0.65, 1180),
        ("7B", "v5p:4x4x4", "FSDP" + pods.SPARSE, 2.6, 0.1, 445),
        ("7B", "8x8x1", pods.IN_NODES, 4.9, 0.32, 295),
        ("7B", "v6e:16x16", "FSDP" + pods.SPARSE, 2.4, 0.05, 350),
        ("70B", "v5p:8x8x8", "FSDP", 7.0, 1.0, 6200),
        ("70B", "v5p:8x8x8", "FSDP" + pods.SPARSE, 7.4, 0.1, 3800),
    ],
)
def test_llama_on_a_pod(model, topology, way, most_gb, exposed, step, tmp_path):
    """No whole all-reduce; at most so much of communication is exposed, and so many ms a step."""
    row = rows_of(topology, tmp_path / "rows.json", model, (way,))[way]
    assert row["whole"] == 0 and row["temporaries"] < 1e9 * most_gb
    assert 0.99 < row["sent"] / row["planned"] < 1.04
    assert row["exposed"] <= exposed * row["communication"] and 1e3 * row["step"] <= step


def test_a_state_on_the_host_takes_no_memory_of_the_device(tmp_path):
    """The kept rows of 7B and 70B, and one of them compiled again."""
    kept = host.KEPT.rows()
    for (model, topology, way), row in kept.items():
        if way == host.STREAMED:
            before = kept[model, topology, host.ON_DEVICE]
            assert row["temporaries"] <= before["temporaries"] + 0.05 * row["host"], topology
            assert row["kept"] + row["host"] == pytest.approx(before["kept"], rel=1e-3)
            assert row["host_temporaries"] == 0
        if way == host.ACCUMULATED:  # the sums are a third more on the host
            streamed = kept[model, topology, host.STREAMED]
            assert row["temporaries"] <= streamed["temporaries"] + 0.01 * row["host"], topology
            assert row["host"] == pytest.approx(streamed["host"] * 4 / 3, rel=1e-3)
            assert row["host_temporaries"] == 0
    options = ["--model", "7B", "--topology", "1x1x1", "--only", host.STREAMED]
    (row,) = compiled_rows("host", tmp_path / "rows.json", *options)
    size = sum(x.size for x in jax.tree.leaves(pods.divisions("7B")["FSDP"].params))
    assert row["kept"] + row["temporaries"] < 29.5e9
    assert row["host"] == pytest.approx(12 * size, rel=1e-3) and row["host_temporaries"] == 0
    assert row["link"] == pytest.approx(24 * size, rel=1e-3)
