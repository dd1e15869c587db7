"""Pictures: the numbers that are drawn are those that were given; matplotlib is optional."""

import itertools
import sys

import jax.numpy as jnp
import matplotlib
import numpy as np
import pytest

import optfn
from optfn import plot, schedules
from optfn.distributed import MemoryPlan, Trial, Tuning, plan

matplotlib.use("Agg")

from matplotlib import pyplot

STEPS = np.arange(1, 41)
HISTORY = {
    "loss": 100 / STEPS**2.0,
    "learning_rate": np.full(40, 0.1),
    "grad_norm": 1.0 / STEPS,
    "update_norm": 0.1 / STEPS,
    "param_norm": STEPS - 1.0,
    "clip_factor": np.minimum(1, STEPS / 10),
    "evaluation_step": np.array([20, 40]),
    "evaluation/loss": np.array([2.0, 1.0]),
    "evaluation/accuracy": np.array([0.5, 0.75]),
}


@pytest.fixture(autouse=True)
def closed():
    yield
    pyplot.close("all")


def drawn(ax) -> dict[str, np.ndarray]:
    """Return the points (n, 2) of each line by its label."""
    return {line.get_label(): np.stack(line.get_data(), axis=1) for line in ax.lines}


def test_losses_and_evaluations_of_the_loss():
    ax = plot.losses(HISTORY)
    lines = drawn(ax)
    np.testing.assert_array_equal(lines["training batch"], np.c_[STEPS, HISTORY["loss"]])
    np.testing.assert_array_equal(lines["evaluation"], [[20, 2.0], [40, 1.0]])
    assert ax.get_yscale() == "log"  # from 100 to 1/16
    assert plot.losses({"loss": [2.0, 1.0]}).get_yscale() == "linear"
    assert plot.losses({"loss": [1e3, 1.0, 0.0]}).get_yscale() == "linear"


def test_losses_of_several_runs():
    """A population is a dict of histories; each line has its name."""
    runs = {f"rate {i}": {"loss": np.linspace(1 + i, 0.1, 40)} for i in range(12)}
    ax = plot.losses(runs)
    series = drawn(ax)
    for name, history in runs.items():
        np.testing.assert_allclose(series[name], np.stack([np.arange(1, 41), history["loss"]], 1))
    assert [text.get_text() for text in ax.get_legend().get_texts()] == [*runs]
    assert len({line.get_color() for line in ax.lines}) == 12
    with pytest.raises(ValueError, match="history must have 'loss'"):
        plot.losses({"a": {"aux": np.ones(3)}})


def test_rates_of_a_partition_share_a_panel():
    rates = {"learning_rate/head": np.full(5, 0.1), "learning_rate/body": np.full(5, 0.01)}
    series = drawn(plot.learning_rate({"loss": np.ones(5)} | rates))
    np.testing.assert_array_equal(series["head"][:, 1], 0.1)
    np.testing.assert_array_equal(series["body"][:, 1], 0.01)
    assert len(plot.history({"loss": np.ones(5)} | rates).axes) == 2


def test_rounds_of_local_steps_stand_at_their_last_step():
    ax = pyplot.figure().subplots()
    assert plot.learning_rate(HISTORY, local_steps=3, ax=ax) is ax
    np.testing.assert_array_equal(drawn(ax)["learning rate"][:, 0], 3 * STEPS)


def test_long_curves_are_means_in_bands():
    """Each of 500 points is the mean of its interval, inside a band from least to greatest."""
    losses = np.random.default_rng(0).normal(size=1500)
    losses[7], losses[30] = np.nan, np.inf
    ax = plot.losses({"loss": losses})
    points = drawn(ax)["training batch"]
    assert len(points) == 500
    for i, (x, y) in enumerate(points):
        interval = losses[3 * i : 3 * i + 3]
        assert x == 3 * i + 2
        if np.isfinite(interval).all():
            assert y == pytest.approx(interval.mean())
        else:
            assert np.isnan(y) and i in (2, 10)
    band = np.concatenate([path.vertices for path in ax.collections[0].get_paths()])
    assert band[:, 1].min() == losses[np.isfinite(losses)].min()
    assert band[:, 1].max() == losses[np.isfinite(losses)].max()


def test_a_history_has_a_panel_for_each_kind_of_number():
    figure = plot.history(HISTORY)
    labels = [ax.get_ylabel() for ax in figure.axes]
    assert labels == ["loss", "learning rate", "norm", "clip factor", "accuracy"]
    norms = drawn(figure.axes[2])
    np.testing.assert_array_equal(norms["gradient"][:, 1], HISTORY["grad_norm"])
    assert np.isnan(norms["parameters"][0, 1])  # a logarithmic axis has no zero
    np.testing.assert_array_equal(norms["parameters"][1:, 1], HISTORY["param_norm"][1:])
    assert [len(ax.lines[0].get_xdata()) for ax in figure.axes] == [40, 40, 40, 40, 2]
    assert len(plot.history({"loss": [1.0]}).axes) == 1
    figure = plot.history({"loss": [1.0, 2.0], "aux/accuracy": [0.5, 0.75], "epoch": [1, 2]})
    assert [ax.get_ylabel() for ax in figure.axes] == ["loss", "accuracy"]
    np.testing.assert_array_equal(figure.axes[1].lines[0].get_xydata(), [[1, 0.5], [2, 0.75]])


