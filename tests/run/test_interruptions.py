"""A run that is interrupted, and goes on, ends as a run that was not.

Its state, history, log and best state are the same, bit for bit, whatever ended its parts.
"""

import json
import os
import signal

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from grids import suite

import optfn
from optfn.distributed import data_mesh

EXAMPLES = np.random.default_rng(0).normal(size=(12, 8, 3)).astype(np.float32)


class Broken(Exception):
    """What ends a part of a run in the middle."""


def loss(params, x):
    return jnp.mean((x @ params["w"] - 1.0) ** 2)


def evaluate(params):
    # It falls and rises, so that the best is somewhere in between.
    return jnp.abs(jnp.sum(params["w"]) - 0.15)


def draw(seed):
    """Return the options of a run, and how and where its parts end."""
    rng = np.random.default_rng(seed)
    epochs = int(rng.integers(0, 4))
    every = [1, 3, 5, "epoch" if epochs else 4, None][rng.integers(5)]
    options = {
        "evaluate_every": every,
        "keep_best": bool(rng.integers(2)),
        "prefetch": int(rng.integers(2)),
        "save_every": int(rng.integers(1, 6)),
    }
    if epochs:
        options["epochs"] = epochs
    if every is not None and rng.integers(2):
        options["patience"] = int(rng.integers(2, 5))
    if rng.integers(2):
        options["evaluate_average"] = True
    if not rng.integers(3):
        options |= {"mesh": data_mesh(2), "local_steps": 2}
    if options.get("evaluate_average"):
        options.pop("local_steps", None)
    per_call = options.get("local_steps", 1)
    steps = len(EXAMPLES) * max(1, epochs) * per_call
    ends = [
        (int(rng.integers(1, steps // per_call + 1)) * per_call, kind)
        for kind in rng.choice(["signal", "callback", "exception"], size=rng.integers(1, 4))
    ]
    return options, ends


def run(options, directory, end=(None, None)):
    """Run, or go on with a run; it ends after a step in one of three ways, or at its end."""
    at, kind = end

    def callback(step, state, metrics):
        if step != at:
            return False
        if kind == "signal":
            os.kill(os.getpid(), signal.SIGINT)
        if kind == "exception":
            raise Broken
        return kind == "callback"

    tx = optfn.adam(0.05)
    if options.get("evaluate_average"):
        tx = optfn.chain(tx, optfn.exponential_moving_average(0.8))
    options = dict(options)
    if "local_steps" in options:
        options["outer"] = optfn.sgd(1.0)
    return optfn.minimize(
        loss, tx, {"w": jnp.zeros(3)}, EXAMPLES, evaluate=evaluate, checkpoint=directory / "run",
        log=directory / "log.jsonl", callback=callback, progress=False, **options,
    )  # fmt: skip


def read_log(directory):
    lines = map(json.loads, (directory / "log.jsonl").read_text().splitlines())
    return [{k: x for k, x in line.items() if "per_second" not in k} for line in lines]


# A part of a run may see no better evaluation than its first one.
@pytest.mark.filterwarnings("ignore:evaluation rose from each evaluation")
@pytest.mark.parametrize("seed", suite(range(120), 7, 36, 108))
def test_a_run_that_goes_on_is_the_unbroken_run(seed, tmp_path, capsys):
    options, ends = draw(seed)
    whole, other = tmp_path / "whole", tmp_path / "other"
    state, history = run(options, whole)
    for end in ends:
        try:
            _, part = run(options, other, end)
        except Broken:
            continue
        if part["stopped"] == "signal":
            assert "stopped by SIGINT" in capsys.readouterr().err
    again, resumed = run(options, other)
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(again), jax.device_get(state))
    assert resumed.keys() == history.keys()
    for name, x in history.items():
        np.testing.assert_array_equal(resumed[name], x, err_msg=name)
    assert read_log(other) == read_log(whole)
    if options["keep_best"]:
        assert [x.name for x in (other / "run" / "best").iterdir()] == [
            x.name for x in (whole / "run" / "best").iterdir()
        ]
        best = [optfn.load_params(x / "run" / "best", {"w": jnp.zeros(3)}) for x in (other, whole)]
        np.testing.assert_array_equal(*(x["w"] for x in best))


ENDS = {
    "steps": {"steps": 5},
    "batches": {},
    "patience": {"patience": 2, "evaluate_every": 1},
    "callback": {"callback": lambda step, state, metrics: step == 3},
    "signal": {"callback": lambda *_: os.kill(os.getpid(), signal.SIGINT)},
}


@pytest.mark.usefixtures("interrupt")
@pytest.mark.parametrize("word", ENDS)
def test_the_history_says_what_ended_a_run(word):
    judge = (lambda params: 0.0) if word == "patience" else evaluate
    _, history = optfn.minimize(
        loss, optfn.adam(0.05), {"w": jnp.zeros(3)}, EXAMPLES, evaluate=judge, progress=False,
        **ENDS[word],
    )  # fmt: skip
    assert history["stopped"] == word


def test_a_history_with_its_word_is_saved_plotted_and_restored(tmp_path):
    state, history = optfn.minimize(
        loss, optfn.adam(0.05), {"w": jnp.zeros(3)}, EXAMPLES, steps=5, progress=False
    )
    optfn.save_checkpoint(tmp_path, state, history)
    assert str(optfn.restore_checkpoint(tmp_path, state)[1]["stopped"]) == "steps"
    whole, more = optfn.minimize(
        loss, optfn.adam(0.05), {"w": jnp.zeros(3)}, EXAMPLES, checkpoint=tmp_path, progress=False
    )
    assert more["stopped"] == "batches" and len(more["loss"]) == len(EXAMPLES)
    assert int(whole.step) == len(EXAMPLES)
