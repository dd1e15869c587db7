"""The benchmarks run at toy size, one by one and as a suite, and write what they found."""

import json
import math
import sys
from itertools import groupby
from pathlib import Path
from types import SimpleNamespace

import chex
import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec

import optfn
from benchmarks import __main__ as suite
from benchmarks import (
    check,
    checkpoints,
    chip,
    first_call,
    fused_adam,
    matrices,
    measure,
    moments,
    packed,
    pages,
    passes,
    pipeline,
    recompute,
    rows,
    scale,
    selection,
    sharding,
    tables,
    update,
    wire,
)
from benchmarks.studies import compile_time, exchange, front, packed_init, soak
from optfn.distributed import data_mesh
from optfn.loss.recomputation.budget import is_recomputation_kept

ROOT = Path(__file__).parents[2]
ABOUT = {"device", "jax", "optax", "commit"}


@pytest.fixture
def toy(monkeypatch, tmp_path, capsys):
    """Run a script as the suite does, but in this process; return its rows as written."""

    def run(module, name):
        file = tmp_path / "rows.json"
        script = suite.SUITE.get(name, suite.Script(name))  # some are not in the suite
        arguments = [name, *script.arguments, "--toy", "--json", str(file)]
        monkeypatch.setattr(sys, "argv", arguments)
        module.main()
        found = json.loads(file.read_text())
        assert found["about"].keys() >= ABOUT
        assert all(math.isfinite(x) for row in found["rows"] for x in row.values() if number(x))
        assert all(row[k] > 0 for row in found["rows"] for k in row if "ratio" in k or "over" in k)
        printed = capsys.readouterr().out.splitlines()
        tables = [[*x] for is_row, x in groupby(printed, lambda x: x.startswith("|")) if is_row]
        assert sum(map(len, tables)) >= 2 * len(tables) + len(found["rows"])
        for lines in tables:
            assert len({line.replace("\\|", "").count("|") for line in lines}) == 1
        return found["rows"]

    return run


def number(x):
    return isinstance(x, int | float)


def by(column, found):
    return {row[column]: row for row in found}


def test_update(toy):
    found = by("optimizer", toy(update, "update_gpt2"))
    assert list(found) == list(suite.SOME[3:])
    assert found["lars"]["optfn_temp"] < 1 < found["lars"]["optax_temp"]
    assert found["sgd"].keys() == found["lamb"].keys() >= {"ratio", "floor_ms", "over_floor"}


def test_update_without_a_counterpart_and_by_turns(capsys):
    ftrl, adam, four = update.run("toy", 1, ["ftrl", "adam", "accumulate(adam, 4), 4 gradients"])
    assert "optax_ms" not in ftrl and adam["ratio"] > 0 and four["ratio"] > 0
    assert "| ftrl |" in capsys.readouterr().out


def test_the_bytes_that_an_update_must_move():
    shapes = {"w": (100,)}
    tx = optfn.momentum(0.1, 0.9)
    velocity = measure.num_bytes(tx.init(measure.arrays(shapes, 0)))
    assert velocity >= 400
    assert update.Side(tx, shapes).bytes_moved == 400 + 2 * (400 + velocity)
    assert update.Side(tx, shapes, 4).bytes_moved == 400 + 2 * (400 + velocity) + 3 * 3 * 400


@pytest.mark.nightly
def test_moments(toy):
    found = by("moments", toy(moments, "moments"))
    assert found["int8"]["state"] < 2.2 < 4 <= found["bfloat16"]["state"] < 4.01
    assert found["float32"]["speed"] == 1


@pytest.mark.nightly
def test_moments_train():
    found = moments.accuracy(
        ["digits", "loss"],
        "adam",
        lambda tx, seed: moments.digits_figures(tx, seed, 1),
        lambda dtype: optfn.adam(1e-2, moment_dtype=dtype),
        seeds=1,
    )
    accuracies, losses = found[::2], found[1::2]
    assert [row["moments"] for row in accuracies] == ["float32", "bfloat16", "int8"]
    assert all(row["figures"][0] > 50 for row in accuracies)
    assert all(0 < row["figures"][0] < np.log(10) for row in losses)


