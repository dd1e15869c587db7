"""Estimates of recorded programs beside formulas, and as if every collective were synchronous.

`fsdp_*` is a step of FSDP by sgd: three layers `x + silu(x @ up) @ down`, 2048 wide and 4096
inside, recomputed, bfloat16, 1,024 examples on each of 8 H100s, 16 v5e, and 64 v5p with gathers and
scatters on sparse cores. `windows_v5e` is what XLA's partitioner makes of the same loss: products
in windows, with permutes beside them, in loops that are unrolled twice. The remarks are cut.
"""

import dataclasses
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from benchmarks.schedule import estimate_schedule
from optfn.distributed import Chip, StepEstimate, estimate_step

RECORDINGS = Path(__file__).parents[1] / "recordings"
CHIPS = {
    "fsdp_H100": "h100",
    "fsdp_v5e": "v5e:4x4",
    "fsdp_v5p": "v5p:4x4x4",
    "windows_v5e": "v5e:4x4",
}
DEVICES = {"fsdp_H100": 8, "fsdp_v5e": 16, "fsdp_v5p": 64, "windows_v5e": 16}
PRODUCT = 2 * 1024 * 2048 * 4096
LAYERS, WEIGHTS = 3, 2 * 2048 * 4096 * 2  # bytes of a layer
OURS = ("fsdp_H100", "fsdp_v5e", "fsdp_v5p")


def text(name):
    return (RECORDINGS / f"{name}.hlo").read_text()


@pytest.mark.parametrize("name", CHIPS)
def test_flops_are_those_of_the_formula(name):
    """Forward two products a layer, backward four; of them the first runs again."""
    found = estimate_step(text(name), CHIPS[name])
    assert found.flops == LAYERS * 7 * PRODUCT
    assert found.recomputed_flops == LAYERS * PRODUCT
    peak = Chip.of(CHIPS[name]).flops
    assert found.utilization == pytest.approx(LAYERS * 6 * PRODUCT / peak / found.seconds)
    assert found.compute > found.flops / peak  # no product is faster than the peak


@pytest.mark.parametrize("name", OURS)
def test_bytes_are_those_of_a_ring(name):
    """Each layer is gathered twice and its gradient scattered once; a TPU pads scatters."""
    found = estimate_step(text(name), CHIPS[name])
    ring = (DEVICES[name] - 1) / DEVICES[name] * LAYERS * WEIGHTS
    assert found.sent["all-gather"] == pytest.approx(2 * ring)
    assert ring - 1 <= found.sent["reduce-scatter"] <= 1.02 * ring


@pytest.mark.parametrize("name", CHIPS)
def test_without_asynchronous_collectives_all_is_exposed(name):
    """With them less, and no kind for longer than it takes."""
    chip = Chip.of(CHIPS[name])
    found = estimate_schedule(text(name), chip, synchronous=True)
    assert found.exposed == pytest.approx(found.communication)
    assert found.seconds == pytest.approx(found.compute + sum(found.communication.values()))
    real = estimate_step(text(name), chip)
    assert real.compute == pytest.approx(found.compute)
    assert real.communication == pytest.approx(found.communication)
    assert sum(real.exposed.values()) < 0.95 * sum(found.exposed.values())
    assert real.seconds == pytest.approx(real.compute + sum(real.exposed.values()))
    assert set(real.exposed) == set(real.communication)
    assert all(0 <= real.exposed[k] <= x + 1e-12 for k, x in real.communication.items())
    assert all(real.asynchronous[k] <= n for k, n in real.count.items())


def test_asynchronous_forms_are_recognised():
    forms = {name: estimate_step(text(name), CHIPS[name]).asynchronous for name in CHIPS}
    assert forms["fsdp_H100"]["all-gather"] == 12  # start and done
    assert forms["fsdp_v5e"]["all-gather"] == 6  # carried by fusions
    assert forms["fsdp_v5p"]["all-gather"] == 24  # on a sparse core
    assert forms["fsdp_v5p"]["reduce-scatter"] == 18
    assert forms["windows_v5e"]["collective-permute"] > 100


def test_faster_links_expose_less():
    chip = Chip.of("h100")
    fast = dataclasses.replace(chip, link=1e12)
    found, faster = (estimate_step(text("fsdp_H100"), x) for x in (chip, fast))
    assert sum(faster.exposed.values()) < sum(found.exposed.values())
    assert faster.sent == found.sent and faster.compute == found.compute


@pytest.mark.parametrize(("name", "cycles"), [("v5e", 3 * 306_828 + 3_533), ("H100", None)])
def test_a_loop_of_one_chip(name, cycles):
    chip = Chip.of("h100" if cycles is None else "v5e")
    found = estimate_step(text(f"scan_{name}"), chip)
    assert found.communication == {} and found.flops == 0 and found.utilization == 0
    assert [loop.times for loop in found.loops] == [3]
    if cycles is None:
        moved = 3 * 2 * 4096 * 4096 * 4 + 1000 * 128 * 2
        assert found.seconds == pytest.approx(moved / chip.hbm, rel=1e-3)
    else:
        assert found.seconds == pytest.approx(cycles / 1.5e9, rel=1e-3)


def test_what_it_prints():
    lines = str(estimate_step(text("fsdp_v5p"), "v5p:4x4x4")).splitlines()
    assert lines[0] == "v5p, inferred from the compiled schedule: nothing was run"
    assert lines[1].startswith("step 2.25 ms = compute 1.05 ms + exposed 1.19 ms of 1.80 ms")
    assert lines[2].startswith("  all-gather: 36, 24 asynchronous, 1.20 ms, exposed 0.82 ms, 198.2")
    assert lines[-1] == "0.36 TFLOP, 0.05 of them again; model FLOPs utilization 30.0 %"


def test_short_times_are_microseconds():
    found = estimate_step(text("scan_H100"), "h100")
    lines = str(dataclasses.replace(found, seconds=2.5e-6, compute=0.0)).splitlines()
    assert lines[1].startswith("step 2.50 µs = compute 0.00 ms + exposed")


def test_what_cannot_be_estimated():
    found = text("fsdp_v5e")
    with pytest.raises(ValueError, match='text names no chip; pass chip="h100"'):
        estimate_step(found)
    with pytest.raises(ValueError, match=r"for 16 chips; name the slice.*got 1"):
        estimate_step(found, "v5e")
    with pytest.raises(ValueError, match=r"for 16 chips; .*got 64"):
        estimate_step(found, "v5e:8x8")
    with pytest.raises(ValueError, match="the text has no schedule"):
        estimate_step(found.replace(", is_scheduled=true", ""), "v5e:4x4")
    with pytest.raises(ValueError, match="not one of a TPU such as v5e"):
        estimate_step(text("fsdp_H100"), "v5e:4x2")
    with pytest.raises(TypeError, match=r"must be the result of step.lower\(...\).*, got int"):
        estimate_step(3)


def test_a_program_of_a_cpu_has_no_schedule_to_read():
    def multiply(x):
        return x @ jnp.tanh(x @ x)

    compiled = jax.jit(multiply).lower(jnp.ones((512, 512))).compile()
    for chip in (None, "h100"):
        with pytest.raises(ValueError, match="compiled for CPUs"):
            estimate_step(compiled, chip)
    with pytest.raises(ValueError, match="compiled for CPUs"):
        estimate_step(compiled.as_text(), "h100")
    assert isinstance(estimate_step(text("scan_H100"), "h100"), StepEstimate)