def test_groups_of_norms_share_a_panel_for_each_norm():
    tx = optfn.record_metrics(optfn.sgd(0.1), per=["a", "b.*"])
    _, history = optfn.minimize(
        lambda p, x: jnp.sum((p["a"] * x) ** 2 + p["b"] ** 2), tx,
        {"a": jnp.ones(2), "b": jnp.ones(2)}, [np.float32(1)] * 3, progress=False,
    )  # fmt: skip
    axes = plot.history(history).axes
    labels = ["gradient norm", "update norm", "parameter norm", "update ratio"]
    assert [ax.get_ylabel() for ax in axes] == ["loss", "learning rate", "norm", *labels]
    words = ("grad_norm", "update_norm", "param_norm", "update_ratio")
    for ax, word in zip(axes[3:], words, strict=True):
        lines = drawn(ax)
        assert [*lines] == ["a", "b.*"]
        np.testing.assert_array_equal(lines["b.*"][:, 1], history[f"{word}/b.*"])


def test_evaluations_over_a_wide_range_have_a_logarithmic_axis():
    series = {"loss": [1.0, 2.0], "evaluation_step": [1, 2]}
    for values, scale in (([1e-4, 1.0], "log"), ([0.5, 1.0], "linear"), ([0.0, 1.0], "linear")):
        figure = plot.history(series | {"evaluation/error": values})
        assert [ax.get_yscale() for ax in figure.axes] == ["linear", scale]