@pytest.mark.nightly
def test_passes(toy):
    found = toy(passes, "passes")
    assert [row["pass"] for row in found if row["rule"] == "lamb"] == [
        *("m", "v", "norm of p", "norm of r", "p")
    ]
    assert sum(row["bytes"] for row in found if "without" in row["pass"]) == 12


def test_rows(toy):
    found = by("optimizer", toy(rows, "rows"))
    assert found["optax adam, dense"]["ratio"] == 1
    lazy, dense = found["optfn adam, lazy"], found["optfn adam, dense"]
    assert lazy["temporaries_MB"] < 0.02  # the table has 0.064
    assert lazy["floor_ms"] < 0.02 * dense["floor_ms"]  # 16 of 2,000 rows


@pytest.mark.nightly
def test_chip(toy):
    found = [row.get("what", "") for row in toy(chip, "chip")]
    assert "step, toy" in found and "masters in copies, on the host" in found
    assert sum(what.endswith("no command buffers") for what in found) == 2


def test_what_a_chip_has_no_time_or_memory_for_is_left_out(capsys):
    def make_too_large():
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory")

    rows = {"large": make_too_large, "small": lambda: [{"what": "small"}]}
    assert chip.print_page([chip.Part("Steps", "| step |", rows)], 60.0) == [{"what": "small"}]
    assert "\nLeft out: large (no memory).\n" in capsys.readouterr().out
    assert chip.print_page([chip.Part("Steps", "| step |", rows)], -1.0) == []
    assert "large (no time); small (no time)" in capsys.readouterr().out


@pytest.mark.nightly
def test_selection(toy):
    normal, _, exact = toy(selection, "selection")
    assert normal["k"] == 4 and exact["data"] == "constant"
    assert normal.keys() >= {"ratio", "ratio_min", "over_floor", "max_ms"}
    assert ("torch_ratio" in normal) == measure.torch_stands_beside()


def test_first_call(toy, capsys):
    parts = toy(first_call, "first_call")
    assert [row["part"] for row in parts] == ["trace", "lower", "compile", "trace + lower"]
    assert first_call.programs_after_a_new_rate() == 1


@pytest.mark.nightly
def test_compile_time(toy):
    before = jax.config.jax_compilation_cache_dir
    found = by("step", toy(compile_time, "compile_time"))
    assert jax.config.jax_compilation_cache_dir == before
    assert list(found) == ["plain", "local steps", "DGC"]
    assert found["plain"]["over_plain"] == 1


@pytest.mark.nightly
def test_packed_init(toy):
    assert {row["tx"] for row in toy(packed_init, "packed_init")} == packed_init.RULES.keys()


@pytest.mark.nightly
def test_packed(toy):
    found = toy(packed, "packed")
    assert [row["leaves"] for row in found] == [20, 3, 2, 2, 6]
    assert all(row.keys() >= {"floor_ms", "ratio", "first_ratio"} for row in found)


@pytest.mark.nightly
def test_adam_in_chunks_is_adam(toy):
    p, m, v, g = (jax.random.normal(jax.random.key(k), (60,)) for k in range(4))
    found = fused_adam.in_chunks(16, p, m, v**2, g)  # chunks of 15
    chex.assert_trees_all_close(found, fused_adam.adam(p, m, v**2, g), rtol=1e-6)
    sides = toy(fused_adam, "fused_adam")[:8]  # without torch's
    assert len(sides) == 8
    assert all(side["ratio"] > 0 and side["temporaries"] < 1 for side in sides)


@pytest.mark.nightly
def test_pipeline(toy):
    found = toy(pipeline, "pipeline")
    gpipe, more, flat, flat_too = (row["temporaries"] for row in found)
    assert more > 1.5 * gpipe and flat_too <= 1.02 * flat < gpipe
    assert [row["ticks"] for row in found] == [22, 38, 14, 22]


