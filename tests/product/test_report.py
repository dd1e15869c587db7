"""The report of a run, and its log for TensorBoard: the numbers are those of the history."""

import gc
import re
import shutil
import struct
import subprocess
from html.parser import HTMLParser

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optfn
from optfn import plot
from optfn.distributed import data_mesh

X = np.random.default_rng(0).normal(size=(12, 8, 3)).astype(np.float32)
TARGET = np.array([1.0, -2.0, 0.5], np.float32)


def loss_fn(params, batch):
    return jnp.mean((batch @ params["<w>"] - batch @ TARGET) ** 2)


def run(batches=X, **options):
    tx = optfn.record_metrics(optfn.sgd(0.1))
    return optfn.minimize(loss_fn, tx, {"<w>": jnp.zeros(3)}, batches, progress=False, **options)


VOID = {"meta"}


class Page(HTMLParser):
    """Reads a page: its tables as rows of cells, its text, its attributes; tags must nest."""

    def __init__(self, text):
        super().__init__()
        self.open, self.ids, self.values, self.words = [], [], [], []
        self.rows = []
        self.feed(text)
        assert not self.open

    def handle_starttag(self, tag, attrs):
        if tag not in VOID:
            self.open.append(tag)
        if tag == "tr":
            self.rows.append([])
        elif tag in ("td", "th"):
            self.rows[-1].append("")
        self.ids += [value for name, value in attrs if name == "id"]
        self.values += [value for name, value in attrs if not name.startswith("xmlns")]

    def handle_startendtag(self, tag, attrs):
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.handle_endtag(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.words.append(data)
        if {"td", "th"} & {*self.open}:
            self.rows[-1][-1] += data


def read(path):
    page = Page(path.read_text(encoding="utf-8"))
    return page, {row[0]: row[1:] for row in page.rows}


def test_the_numbers_of_the_report_are_those_of_the_history(tmp_path):
    path = tmp_path / "out" / "run.html"
    values = iter([3.0, 0.5, 2.0])
    _, history = run(evaluate=lambda p: {"a&$^$": next(values)}, evaluate_every=5, report=path)
    page, facts = read(path)
    assert history.pop("stopped") == "batches"
    for name, column in history.items():
        if name == "evaluation_step":
            assert name not in facts
            continue
        steps = history["evaluation_step"] if name.startswith("evaluation") else 1 + np.arange(12)
        least, greatest = int(np.argmin(column)), int(np.argmax(column))
        first, low, low_at, high, high_at, last, bad = facts[name]
        quoted = [column[0], column[least], column[greatest], column[-1]]
        np.testing.assert_allclose([float(x) for x in (first, low, high, last)], quoted, rtol=1e-5)
        assert [low_at, high_at, bad] == [str(steps[least]), str(steps[greatest]), "0"]
    assert facts["evaluation/a&$^$"][1:3] == ["0.5", "10"]
    assert facts["steps"] == ["12"] and facts["ended"] == ["after its last step"]
    assert facts["optimizer"] == ["record_metrics(sgd(0.1))"]
    assert facts["jax"] == [jax.__version__] and facts["optax"] == [optax.__version__]
    assert facts["optfn"] == [optfn.__version__] and facts["devices"] == ["8 × cpu"]
    assert "<w>" in "".join(page.words)  # of the summary


@pytest.mark.parametrize("keep_best", [True, False])
def test_the_report_says_that_patience_ended_the_run(keep_best, tmp_path):
    path, values = tmp_path / "run.html", iter([3.0, 2.0, 4.0, 5.0, 6.0])
    state, _ = run(
        evaluate=lambda p: next(values), evaluate_every=2, patience=2, keep_best=keep_best,
        report=path,
    )  # fmt: skip
    words = "by patience after step 8; the best evaluation is of step 4"
    words += ", whose state is returned" if keep_best else ""
    assert read(path)[1]["ended"] == [words]
    assert int(state.step) == (4 if keep_best else 8)


def test_numbers_of_aux_are_in_the_report(tmp_path):
    def with_aux(params, batch):
        return loss_fn(params, batch), {"positive": jnp.mean(batch > 0)}

    optfn.minimize(
        with_aux, optfn.sgd(0.1), {"<w>": jnp.zeros(3)}, X, has_aux=True, progress=False,
        report=tmp_path / "run.html",
    )  # fmt: skip
    _, facts = read(tmp_path / "run.html")
    expected = np.mean(X > 0, axis=(1, 2))
    assert float(facts["aux/positive"][0]) == pytest.approx(expected[0], rel=1e-5)
    assert float(facts["aux/positive"][5]) == pytest.approx(expected[-1], rel=1e-5)


def test_the_report_is_one_valid_file(tmp_path):
    """Tags nest, ids are there once, names are escaped, and nothing is asked of a network."""
    history = {
        "loss": np.array([1.0, np.nan, 0.5]),
        "evaluation_step": [2],
        "evaluation/<b>": [1.0],
    }
    about = {"<i>": "<script>alert(1)</script>"}
    path = plot.report(
        history, tmp_path / "run.html", title="a < b", about=about, summary="</pre>", local_steps=2
    )
    text = path.read_text(encoding="utf-8")
    assert text.startswith("<!DOCTYPE html>\n") and text.count("<!DOCTYPE") == 1
    page, facts = read(path)
    assert len(page.ids) == len(set(page.ids)) > 10
    assert facts["<i>"] == ["<script>alert(1)</script>"] and "<script" not in text
    assert facts["loss"] == ["1", "0.5", "6", "1", "2", "0.5", "1"]
    assert "default-src 'none'; style-src 'unsafe-inline'" in page.values
    assert not re.findall(r"(?:src|href|url\()\W*(?:\w+:)?//|@import", text)
    links = [value for value in page.values if value and value.startswith("#")]
    assert links and {link[1:] for link in links} <= {*page.ids}


def test_the_report_of_a_run_that_goes_on_and_then_fails(tmp_path, monkeypatch):
    monkeypatch.setattr("optfn.plot.run_report._SECONDS_BETWEEN", 0.0)
    path, seen = tmp_path / "run.html", []

    def failing():
        yield X[0]
        seen.append(read(path)[1])
        raise RuntimeError("power cut")

    with pytest.raises(RuntimeError, match="power cut"):
        run(failing(), report=path, prefetch=0)  # so that the report is there when it is read
    seen.append(read(path)[1])
    assert [facts["steps"] for facts in seen] == [["1"], ["1"]]
    assert [facts["ended"] for facts in seen] == [["not yet"], ["by RuntimeError: power cut"]]
    assert [entry.name for entry in tmp_path.iterdir()] == ["run.html"]


def test_the_report_has_the_way_and_the_speed_of_the_run(tmp_path):
    path = tmp_path / "run.html"
    run(report=path, mesh=data_mesh(4), shard="state", microbatches=2)
    facts = read(path)[1]
    assert facts["shard"] == ["'state'"] and facts["microbatches"] == ["2"]
    assert facts["mesh"] == ["data: 4"] and re.fullmatch(r"[\d.e+]+ steps/s", facts["speed"][0])


@pytest.mark.parametrize("kind", ["below a file", "a directory"])
def test_a_place_without_reports_is_an_error_before_the_first_step(kind, tmp_path):
    path, drawn = tmp_path / "taken", []
    if kind == "a directory":
        path.mkdir()
    else:
        path.write_text("")
        path /= "run.html"
    with pytest.raises(OSError, match="taken"):
        run((drawn.append(1) or x for x in X), report=path)
    assert not drawn


def test_a_report_that_cannot_be_written_costs_no_state(tmp_path, monkeypatch):
    """The directory goes away in the run; the error of the run itself is the caller's."""
    place = tmp_path / "out"

    def lose(n, state, metrics):
        if n == 1:
            place.rmdir()
            place.write_text("")

    with pytest.warns(UserWarning, match=r"report: .*run\.html was not written: \w+Error"):
        state, history = run(report=place / "run.html", callback=lose)
    assert int(state.step) == len(X) == len(history["loss"])
    place.unlink()
    with pytest.raises(ZeroDivisionError), pytest.warns(UserWarning, match="was not written"):
        run(report=place / "run.html", callback=lambda *given: lose(*given) or 1 / (2 - given[0]))


def test_a_run_with_a_report_leaves_no_state_on_the_devices(tmp_path):
    found = []
    gc.collect()
    gc.disable()
    try:
        for _ in range(3):  # the first one may make constants
            run(report=tmp_path / "run.html")
            found.append(len(jax.live_arrays()))
    finally:
        gc.enable()
    assert found[0] == found[1] == found[2]


def test_a_run_without_a_step_has_no_report(tmp_path):
    with pytest.raises(ValueError, match="batches must hold at least one batch"):
        run([], report=tmp_path / "run.html")
    assert not (tmp_path / "run.html").exists()


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda: run(report=3), TypeError, "report must be a path; got 3"),
        (lambda: plot.report([1.0], "x"), TypeError, "history must be a mapping"),
        (lambda: plot.report({"loss": [1.0]}, 3), TypeError, "path must be a path; got 3"),
        (lambda: plot.report({"loss": [1.0]}, "x", about=3), TypeError, "about must be a mapping"),
        (lambda: run(log=object()), TypeError, "SummaryWriter, with the methods add_scalar"),
    ],
)
def test_bad_arguments(call, error, words):
    with pytest.raises(error, match=words):
        call()