def test_schedules_at_their_steps():
    cosine = schedules.cosine(0.1, 10, 5)
    lines = drawn(plot.schedules({"a": cosine, "b": lambda step: 0.5}, 50))
    np.testing.assert_array_equal(lines["a"][:, 0], np.arange(50))
    rates = [0.05 * (np.cos(np.pi * (i // 10) / 5) + 1) for i in range(50)]
    np.testing.assert_allclose(lines["a"][:, 1], rates, rtol=1e-5)
    assert set(lines["b"][:, 1]) == {0.5}
    points = drawn(plot.schedules([cosine], 100_000))["cosine(0.1, 10, 5)"]
    assert len(points) == 2000 and points[-1, 0] == 99_999


def test_the_ramp_is_that_of_the_rule():
    """The equation of `deep_gradient_compression`, step by step."""
    sparsity = (0.75, 0.9, 0.99)
    ax = plot.dgc_ramp(10, 7, sparsity)
    expected = [
        100.0 if step < 10 else 100 * (1 - sparsity[min((step - 10) * 3 // 7, 2)])
        for step in range(10 + 7 + 8)
    ]
    np.testing.assert_allclose(ax.lines[0].get_ydata(), expected)
    assert [text.get_text() for text in ax.texts] == ["100 %", "25 %", "10 %", "1 %"]
    assert len(plot.dgc_ramp(0, steps=5).lines[0].get_ydata()) == 5


def test_memory_has_a_bar_for_each_part():
    plans = {"whole": MemoryPlan(4000, 8000, 4000, 7000), "spread": MemoryPlan(500, 1000, 4000, 0)}
    ax = plot.memory(plans)
    assert [text.get_text() for text in ax.get_legend().get_texts()] == list(MemoryPlan._fields[:3])
    for k, bars in enumerate(ax.containers):
        widths = [bar.get_width() for bar in bars]
        np.testing.assert_allclose(widths, [plans[name][k] / 1e3 for name in plans])
    assert [bar.get_x() for bar in ax.containers[2]] == [12.0, 1.5]
    assert ax.get_xlabel() == "kB on each device"
    texts = [text.get_text().strip() for text in ax.texts]
    assert texts == ["7 kB sent per step", "0 B sent per step"]


def test_recomputation_as_points_and_budgets_as_a_line():
    costs = {"nothing": (8e6, 2e9), "each": (2e6, 3e9), "names": (1.9e6, 3.01e9)}
    costs["√n"] = costs["each"]
    ax = plot.recompute(costs, budgets=[(4e6, 2.5e9), (3e6, 2.8e9)])
    budgets, *points = (line.get_xydata() for line in ax.lines)
    np.testing.assert_allclose(budgets, [[3, 1.4], [4, 1.25]])
    np.testing.assert_allclose(np.concatenate(points), [[8, 1], [2, 1.5], [1.9, 1.505]])
    named = [line.get_label() for line in ax.lines]
    assert named == ["byte budgets", "nothing", "each\n√n", "names"]  # both names of a point


def test_a_tuning_has_the_milliseconds_of_each_way():
    rows = (
        Trial({}, 8, kept=2e9, temporaries=1e9, compute=0.2, exposed=0.1, seconds=0.3),
        Trial(
            {"shard": "state"}, 8, kept=1e9, temporaries=1e9, compute=0.4, exposed=0.0, seconds=0.4
        ),
        Trial({"shard": "params"}, 8, fits=False),
    )
    ax = plot.tuning(Tuning(rows, 80e9))
    widths = [[bar.get_width() for bar in group] for group in ax.containers]
    np.testing.assert_allclose(widths, [[200, 400], [100, 0]])
    assert [x.get_text() for x in ax.get_yticklabels()] == ["whole", "shard='state'"]
    assert [x.get_text().strip() for x in ax.texts] == ["3 GB", "2 GB"]
    with pytest.raises(ValueError, match="the time of no way is known"):
        plot.tuning(Tuning(rows[2:], 80e9))


def test_a_timetable_has_a_bar_for_each_cell():
    theory = plan(2, 3, schedule="zb")
    ax = plot.timetable(theory)
    bars = {(bar.get_x(), round(bar.get_y() + bar.get_height() / 2)) for bar in ax.patches}
    assert len(bars) == len(list(theory.cells())) == 18
    assert max(bar.get_x() + bar.get_width() for bar in ax.patches) == theory.units
    for stage in range(2):  # side by side in each row
        row = sorted((x.get_x(), x.get_width()) for x in ax.patches if round(x.get_y()) == stage)
        assert all(a + width <= b for (a, width), (b, _) in itertools.pairwise(row))
        assert sum(width for _, width in row) == 3 * 3
    assert len(ax.get_legend().get_texts()) == 3


GOOD = {
    "learning_rate": (HISTORY,),
    "losses": (HISTORY,),
    "memory": ({"a": MemoryPlan(1, 1, 1, 1)},),
    "norms": (HISTORY,),
    "recompute": ({"a": (1, 1)},),
    "tuning": (Tuning((Trial({}, 8, seconds=1.0, kept=1, temporaries=1),), None),),
    "schedules": (schedules.noam(1, 1), 5),
    "dgc_ramp": (1,),
}


@pytest.mark.parametrize("name", GOOD)
def test_what_is_no_axes_is_an_error_that_says_so(name):
    with pytest.raises(TypeError, match="ax must be axes of matplotlib; got 3"):
        getattr(plot, name)(*GOOD[name], ax=3)


@pytest.mark.parametrize(
    ("name", "arguments", "error", "words"),
    [
        ("losses", ([1.0],), TypeError, "history must be a mapping from names; got"),
        ("losses", ({},), ValueError, "history must not be empty"),
        ("losses", ({"cost": [1.0]},), ValueError, "must have 'loss'; it has cost"),
        ("losses", ({"loss": [[1.0]]},), ValueError, r"history\['loss'\] must have one number"),
        ("norms", ({"loss": [1.0]},), ValueError, "'grad_norm'; it has loss; wrap the optimizer"),
        ("learning_rate", ({"loss": [1.0]},), ValueError, "must have 'learning_rate'"),
        ("history", ({"loss": [1.0], "evaluation": [1.0]},), ValueError,
         r"each evaluation, shape \(0,\); got shape \(1,\)"),
        ("schedules", (0.1, 5), TypeError, "schedules must be a mapping from names; got 0.1"),
        ("schedules", ({"a": 0.1}, 5), TypeError, r"schedules\['a'\] must be a function of the"),
        ("schedules", ({"a": lambda i: jnp.ones(2)}, 5), ValueError, r"give a scalar.*\(2,\)"),
        ("schedules", (schedules.noam(1, 1), 0), ValueError, "steps must be >= 1; got 0"),
        ("dgc_ramp", (-1,), ValueError, "rampup_begin_step must be >= 0"),
        ("dgc_ramp", (0, 1, (2.0,)), ValueError, "sparsity must be"),
        ("memory", ({"a": (1, 2, 3, 4)},), TypeError, r"plans\['a'\] must be a MemoryPlan"),
        ("recompute", ({"a": (1, 0)},), ValueError, r"costs\['a'\] must be \(bytes, FLOPs\)"),
        ("recompute", ({"a": (1, 1)}, [3]), ValueError, r"budgets\[0\] must be \(bytes, FLOPs"),
        ("timetable", ("1f1b",), TypeError, "plan must be a Plan; got '1f1b'"),
        ("tuning", ("x",), TypeError, "tuning must be a Tuning; got 'x'"),
    ],
)  # fmt: skip
def test_bad_arguments(name, arguments, error, words):
    with pytest.raises(error, match=words):
        getattr(plot, name)(*arguments)


def test_matplotlib_is_optional(tmp_path, monkeypatch):
    """Where it is missing, the error names the extra, at once; test_release.py imports none."""
    for name in [x for x in sys.modules if x.partition(".")[0] == "matplotlib"]:
        monkeypatch.setitem(sys.modules, name, None)
    path, arguments = tmp_path / "run.html", (optfn.sgd(0.1), jnp.zeros(()))
    steps = []
    for call in (
        lambda: plot.losses({"loss": [1.0]}),
        lambda: plan(2, 2).draw(),
        lambda: optfn.minimize(lambda w, x: w, *arguments, map(steps.append, [1]), report=path),
    ):
        with pytest.raises(ImportError, match=r"matplotlib is not installed: pip install"):
            call()
    assert not path.exists() and not steps