def test_tables(toy):
    """Ids and rows of a lookup, ids and gradients, of an even number of ids for each owner."""
    whole, spread = toy(tables, "tables")
    assert whole["cpu_ratio"] == 1 and spread["ideal"] == whole["ideal"] < 2 * 128 * 8 * 4
    assert spread["bytes"] < whole["bytes"] / 7
    sizes = []
    for seed in range(tables.BATCHES):
        ids = tables.IDS["Zipf"](np.random.default_rng(seed), 1024, 1024)
        fullest = max(max(np.bincount(np.unique(part) % 8)) for part in np.split(ids, 8))
        assert fullest <= 32  # 16 of 128 ids and 4·√16
        sizes.append(22 if fullest <= 22 else 32)  # two thirds of them, or all
    words = 8 * np.mean(sizes) * (1 + 8 + 1 + 8)
    assert spread["sent"] == pytest.approx(7 / 8 * 4 * words, rel=0.01, abs=200)


@pytest.mark.nightly
def test_sharding(toy):
    found = toy(sharding, "sharding")
    assert [row["shard"] for row in found] == ["None", "state", "params"] * 2
    for row in found:
        assert row["bytes"] == pytest.approx(row["ideal_bytes"], rel=0.01)
        assert row["sent"] == pytest.approx(row["ideal_sent"], rel=0.01)  # loops and all


def test_scale(toy):
    found = toy(scale, "scale")
    assert [(row["division"], row["devices"]) for row in found] == [
        (name, n) for name in ("FSDP", "two levels", "pipeline") for n in (4, 8)
    ]
    assert all(row["sent_over"] == pytest.approx(1, rel=0.02) for row in found)
    halved = [row["kept"] for row in found if row["division"] == "FSDP"]
    assert halved[1] == pytest.approx(halved[0] / 2, rel=0.01)


def test_what_grows_with_the_devices_or_leaves_the_formula_is_found():
    row = {"collectives": 3, "kept": 1000, "temporaries": 50, "sent_over": 1.0}
    assert scale.grown([row, row | {"kept": 500}]) == []
    assert scale.grown([row, row | {"collectives": 4, "temporaries": 52}]) == [
        *("collectives", "temporaries")
    ]
    assert scale.grown([row, row | {"sent_over": 1.03}]) == ["sent"]


@pytest.mark.nightly
def test_matrices(toy):
    whole, rows, alike, optax = toy(matrices, "matrices")
    assert [row["shard"] for row in (whole, rows, alike)] == ["`whole=`", '`"state"`', "`None`"]
    assert whole["sent_over"] == pytest.approx(1, rel=0.02) and rows["sent_over"] > 2
    assert optax["optimizer"] == "optax" and optax["sent_over"] > 2
    assert whole["flops_over"] < 0.5 * alike["flops_over"]


def test_checkpoints(toy):
    found = by("checkpoint", toy(checkpoints, "checkpoints"))
    assert list(found) == ["one file, at once", "one file", "parts"]
    file, parts = found["one file"], found["parts"]
    assert 0.99e6 < file["bytes"] < 1.01e6 < 1.1 * file["written"] and parts["written"] > 0.5e6
    assert all(0 < row["blocking_s"] <= row["delay_s"] <= row["whole_s"] for row in found.values())


def test_loops_count_as_often_as_they_run():
    def total(x, n):
        def body(_, x):
            return jax.lax.psum(x, "data") / 8

        return jax.lax.fori_loop(0, n, body, jax.lax.fori_loop(0, 5, body, x))

    specs = (PartitionSpec("data"), PartitionSpec())
    run = jax.shard_map(
        total, mesh=data_mesh(8), in_specs=specs, out_specs=specs[0], check_vma=False
    )
    compiled = jax.jit(run).lower(np.ones(32, np.float32), np.int32(3)).compile()
    assert wire.bytes_sent(compiled, 8, rounds=3) == 2 * 7 / 8 * 16 * (5 + 3)


@pytest.mark.nightly
def test_recompute(toy, tmp_path):
    found = toy(recompute, "recompute")
    named = by("recomputed", found)
    assert list(named)[:3] == ["nothing", "each", "√n"]
    assert named["each"]["residuals"] < 0.5 * named["nothing"]["residuals"]
    assert named["4 names"]["residuals"] <= named["each"]["residuals"] + 8 * 64 * 4
    if is_recomputation_kept():
        assert named["each"]["flops"] > named["nothing"]["flops"]
    recompute.draw(found, str(tmp_path / "curve.png"))
    assert (tmp_path / "curve.png").read_bytes().startswith(b"\x89PNG")


