"""`tune`: the order of ways, their bytes, and rows for what fails."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

import optfn
from optfn.distributed import Trial, Tuning, data_mesh, plan_memory, scan_layers, sharded, tune
from optfn.mesh.compilers import memories
from optfn.plan import trial, tuning

WIDTH, LAYERS = 64, 8
PARAMS = {
    "layers": optfn.Stacked({"w": np.full((LAYERS, WIDTH, WIDTH), 0.01, np.float32)}),
    "head": np.ones((WIDTH, 1), np.float32),
}
BATCH = jax.ShapeDtypeStruct((64, WIDTH), jnp.float32)
TX = optfn.adam(1e-3)


def loss_fn(params, x):
    y = scan_layers(lambda layer, x: jnp.tanh(x @ layer["w"]), params["layers"], x)
    return jnp.mean((y @ params["head"] - 1.0) ** 2)


def tuned(loss=loss_fn, **options):
    return tune(loss, TX, PARAMS, BATCH, data_mesh(), progress=False, **options)


def test_bytes_are_those_of_the_plan_and_of_the_compiled_step():
    """Without a measurement there are no seconds, and so no best way."""
    found = tuned(ways=[{"shard": "state"}, {"shard": "params", "microbatches": 2}])
    with pytest.raises(ValueError, match="no way fits and has a time that is known"):
        found.best  # noqa: B018
    for row in found.rows:
        assert row.problem.startswith("not estimated: ")
        step = optfn.make_train_step(loss_fn, TX, mesh=data_mesh(), **row.way)
        found = step.lower(PARAMS, BATCH).compile().memory_analysis()
        assert row.kept == found.argument_size_in_bytes
        outputs = found.output_size_in_bytes - found.alias_size_in_bytes
        assert row.temporaries == found.temp_size_in_bytes + max(0, outputs)
        plan = plan_memory(TX, PARAMS, data_mesh(), **row.way)
        # The step counts its steps, and has an eighth of the batch.
        assert 0 <= row.kept - plan.kept - BATCH.size * 4 // 8 <= 16


def test_ways_take_turns_and_the_median_of_their_steps_counts(monkeypatch):
    # Compilations of 5 seconds, and steps: two ways in turns, of which the last one slows down.
    first, second, third = (3.0, 1.0, 2.0), (1.5, 4.0, 3.5), (9.0, 9.0, 9.0)
    taken = [5.0, first[0], 5.0, second[0], 5.0, third[0]]
    taken += [x[i] for i in (1, 2) for x in (first, second, third)]
    times = iter([t for x in taken for t in (0.0, x)])
    monkeypatch.setattr(trial.time, "perf_counter", lambda: next(times))
    found = tuned(
        ways=[{"donate": True}, {"microbatches": 2, "donate": True}, {"packed": True}], measure=3
    )
    rows = found.rows
    assert [(x.seconds, x.spread) for x in rows] == [
        (2.0, (1.0, 3.0)),
        (3.5, (1.5, 4.0)),
        (9.0, (9.0, 9.0)),
    ]
    assert (rows[0].compile_seconds, rows[0].examples_per_second) == (5.0, 32.0)
    marks = [line.count("≈") for line in str(found).splitlines()[1:4]]
    assert marks == [0, 1, 0] and "2000 m (1000–3000)" in str(found)


def list_ways(params=PARAMS, tx=TX, mesh=None, **options):
    """Return the ways that are tried; on devices of one byte none of them is compiled."""
    found = tune(
        loss_fn, tx, params, BATCH, mesh or data_mesh(), memory=1.0, progress=False, **options
    )
    assert {row.problem for row in found.rows} == {"not compiled: too much is kept"}
    return [dict(row.way) for row in found.rows if "state_memory" not in row.way]


def test_the_list_of_ways():
    mesh = Mesh(np.array(jax.devices()).reshape(2, 4), ("slow", "fast"))
    found = list_ways(mesh=mesh, options={"data_axis": ("slow", "fast")})
    assert [way.get("shard") for way in found] == [
        None, "state", "params", sharded("state", axis="fast"), sharded("params", axis="fast"),
    ]  # fmt: skip
    many = {f"b{i}": np.ones(8, np.float32) for i in range(300)}
    assert list_ways(many, mesh=data_mesh(1)) == [{}, {"packed": True}]
    stacked = {"layers": optfn.Stacked({"w": np.ones((8, 16, 16), np.float32)})}
    found = [way["shard"] for way in list_ways(stacked, optfn.muon(0.1)) if "shard" in way]
    assert found[2:] == [sharded(kind, whole="layers/w") for kind in ("state", "params")]


def test_microbatches_are_doubled_until_a_way_fits():
    def loss(p, x):  # activations of 1 MB for 16 examples of a device, and none that is kept
        h = jnp.tanh(x @ p["head"] + jnp.arange(16_384.0))
        return jnp.mean(h**2)

    options = {"progress": False, "measure": 1}
    arguments = loss, TX, {"head": PARAMS["head"]}, BATCH, data_mesh(4)
    (free,) = tune(*arguments, ways=[{}], **options).rows
    assert free.kept + free.temporaries > 1e6
    found = tune(*arguments, memory=0.8e6, **options)
    ways = [(row.way.get("shard"), row.way.get("microbatches", 1), row.fits) for row in found.rows]
    assert set(ways) >= {(None, 1, False), (None, 2, True)}
    assert found.best["microbatches"] == 2


def test_a_way_that_keeps_too_much_is_not_compiled(monkeypatch):
    def lower(*args):
        raise AssertionError("it is compiled")

    monkeypatch.setattr(optfn.TrainStep, "lower", lower)
    (row,) = tuned(ways=[{}], memory=1e5).rows
    assert (row.fits, row.temporaries, row.problem) == (
        False,
        None,
        "not compiled: too much is kept",
    )


def test_failures_are_rows():
    def loss(params, x):
        if x.shape[0] == 4:
            raise RuntimeError("this loss takes no batch of 4\nmore")
        return loss_fn(params, x)

    ways = [{"microbatches": 2}, {"no_option": 1}, {"microbatches": 3}, {"shard": "state"}]
    found = tuned(loss=loss, ways=ways, measure=1)
    problems = {str(dict(row.way)): row.problem for row in found.rows}
    assert problems == {
        "{'shard': 'state'}": "",
        "{'microbatches': 2}": "RuntimeError: this loss takes no batch of 4 more",
        "{'no_option': 1}": problems["{'no_option': 1}"],
        "{'microbatches': 3}": problems["{'microbatches': 3}"],
    }
    assert "no_option" in problems["{'no_option': 1}"]
    assert problems["{'microbatches': 3}"].startswith("ValueError: microbatches=3")
    assert found.best == {"shard": "state"}
    for words in ("whole, no_option=1: TypeError", "whole, microbatches=2: RuntimeError"):
        assert words in str(found)


def test_out_of_memory_does_not_fit(monkeypatch):
    real = trial.TuneArguments._measure

    def measure(self, step, compiled, batch):
        if step.options.shard is None:
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating")
        return real(self, step, compiled, batch)

    monkeypatch.setattr(trial.TuneArguments, "_measure", measure)
    found = tuned(ways=[{}, {"shard": "state"}], measure=1)
    assert [row.fits for row in found.rows] == [None, False]
    assert found.best == {"shard": "state"}


def test_an_interrupted_search_returns_what_is_known(monkeypatch):
    real = trial.TuneArguments.try_way

    def try_way(self, way, batch):
        if way.get("shard") == "params":
            raise KeyboardInterrupt
        return real(self, way, batch)

    monkeypatch.setattr(trial.TuneArguments, "try_way", try_way)
    found = tuned(memory=1.0)
    assert not found.is_complete and len(found.rows) == 2
    assert str(found).endswith("interrupted: not all were tried")


def test_sizes_of_batches_end_where_one_does_not_fit():
    found = tuned(
        ways=[{"shard": "params"}], batch_sizes=(16, 64, 4096, 8192), memory=5e5, measure=1
    )
    assert {(row.batch_size, row.fits) for row in found.rows} == {
        (16, True),
        (64, True),
        (4096, False),
    }
    rates = [row.examples_per_second for row in found.rows if row.fits]
    assert rates == sorted(rates, reverse=True)


def row(seconds, way=(), **others):
    return Trial(dict(way), batch_size=8, seconds=seconds, **others)


def test_equal_steps_have_the_simpler_way_first():
    rows = [
        row(1.00, {"shard": "params", "microbatches": 2}),
        row(1.02, {"shard": "state"}),
        row(1.029),
        row(1.031, {"packed": True}),
        row(0.5, fits=False),
        row(None, {"shard": "params"}),
    ]
    ordered = tuning._order(rows, by_rate=False)
    assert ordered == [rows[2], rows[1], rows[0], rows[3], rows[5], rows[4]]
    table = str(Tuning(tuple(ordered), 8e9)).splitlines()
    assert [("≈" in line) for line in table[1:5]] == [False, True, True, False]
    assert "memory of a device: 8 GB" in table


def test_json_has_every_number_and_option():
    outer = optfn.sgd(0.5)
    way = {"shard": sharded("params", axis="fast"), "microbatches": 2, "outer": outer}
    original = row(0.25, way, kept=3, temporaries=4, fits=True, compile_seconds=1.5)
    found = json.loads(Tuning((original,), 1e9).to_json())
    assert found["memory"] == 1e9 and found["is_complete"]
    (back,) = found["rows"]
    options = back.pop("way")
    assert options == way | {"shard": repr(way["shard"]), "outer": repr(outer)}
    assert back == {k: v for k, v in dataclasses.asdict(original).items() if k != "way"}


def test_processes_agree_on_the_slowest_and_on_failures(monkeypatch):
    of_others = [[2_000_000, 0, 0, 0, 0], [1_000_000, 0, 0, 0, 0]]
    mesh = data_mesh()
    assert trial._agree(row(1.5), mesh) == row(1.5)
    monkeypatch.setattr(trial.processes, "gather_values", lambda own: np.array([*of_others, own]))
    monkeypatch.setattr(trial.processes, "is_on_all_processes", lambda mesh: True)
    assert trial._agree(row(1.5), mesh).seconds == 2.0
    of_others[1] = [0, 0, 0, 1, 0]
    agreed = trial._agree(row(1.5), mesh)
    assert (agreed.seconds, agreed.problem) == (None, "failed in process 1")
    of_others[1] = [0, 0, 0, 0, 1]
    assert trial._agree(row(1.5, fits=True), mesh).fits is False
    assert trial._agree(row(None, problem="it fails here alone"), mesh).fits is False


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"mesh": 3}, TypeError, "tune: mesh must be a jax.sharding.Mesh"),
        ({"tx": 3}, TypeError, "tune: tx"),
        ({"measure": 0}, ValueError, "tune: measure"),
        ({"options": {"data_axis": "model"}}, ValueError, "model"),
        ({"batch_sizes": [0]}, ValueError, "tune: batch_sizes"),
    ],
)
def test_bad_arguments_are_said(change, error, words):
    given = {"tx": TX, "mesh": data_mesh(), "options": {}} | change
    tx, mesh = given.pop("tx"), given.pop("mesh")
    with pytest.raises(error, match=words):
        tune(loss_fn, tx, PARAMS, BATCH, mesh, progress=False, **given)


def test_params_that_keep_their_placement_are_measured(capsys):
    """A step that is left to the compiler takes its layout as a static argument; progress has a
    line for each way."""
    ways = [{"partitioner": "compiler"}, {"partitioner": "compiler", "shard": "state"}]
    found = tune(loss_fn, TX, PARAMS, BATCH, data_mesh(), ways=ways, measure=1)
    lines = capsys.readouterr().err.splitlines()
    assert [line.rpartition(" ")[0].rpartition(" ")[0] for line in lines] == [
        "tune: whole, partitioner='compiler'", "tune: partitioner='compiler', shard='state'",
    ]  # fmt: skip
    assert [row.problem for row in found.rows] == ["", ""]
    assert all(row.is_measured and row.seconds for row in found.rows)


def test_the_state_goes_to_the_host_where_nothing_else_fits(monkeypatch):
    monkeypatch.setattr(memories, "LARGE", 512)
    rows = tuned(memory=50e3).rows
    # A CPU has one memory, so the state counts there too.
    on_host = [row for row in rows if "state_memory" in row.way]
    assert {row.way.get("shard") for row in on_host} == {None, "state", "params"}
    assert len([row for row in rows if row not in on_host]) == 3
    divided = next(row for row in on_host if row.way.get("shard") == "params")
    assert divided.compile_seconds and not divided.problem
    assert not [row for row in tuned(memory=1e9).rows if "state_memory" in row.way]


def test_a_table_says_which_microbatches_hide_the_link():
    way = {"shard": "params", "state_memory": "pinned_host"}
    row = Trial(way, 64, fits=True, seconds=0.5, compute=0.1, exposed=0.4, host_seconds=0.375)
    assert "takes 375 ms" in str(Tuning((row,), 1e9))
    assert "a fifth of one with 12 such batches" in str(Tuning((row,), 1e9))