BROWSER = next(filter(None, map(shutil.which, ("chromium", "google-chrome", "chrome"))), None)


@pytest.mark.skipif(BROWSER is None, reason="needs chromium or google-chrome on the path")
def test_a_browser_shows_the_report_and_asks_for_nothing_else(tmp_path):
    history = {"loss": np.array([4.0, 2.0, 1.0]), "learning_rate": np.full(3, 0.125)}
    # Were it taken for HTML, the browser would ask for it.
    about = {"name": '<img src="http://elsewhere.example/x.png">'}
    path = plot.report(history, tmp_path / "run.html", about=about)
    requests = tmp_path / "requests.json"
    done = subprocess.run(
        [
            *(BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--dump-dom"),
            *("--disable-background-networking", "--disable-component-update"),
            "--host-resolver-rules=MAP * ~NOTFOUND",  # what the browser asks for by itself
            *(f"--user-data-dir={tmp_path / 'profile'}", f"--log-net-log={requests}"),
            path.as_uri(),
        ],
        capture_output=True,
        text=True,
        timeout=120,
    )
    shown = Page(done.stdout)
    facts = {row[0]: row[1:] for row in shown.rows}
    assert facts["loss"] == ["4", "1", "3", "4", "1", "1", "0"]
    assert facts["name"] == [about["name"]]
    labels = {word.strip() for word in shown.words}
    assert {"loss", "learning rate", "step", "0.125"} <= labels
    asked = set(re.findall(r'"url":"(\w+://[^"]*)"', requests.read_text()))
    assert not [url for url in asked if "elsewhere" in url], asked


class Flushed:
    """What a SummaryWriter has written."""

    def __init__(self):
        self.scalars, self.flushed = [], 0

    def flush(self):
        self.flushed += 1


class Writer(Flushed):
    """What minimize needs of the SummaryWriter of torch or tensorboardX."""

    def add_scalar(self, name, value, step):
        self.scalars.append((name, value, step))


class FlaxWriter(Flushed):
    """What it needs of flax's."""

    def scalar(self, tag, value, step):
        self.scalars.append((tag, value, step))


@pytest.mark.parametrize("writer", [Writer(), FlaxWriter()], ids=["torch", "flax"])
def test_scalars_go_to_a_writer(writer):
    _, history = run(steps=4, log=writer, evaluate=lambda p: 7.0, evaluate_every=2)
    by_name = {name: [] for name, _, _ in writer.scalars}
    for name, value, step in writer.scalars:
        by_name[name].append((step, value))
    assert by_name.pop("evaluation") == [(2, 7.0), (4, 7.0)]
    assert [n for n, _ in by_name.pop("examples_per_second")] == [4]
    assert by_name.keys() == history.keys() - {"evaluation", "evaluation_step", "stopped"}
    for name, points in by_name.items():
        assert points == [(n + 1, x) for n, x in enumerate(history[name].tolist())]
    assert writer.flushed == 1


def records(path):
    """Yield the records of a file of TensorBoard: length, its checksum, data, their checksum."""
    data = path.read_bytes()
    while data:
        (length,) = struct.unpack("<Q", data[:8])
        yield data[12 : 12 + length]
        data = data[16 + length :]


def test_tensorboard_reads_the_scalars(tmp_path):
    tensorboard = pytest.importorskip("tensorboardX", reason="needs the extra tensorboard")
    from tensorboardX.proto.event_pb2 import Event

    with tensorboard.SummaryWriter(str(tmp_path)) as writer:
        _, history = run(steps=3, log=writer)
    (path,) = tmp_path.iterdir()
    events = [Event.FromString(record) for record in records(path)]
    losses = [
        (event.step, value.simple_value)
        for event in events
        for value in event.summary.value
        if value.tag == "loss"
    ]
    assert losses == [(n + 1, x) for n, x in enumerate(history["loss"].tolist())]