def test_the_suite_reports_what_runs_and_what_does_not(monkeypatch, tmp_path, capsys):
    """One script runs, one lacks its tools, one fails; none stops the rest."""
    monkeypatch.setitem(suite.SUITE, "broken", suite.Script("no_such_script"))
    only = ["broken", "compression_link", "first_call"]
    monkeypatch.setattr(sys, "argv", ["", "--toy", "--out", str(tmp_path), "--only", *only])
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("PATH", "")  # no ip, no git
    with pytest.raises(SystemExit) as stopped:
        suite.main()
    assert stopped.value.code == 1
    shown = capsys.readouterr()
    assert "| trace |" in shown.out and "[3 of 3] first_call" in shown.err
    results = json.loads((tmp_path / "results.json").read_text())
    assert results["about"].keys() == {*ABOUT, "began"}
    broken, link, call = (results["scripts"][name] for name in only)
    assert broken["failed"] and "no_such_script" in broken["reason"]
    assert not link["failed"] and link["reason"].endswith("no ip on the path")
    assert len(call["rows"]) == 4 and call["seconds"] > 0 and not call["reason"]
    assert call["command"] == ["python", "-m", "benchmarks.first_call", "--rounds", "3", "--toy"]
    report = (tmp_path / "report.md").read_text()
    assert "| trace |" in report and "not run: no network namespaces" in report
    assert "failed: " in report and "jax " in report


def test_a_ratio_that_fell_is_found(monkeypatch, tmp_path, capsys):
    """More than 15 % worse, in the direction of its column; rows that are new are not compared."""

    def results(*rows):
        file = tmp_path / "bench-out.json"
        ran = {"command": ["python", "-m", "benchmarks.update", "--only", "adam, x"]}
        printed = {"text": "jax 1\n\n| optimizer |\n|---|\n| adam |\n"}
        scripts = {"update": {"rows": rows, **ran, **printed}, "broken": {"rows": []}}
        file.write_text(json.dumps({"about": dict.fromkeys(ABOUT, "x"), "scripts": scripts}))
        return file

    def call(file, *options):
        monkeypatch.setattr(sys, "argv", ["", "--results", str(file), *options])
        check.main()

    monkeypatch.setattr(check, "PUBLISHED", tmp_path / "results.json")
    monkeypatch.setattr(pages, "PRINTED", tmp_path / "printed.json")
    monkeypatch.setattr(pages, "RESULTS", tmp_path / "results")
    monkeypatch.setattr(pages, "README", tmp_path / "README.md")
    pages.README.write_text("none of the tables\n")
    adam = {"optimizer": "adam", "leaves": 2, "ms": 9.5, "ratio": 1.0, "over_floor": 2.0}
    call(results(adam), "--publish")
    published = json.loads(check.PUBLISHED.read_text())
    assert published["update"]["rows"] == {"adam, 2": {"ratio": 1.0, "over_floor": 2.0}}
    page = (tmp_path / "results" / "update.md").read_text()
    assert "## `python -m benchmarks.update --only 'adam, x'`\n\njax 1\n\n| optimizer |" in page
    new = adam | {"optimizer": "new", "ratio": 0.1}
    for row in ({"ratio": 0.86, "over_floor": 2.3}, {"ratio": 3.0, "over_floor": 0.5, "ms": 99.0}):
        with pytest.raises(SystemExit) as stopped:
            call(results(adam | row, new))
        assert stopped.value.code == 0
    capsys.readouterr()
    with pytest.raises(SystemExit) as stopped:
        call(results(adam | {"ratio": 0.84, "over_floor": 2.4}, new))
    assert stopped.value.code == 1
    lines = capsys.readouterr().out.splitlines()
    assert set(lines[:-1]) == {
        "update: adam, 2: ratio 1.00 → 0.84",
        "update: adam, 2: over_floor 2.00 → 2.40",
    }
    assert lines[-1] == "2 ratios of 2 rows fell by more than 15 %"


def test_published_ratios_are_of_scripts_of_the_suite():
    published = json.loads(check.PUBLISHED.read_text())
    assert published.keys() <= suite.SUITE.keys()
    for entry in published.values():
        assert entry["about"].keys() == ABOUT
        assert all(x > 0 for row in entry["rows"].values() for x in row.values())
    assert {"adam", "lamb", "ftrl"} <= published["update"]["rows"].keys()


