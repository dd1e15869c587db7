"""What ended a run, in its history; tests/reference_run draws runs that go on."""

import os
import signal

import jax.numpy as jnp
import numpy as np
import pytest

import optfn

EXAMPLES = np.random.default_rng(0).normal(size=(12, 8, 3)).astype(np.float32)


def loss(params, x):
    return jnp.mean((x @ params["w"] - 1.0) ** 2)


def evaluate(params):
    # It falls and rises, so that the best is somewhere in between.
    return jnp.abs(jnp.sum(params["w"]) - 0.15)


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
