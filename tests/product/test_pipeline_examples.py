"""The pipeline's example, at toy size."""

import sys

import numpy as np
import pytest

from examples import pipeline, text, transformer


@pytest.mark.nightly  # its schedules are compared with one device in test_pipeline.py
def test_the_example_trains_as_one_device(monkeypatch, tmp_path, capsys):
    """What `--dgc` adds is compared in test_pipeline_compression.py."""
    small = transformer.Config(width=8, heads=2, blocks=4, hidden=16, length=8, recent=2)
    monkeypatch.setattr(pipeline, "CONFIG", small)
    monkeypatch.setattr(pipeline, "BATCH", 16)
    training = np.arange(3000, dtype=np.uint8)
    monkeypatch.setattr(text, "standard_library", lambda: (training, training))
    monkeypatch.setattr(sys, "argv", ["pipeline", "--steps", "4", "--out", str(tmp_path)])
    pipeline.main()
    out = capsys.readouterr().out.splitlines()
    assert f"picture: {tmp_path / 'schedule.png'}" in out
    assert (tmp_path / "schedule.png").read_bytes().startswith(b"\x89PNG")
    assert out[0].startswith("1f1b: 4 stages, 8 microbatches; 14 ticks")
    runs = [line for line in out if " from one device" in line]
    assert len(runs) == 3
    for line in runs:
        assert float(line.split("at most ")[1].split()[0]) <= 1e-5
        first, last = line.split("loss ")[1].split(",")[0].split(" to ")
        assert float(last) < float(first) == pytest.approx(np.log(256), abs=1e-3)


def test_stages_hold_the_whole_model():
    key = pipeline.jax.random.key(0)
    params = pipeline.jax.eval_shape(lambda: transformer.init(key, pipeline.CONFIG))
    stages = pipeline.split(params)
    assert len(stages) == pipeline.STAGES
    leaves = pipeline.jax.tree.leaves
    assert sum(x.size for x in leaves(stages)) == sum(x.size for x in leaves(params))