def test_pages_have_the_figures_of_the_files():
    """`make tables` writes them; no page stays whose figures are gone."""
    texts = pages.written()
    assert {path for path in texts if path != pages.README} == {*pages.RESULTS.glob("*.md")}
    for path, text in texts.items():
        assert path.read_text() == text, f"{path}: make tables"


def test_headlines_are_rows_of_the_pages():
    lines = ["| rule | ms | B |", "|---|---|---|", "| sgd | 1 | 2 |", "| **adam** | 3 | 4 |"]
    section = pages.Section("v5e", "", lines)
    found = {"update": pages.Page("update", "printed.json", "", [section])}
    mark = "<!-- results/update.md: v5e -->\n\n"
    text = mark + "| rule | B |\n|---|---|\n| adam | |\n\n| rule | B |\n|---|---|\n| adam | |\n"
    expected = text.replace("| adam | |", "| adam | 4 |", 1)
    assert pages.headlines(text, found) == expected
    with pytest.raises(KeyError, match="lamb"):
        pages.headlines(text.replace("adam", "lamb"), found)


def test_a_table_replaces_that_of_the_same_command(monkeypatch, tmp_path):
    monkeypatch.setattr(pages, "PRINTED", tmp_path / "printed.json")
    pages.keep("python -m benchmarks.studies.soak --steps 9", "jax 1\n\n| step |\n|---|\n| 9 |\n")
    pages.keep("python -m benchmarks.studies.soak", "jax 1\n\n| step |\n|---|\n| 1 |\n")
    ran = SimpleNamespace(stdout="jax 2\n\n| step |\n|---|\n| 2 |\n")
    monkeypatch.setattr(pages.subprocess, "run", lambda words, **_: ran)
    pages.run("soak")
    page = pages.printed()["soak"]
    found = [(x.about, x.lines[-1]) for x in page.sections]
    assert page.script == "studies/soak" and found == [("jax 1", "| 9 |"), ("jax 2", "| 2 |")]


@pytest.mark.nightly
def test_exchange(monkeypatch, tmp_path, capsys):
    """Runs with the bytes of the formulas; one that the file has is not repeated."""
    file = tmp_path / "runs.json"
    monkeypatch.setattr(sys, "argv", ["exchange", "--toy", "--json", str(file)])
    exchange.main()
    dense, signs = json.loads(file.read_text())["rows"]
    assert dense["bytes"] == pytest.approx(6.0)  # 2·3/4·4
    assert 3 / 8 < signs["bytes"] < 1.5  # a bit for each of most parameters, from three others
    assert len(signs["training"]) == len(signs["held_out"]) == 8
    assert len(capsys.readouterr().out.splitlines()) == 6
    dense["bits"] = 1.0
    file.write_text(json.dumps({"rows": [dense]}))
    monkeypatch.setattr(exchange, "trained", lambda name, setting, seeds: [signs] * len(seeds))
    exchange.main()
    assert json.loads(file.read_text())["rows"] == [dense, signs]


def test_bytes_of_the_schemes():
    """Of a leaf of 2²⁰ parameters on four workers, by hand."""
    params = {"w": np.zeros((1024, 1024), np.float32)}
    embedding = {"embed": {"table": np.zeros((1024, 1024), np.float32)}}
    want = {
        "adamw, quantize(1)": 3 * (1 / 8 + 4 / 4096),
        "momentum, top_k(0.05)": 3 * 205 / 4096 * (4 + 12 / 8),
        "lamb, H=20": 6 / 20,
        "DGC masked, 1%": 3 * 8 * 0.01,
        "adamw, power_sgd(4)": 1.5 * 4 * 4 * 2048 / 2**20,
    }
    for name, sent in want.items():
        assert exchange.ROWS[name].bytes_sent(params) == pytest.approx(sent, rel=1e-3)
    mixed = exchange.ROWS["adamw, quantize(1), embedding dense"]
    assert mixed.bytes_sent(embedding | params) == pytest.approx((6 + 3 / 8) / 2, rel=1e-2)


