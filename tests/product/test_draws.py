"""Drawn programs train as the reference run says; other ones with each commit.

`make draws N=500 SEED=1` draws more; tests/reference_run has all of it.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROGRAMS, PARTS = 40, 4  # in each of four processes: about two minutes of two cores


def seed_of_commit():
    """Return a number that is another one for each commit, or what OPTFN_DRAWS says."""
    if "OPTFN_DRAWS" in os.environ:
        return int(os.environ["OPTFN_DRAWS"])
    run = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    return int(run.stdout[:7] or "1", 16)


def draw(*arguments):
    """Run the draws in a process of their own, which has eight devices and 64 bits."""
    path = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
    command = [sys.executable, "-m", "reference_run", "--avoid", *map(str, arguments)]
    # Examples that other tests import ask for fewer devices, and XLA takes the last number.
    env = os.environ | {"PYTHONPATH": path, "XLA_FLAGS": ""}
    return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)


@pytest.mark.parametrize("part", range(PARTS))
def test_drawn_programs_train_as_the_reference_run(part):
    run = draw("--programs", PROGRAMS, "--seed", PARTS * seed_of_commit() + part)
    assert not run.returncode, run.stdout + run.stderr[-3000:]


def test_programs_that_failed_once_train_as_the_reference_run():
    run = draw("--kept")
    assert not run.returncode, run.stdout + run.stderr[-3000:]


def test_each_mutation_changes_one_place():
    for name, file, old, new in json.loads(
        (ROOT / "tests/reference_run/mutations.json").read_text()
    ):
        assert (ROOT / file).read_text().count(old) == 1 and new != old, name
