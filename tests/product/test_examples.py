"""The demo and the examples run, at toy size, and say what they promise."""

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from PIL import Image
from sklearn.metrics import roc_auc_score

import optfn
from examples import compression, demo, gallery, pipeline, recommender, text, transformer, words
from optfn.checkpoint.newest import list_checkpoints


@pytest.fixture
def toy(monkeypatch, tmp_path, capsys):
    """Run an example on a small model and text; return its lines, of which one names a picture."""

    def run(module, blocks, *options):
        small = transformer.Config(width=8, heads=2, blocks=blocks, hidden=16, length=8, recent=2)
        monkeypatch.setattr(module, "CONFIG", small)
        training = np.arange(3000, dtype=np.uint8)
        monkeypatch.setattr(text, "standard_library", lambda: (training, training))
        monkeypatch.setattr(sys, "argv", [module.__name__, *options, "--out", str(tmp_path)])
        module.main()
        lines = capsys.readouterr().out.splitlines()
        (picture,) = tmp_path.glob("*.png")
        assert f"picture: {picture}" in lines
        assert picture.read_bytes().startswith(b"\x89PNG")
        return lines

    return run


def test_the_demo_trains_resumes_and_draws(monkeypatch, tmp_path, capsys):
    """A few steps of one optimizer on a small model; the picture's path is on a line of its own."""
    small = transformer.Config(width=16, heads=2, blocks=1, hidden=32, length=16, recent=2)
    monkeypatch.setattr(demo, "CONFIG", small)
    full = text.standard_library
    monkeypatch.setattr(text, "standard_library", lambda: tuple(t[:4000] for t in full()))
    arguments = ["demo", "--optimizers", "adamw", "--average", "--resume", "--out", str(tmp_path)]
    for steps in ("2", "4"):
        monkeypatch.setattr(sys, "argv", [*arguments, "--steps", steps])
        demo.main()
        out = capsys.readouterr()
    assert f"picture: {tmp_path / 'curves.png'}" in out.out.splitlines()
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert "step 3 loss" in out.err  # it went on from step 2
    assert "held-out bits per byte" in out.out
    assert "embed/table" in out.out


def test_the_gallery_is_drawn(monkeypatch, tmp_path):
    """The path has the best rate of those that stay in the picture; files are small pictures."""
    saddle = gallery.SURFACES["saddle"]._replace(steps=5, noise=0.0)
    monkeypatch.setitem(gallery.SURFACES, "saddle", saddle)
    monkeypatch.setattr(gallery, "OPTIMIZERS", {"sgd": optfn.sgd})
    monkeypatch.setattr(gallery, "RATES", np.array([0.01, 0.2, 10.0]))
    path, rate = gallery.paths(saddle, optfn.sgd)
    w = np.array(saddle.start)
    for point in path[1:]:
        w = w - 0.2 * np.array([w[0] ** 3 - w[0], 4 * w[1]])
        np.testing.assert_allclose(point, w, rtol=1e-4)
    assert rate == 0.2
    names = ["paths_saddle", "dgc_ramp"]
    monkeypatch.setattr(sys, "argv", ["gallery", "--out", str(tmp_path), "--only", *names])
    gallery.main()
    assert {file.stem for file in tmp_path.iterdir()} == {*names}
    for file in tmp_path.iterdir():
        with Image.open(file) as picture:
            assert picture.width >= 800 and len(picture.getcolors()) > 2


def test_the_text_is_split_by_file_and_compressed():
    train, held_out = text.standard_library()
    assert 0.005 < len(held_out) / len(train) < 0.2
    bits = text.compressors(held_out[:20000])
    assert 0 < bits["lzma"] < 8
    assert 0 < bits["zlib"] < 8


def test_a_uniform_model_needs_eight_bits():
    config = transformer.Config(blocks=1, length=16)
    bits = text.bits_per_byte(
        lambda p, w: transformer.losses(p, w, config),
        jax.jit(lambda key: transformer.init(key, config))(jax.random.key(0)),
        np.arange(2000, dtype=np.uint8),
        16,
        batch=4,
    )
    assert bits == pytest.approx(8.0)


def test_word_vectors_are_the_same_with_rows(monkeypatch, capsys):
    vocabulary, text = words.identifiers()
    assert len(vocabulary) >= 50_000
    assert len(set(vocabulary)) == len(vocabulary)
    monkeypatch.setattr(words, "identifiers", lambda: (vocabulary[:500], text[text < 500]))
    arguments = ["words", "--steps", "4", "--dense-steps", "3", "--near", "self"]
    monkeypatch.setattr(sys, "argv", arguments)
    words.main()
    out = capsys.readouterr().out
    gap = float(out.split("within ")[1].split(" ")[0])
    assert gap < 1e-5
    assert "self: " in out


