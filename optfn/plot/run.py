"""Pictures of a run: the history that `minimize` returns."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias, cast

import numpy as np

from optfn.core import checks
from optfn.interop import packages
from optfn.plot.figure import check_mapping, draw_curve, scale_axis, style_axes

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# The history that `minimize` returns beside the state: arrays by name.
RunHistory: TypeAlias = Mapping[str, np.ndarray]

NORMS = {"grad_norm": "gradient", "update_norm": "update", "param_norm": "parameters"}
# The evaluations that are drawn with the losses of the training batches.
_OF_LOSS = ("evaluation", "evaluation/loss")
# The metrics that `record_metrics(per=)` records of each group of leaves, and their labels at axes.
_OF_GROUPS = {
    "grad_norm": "gradient norm",
    "update_norm": "update norm",
    "param_norm": "parameter norm",
    "update_ratio": "update ratio",
}
_WORDS = {"learning_rate": "learning rate", "clip_factor": "clip factor", **_OF_GROUPS}


def losses(
    history: RunHistory | Mapping[str, RunHistory],
    *,
    local_steps: int = 1,
    ax: "Axes | None" = None,
) -> "Axes":
    """Draw the loss of each training batch and the evaluations of the loss of one run, or the
    losses alone of several runs.

    The y axis is logarithmic if the losses are positive and span a factor above 100.

    Args:
      history: the history that `minimize` returns. Evaluations are drawn if `evaluate` returned a
        number, or a dict with the key "loss". Or several by name, such as a population,
        `{f"rate {r:g}": {"loss": y} for r, y in zip(rates, losses)}`, whose evaluations are left
        out.
      local_steps: as for `minimize`: how many steps an entry of the history stands for.
      ax: where to draw; None for a new figure.
    """
    if isinstance(history, Mapping) and any(isinstance(x, Mapping) for x in history.values()):
        return _compare_losses(cast("Mapping[str, RunHistory]", history), local_steps, ax)
    series = check_history(cast("RunHistory", history))
    ax = style_axes(ax)
    draw_curve(ax, *find_points(series, "loss", local_steps), "training batch")
    found = [name for name in _OF_LOSS if name in series]
    for name in found:
        ax.plot(*find_points(series, name, local_steps), "o-", markersize=4, label="evaluation")
    scale_axis(ax, *(series[name] for name in ("loss", *found)))
    ax.set(xlabel="step", ylabel="loss")
    if found:
        ax.legend(frameon=False)
    return ax


def _compare_losses(
    histories: Mapping[str, RunHistory], local_steps: int, ax: "Axes | None"
) -> "Axes":
    """Draw the losses of several runs, with colors in the order of the runs."""
    named = {k: check_history(x) for k, x in check_mapping("history", histories).items()}
    ax = style_axes(ax)
    colors = packages.optional_module("matplotlib", "plot").colormaps["viridis"]
    for i, (name, series) in enumerate(named.items()):
        color = colors(0.9 * i / max(len(named) - 1, 1))
        draw_curve(ax, *find_points(series, "loss", local_steps), name, color=color)
    scale_axis(ax, *(series["loss"] for series in named.values()))
    ax.set(xlabel="step", ylabel="loss")
    # Many are beside the curves, which would be below.
    place: dict[str, Any] = {"loc": "center left", "bbox_to_anchor": (1, 0.5)}
    ax.legend(frameon=False, fontsize="small", **(place if len(named) > 6 else {}))
    return ax


def learning_rate(history: RunHistory, *, local_steps: int = 1, ax: "Axes | None" = None) -> "Axes":
    """Draw the learning rate of each step, or the rates of the labels of a partition.

    Args:
      history: the history that `minimize` returns, with "learning_rate".
      local_steps: as for `minimize`.
      ax: where to draw; None for a new figure.
    """
    if any(name.startswith("learning_rate/") for name in history):
        return _draw_by_label(check_history(history), "learning_rate", local_steps, ax)
    return _draw_series(check_history(history, "learning_rate"), "learning_rate", local_steps, ax)


def _draw_by_label(
    series: RunHistory, word: str, local_steps: int, ax: "Axes | None" = None
) -> "Axes":
    """Draw the arrays "<word>/<label>" of a history, each with its label."""
    ax, start = style_axes(ax), f"{word}/"
    found = [name for name in series if name.startswith(start)]
    for name in found:
        draw_curve(ax, *find_points(series, name, local_steps), name.removeprefix(start))
    scale_axis(ax, *(series[name] for name in found))
    ax.set(xlabel="step", ylabel=_WORDS[word])
    ax.legend(frameon=False)
    return ax


def norms(history: RunHistory, *, local_steps: int = 1, ax: "Axes | None" = None) -> "Axes":
    """Draw the global norms of gradient, update and parameters on a logarithmic axis, or raise a
    ValueError if they were not recorded.

    Args:
      history: the history that `minimize` returns if `record_metrics` is around the optimizer.
      local_steps: as for `minimize`.
      ax: where to draw; None for a new figure.
    """
    series = check_history(history, "grad_norm")
    ax = style_axes(ax)
    for name, label in NORMS.items():
        if name in series:
            steps, norm = find_points(series, name, local_steps)
            draw_curve(ax, steps, np.where(norm > 0, norm, np.nan), label)
    ax.set(xlabel="step", ylabel="norm", yscale="log")
    ax.legend(frameon=False, ncols=3)
    return ax


def history(
    history: RunHistory, *, local_steps: int = 1, figure: "Figure | None" = None
) -> "Figure":
    """Draw everything in a history, one panel below another, and return the figure.

    There are panels for the losses with their evaluations, the learning rate, the norms and clip
    factor if they were recorded, the norms and ratios of groups (`record_metrics(per=)`), and each
    number that the loss (aux) or `evaluate` returned too.

    Args:
      history: the history that `minimize` returns.
      local_steps: as for `minimize`.
      figure: an empty figure of matplotlib; None for a new one.
    """
    panels = _make_panels(check_history(history), checks.count("local_steps", local_steps))
    if figure is None:
        pyplot = packages.optional_module("matplotlib.pyplot", "plot")
        figure = pyplot.figure(figsize=(7, 1 + 1.9 * len(panels)), layout="constrained")
    rows = figure.subplots(len(panels), 1, sharex=True, squeeze=False)[:, 0]
    for draw, ax in zip(panels, rows, strict=True):
        draw(ax=ax)
    for ax in rows[:-1]:
        ax.set(xlabel="")
    return figure


def _make_panels(series: RunHistory, local_steps: int) -> list[Callable[..., "Axes"]]:
    """Return a function of `ax` for each panel that `series` has arrays for, and for the clip
    factor only if it was below 1."""
    draws = {"loss": losses, "learning_rate": learning_rate, "grad_norm": norms}
    panels: list[Callable[..., Axes]] = [
        partial(draw, series, local_steps=local_steps)
        for name, draw in draws.items()
        if any(name in (key, key.partition("/")[0]) for key in series)
    ]
    panels += [
        partial(_draw_by_label, series, word, local_steps)
        for word in _OF_GROUPS
        if any(key.startswith(f"{word}/") for key in series)
    ]
    clipped = ["clip_factor"] if np.any(series.get("clip_factor", np.ones(1)) != 1) else []
    aux = [name for name in series if name.partition("/")[0] == "aux"]
    further = [name for name in series if name.startswith("evaluation/") and name not in _OF_LOSS]
    names = [*clipped, *aux, *further]
    return panels + [partial(_draw_series, series, name, local_steps) for name in names]


def _draw_series(
    series: RunHistory, name: str, local_steps: int, ax: "Axes | None" = None
) -> "Axes":
    """Draw one array: a curve over steps, or points for an array of evaluations."""
    ax = style_axes(ax)
    label = _WORDS.get(name, name)
    if name.startswith("evaluation/"):
        ax.plot(*find_points(series, name, local_steps), "o-", markersize=4)
        scale_axis(ax, series[name])
    else:
        draw_curve(ax, *find_points(series, name, local_steps), label)
    ax.set_xlabel("step")
    # The names of users may have a $.
    ax.set_ylabel(label.removeprefix("aux/").removeprefix("evaluation/"), parse_math=False)
    if name == "clip_factor":
        ax.set_ylim(0, 1.05)
    return ax


def check_history(history: RunHistory, *needed: str) -> dict[str, np.ndarray]:
    """Return a history as NumPy arrays, or raise a ValueError unless it has "loss", all `needed`,
    and one value per step or evaluation in each.

    The word "stopped" and arrays of bytes are left out.
    """
    arrays = {name: np.asarray(x) for name, x in check_mapping("history", history).items()}
    arrays.pop("stopped", None)  # a word
    # The history of a checkpoint may have the position of the batches beside it, as bytes.
    series = {name: x for name, x in arrays.items() if x.dtype != np.uint8}
    for name in ("loss", *needed):
        if name not in series:
            have = ", ".join(series)
            recorded = "; wrap the optimizer in record_metrics" if name in NORMS else ""
            raise ValueError(f"history must have {name!r}; it has {have}{recorded}")
    lengths = {"evaluation": len(series.get("evaluation_step", ())), "loss": len(series["loss"])}
    for name, x in series.items():
        counted = "evaluation" if name.startswith("evaluation") else "loss"
        if x.shape != (lengths[counted],):
            raise ValueError(
                f"history[{name!r}] must have one number for each {counted}, "
                f"shape ({lengths[counted]},); got shape {x.shape}"
            )
    return series


def find_points(series: RunHistory, name: str, local_steps: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the steps after which a series was recorded, and its values."""
    y = series[name]
    steps = checks.count("local_steps", local_steps) * np.arange(1, len(y) + 1)
    return (series["evaluation_step"] if name.startswith("evaluation") else steps), y