def run_of(scheme, packet, bits, seed=0, **others):
    """Return a run as the file of `exchange` has it, whose curve falls by 1 from the first step."""
    held_out = [[1, bits + 1], [1600, bits]]
    return {
        "scheme": f"adamw, {scheme}", "inner": "adamw", "rate": 0.1, "width": 32, "steps": 1600,
        "packet": packet, "bytes": 3 * packet, "bits": bits, "seed": seed, "held_out": held_out,
    } | others  # fmt: skip


def test_the_front():
    """What is on it, how far it is from dense, and the seconds to dense adamw's loss and 2 %."""
    runs = [
        run_of("dense", 4.0, 2.0),
        run_of("dense", 4.0, 2.1, rate=0.2),  # not the best rate
        run_of("quantize(4)", 0.5, 2.02),
        run_of("quantize(4)", 0.5, 2.2, seed=1),
        run_of("quantize(2)", 0.25, 2.3),
        run_of("top_k(0.1)", 0.45, 2.03),
        run_of("top_k(0.1)", 0.45, 1.9, width=96),
        run_of("top_k(0.1)", 0.45, 1.8, rate=0.2),
        run_of("dense", 4.0, 1.9, seed=1),
    ]
    found = front.schemes(runs, 32)
    assert [s.name.removeprefix("adamw, ") for s in front.front(found)] == [
        *("quantize(2)", "top_k(0.1)", "dense")
    ]
    (four,) = (s for s in found if s.name == "adamw, quantize(4)")
    np.testing.assert_allclose(four.percent, [1.0, 100 * (2.2 / 1.9 - 1)])
    links = [
        {"scheme": f"adamw, {name}", "mbits": mbits, "ms": ms}
        for mbits in (0, 10)
        for name, ms in (("dense", 100.0), ("top_k(0.1)", 50.0), ("quantize(2)", 10.0))
    ]
    # Dense adamw is at 1.95 on the mean over seeds; 1.02·1.95 is 0.96 of the way for it.
    rows = front.seconds(found, links)
    steps = {row["scheme"].name: row["steps"] for row in rows}
    assert steps["adamw, dense"] == pytest.approx(1 + 1599 * (1 - 0.02 * 1.95))
    assert steps["adamw, quantize(2)"] == float("inf")
    assert front.steps_to(np.array([[5, 2.0], [9, 1.0]]), 2.5) == 5
    assert " **top_k(0.1)** | 0.4500 | 1.3500 | 2.030 | +1.5 % | 1 |" in front.table(found)
    assert "| 10 | quantize(2) | never | 10.0 | - | - |" in front.seconds_table(rows)
    (panel,) = front.draw_bytes(found).axes
    assert len(panel.lines[1].get_xdata()) == 3  # the front
    numbers = [line.get_marker() for line in panel.lines if line.get_marker().startswith("$")]
    assert numbers == ["$1$", "$2$", "$3$"]
    (panel,) = front.draw_bytes([*found, four._replace(packet=0.01, percent=[60.0])]).axes
    named = [x.get_text() for x in panel.get_legend().get_texts()]
    assert named[2:] == ["quantize(2)", "top_k(0.1)", "dense"]  # not the one above the picture
    (of_ten,) = front.draw_seconds(rows).axes
    names = [line.get_label() for line in of_ten.get_lines()]
    assert names == ["dense"]  # the others are never at its loss


def test_trees_are_the_models():
    shapes = {name: make() for name, make in measure.TREES.items()}
    sizes = {name: sum(int(np.prod(s)) for s in tree.values()) for name, tree in shapes.items()}
    assert len(shapes["resnet50"]) == 161 and round(sizes["resnet50"] / 1e6, 1) == 25.6
    assert len(shapes["gpt2"]) == 148 and round(sizes["gpt2"] / 1e6) == 124


def test_a_run_that_grows_is_seen():
    rows = [
        {"step": n, "rss": 1e9, "arrays": 10, "objects": 100, "compilations": 3}
        for n in range(1, 5)
    ]
    assert not any(soak.grown(rows).values())
    rows[3] |= {"rss": 1.02e9, "arrays": 11, "objects": 150, "compilations": 4}
    want = {"rss": 0.02, "arrays": 0.1, "objects": 0.5, "compilations": 1}
    assert soak.grown(rows) == pytest.approx(want)