def test_the_recommender_learns_on_sharded_tables(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["recommender", "--toy", "--steps", "30", "--l1", "3e-3"])
    recommender.main()
    lines = capsys.readouterr().out.splitlines()
    scores = {line[:24].strip(): line[24:].split() for line in lines if "model  " in line}
    initial, trained, best = (float(auc) for auc, _ in scores.values())
    assert list(scores) == ["initial model", "trained model", "generating model"]
    assert 0.4 < initial < 0.6 and initial + 0.15 < trained < best < 0.95
    shares = [int(line.split()[-1][:-1]) for line in lines if line.endswith("%")]
    assert len(shares) == 3 and 0 < shares[0] < min(shares[1:])  # what has no effect becomes 0
    total, part = (float(x.split()[0]) for x in lines[-2].split(":")[1].split(","))
    assert part < 1.1 * total / 8


def test_auc_is_the_area_under_the_roc_curve():
    rng = np.random.default_rng(0)
    score, clicked = np.round(rng.normal(size=500), 1), rng.integers(0, 2, 500)  # with ties
    assert recommender.auc(score, clicked) == pytest.approx(roc_auc_score(clicked, score))
    assert recommender.log_loss(np.zeros(2), np.array([0, 1])) == pytest.approx(np.log(2))


def test_the_probability_of_a_click_is_that_of_the_log():
    """The clicks have the frequencies that their log-odds say; ids are those of ranks."""
    log = recommender.Log(recommender.Sizes(users=50, items=20), seed=0)
    batch, score = log.sample(20_000, np.random.default_rng(0))
    p = 1 / (1 + np.exp(-score))
    assert abs(np.sum(batch["clicked"] - p)) < 4 * np.sqrt(np.sum(p * (1 - p)))
    assert len(np.unique(batch["embed"][:, 0])) == 50


def test_the_elastic_program_goes_on_where_a_signal_stopped_it(tmp_path):
    """Status 75 asks the launcher to start it again; with status 0 all steps are made."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    launched = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    program = Path(__file__).parents[2] / "examples" / "elastic" / "train.py"
    command = [sys.executable, program, tmp_path / "run{process}"]

    def start():
        environment = os.environ | launched | {"JAX_PLATFORMS": "cpu"}
        return subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)

    with start() as first:
        for line in first.stderr:
            if line.startswith("step 20 "):
                first.send_signal(signal.SIGTERM)
    assert first.returncode == 75
    stopped = int(list_checkpoints(tmp_path / "run0")[-1].stem[5:])
    assert 20 <= stopped < 200
    with start() as second:
        words = second.stderr.read()
    assert second.returncode == 0, words
    assert f"resumed from step {stopped}" in words
    assert list_checkpoints(tmp_path / "run0")[-1].stem == "step_000000200"


def test_the_example_of_compression_trains_and_draws(toy, monkeypatch):
    monkeypatch.setattr(compression, "SPARSITY", (0.5, 0.99))
    out = toy(compression, 1, "--steps", "5")
    rows = [line for line in out if line.startswith(tuple(compression.schemes(5)))]
    assert len(rows) == 4 and rows[0].startswith("dense momentum")


def test_the_bytes_of_the_ramp_fall():
    key = jax.random.key(0)
    params = jax.eval_shape(lambda: transformer.init(key, compression.CONFIG))
    state = jax.eval_shape(compression.schemes(25)["dgc_momentum"]["tx"].init, params)
    traffic = state[0].exchanged.traffic
    sent = np.array([traffic.bytes_sent(jnp.int32(n), jnp.int32(4)) for n in range(10)])
    assert (np.diff(sent) <= 0).all()
    assert (sent[4:] == sent[4]).all() and sent[0] > 50 * sent[4]


@pytest.mark.nightly  # its schedules are compared with one device in test_pipeline.py
def test_the_example_of_a_pipeline_trains_as_one_device(toy, monkeypatch):
    """What `--dgc` adds is compared in test_pipeline_in_mesh.py."""
    monkeypatch.setattr(pipeline, "BATCH", 16)
    out = toy(pipeline, 4, "--steps", "4")
    assert out[0].startswith("1f1b: 4 stages, 8 microbatches; 14 ticks")
    runs = [line for line in out if " from one device" in line]
    assert len(runs) == 3
    for line in runs:
        assert float(line.split("at most ")[1].split()[0]) <= 1e-5
        first, last = line.split("loss ")[1].split(",")[0].split(" to ")
        assert float(last) < float(first) == pytest.approx(np.log(256), abs=1e-3)


def test_stages_hold_the_whole_model():
    key = jax.random.key(0)
    params = jax.eval_shape(lambda: transformer.init(key, pipeline.CONFIG))
    stages = pipeline.split(params)
    assert len(stages) == pipeline.STAGES
    sizes = [sum(x.size for x in jax.tree.leaves(tree)) for tree in (stages, params)]
    assert sizes[0] == sizes[1]
