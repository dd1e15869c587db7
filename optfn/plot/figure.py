"""The parts of all pictures: axes, checked or new, and curves of any length."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from optfn.core import checks
from optfn.interop import packages

if TYPE_CHECKING:
    from matplotlib.axes import Axes

T = TypeVar("T")

# A curve with more points is drawn as the means of this many intervals, with a band around them.
MAX_POINTS = 500


def style_axes(ax: "Axes | None", size: tuple[float, float] = (7.0, 3.5)) -> "Axes":
    """Return `ax`, or the axes of a new figure for None, without a frame at the top and the right,
    or raise a TypeError if it is no axes.

    Args:
      ax: axes of matplotlib, or None.
      size: width and height of a new figure in inches.
    """
    if ax is None:
        pyplot = packages.optional_module("matplotlib.pyplot", "plot")
        ax = pyplot.subplots(figsize=size, layout="constrained")[1]
    elif not hasattr(ax, "plot"):
        raise TypeError(f"ax must be axes of matplotlib; got {checks.show(ax)}")
    ax.spines[["top", "right"]].set_visible(False)
    ax.grid(alpha=0.25)
    ax.set_axisbelow(True)
    return ax


def check_mapping(
    argument: str, values: Mapping[str, T], kind: type[T | object] = object
) -> dict[str, T]:
    """Return a mapping from names as a dict, or raise a ValueError if it is empty, and a TypeError
    if it is no mapping or has a value of another class.

    Args:
      argument: the name of the argument, for errors.
      values: the value of the argument.
      kind: the class that the values must be of; `object` for any.
    """
    checks.instance(argument, values, Mapping, "a mapping from names")
    if not values:
        raise ValueError(f"{argument} must not be empty")
    for name, value in values.items():
        checks.instance(f"{argument}[{name!r}]", value, kind, f"a {kind.__name__}")
    return {str(name): value for name, value in values.items()}


def draw_curve(ax: "Axes", x: np.ndarray, y: np.ndarray, label: str, **style: Any) -> None:
    """Draw a curve without its values that are not finite, or for more than MAX_POINTS points the
    means of intervals with a band from minimum to maximum.

    Intervals that contain a value that is not finite are left out.

    Points that are not finite are left out, and so are intervals that contain one.
    """
    y = np.where(np.isfinite(y), y, np.nan).astype(np.float64)
    if len(y) > MAX_POINTS:
        edges = np.linspace(0, len(y), MAX_POINTS + 1).astype(int)
        starts, counts = edges[:-1], np.diff(edges)
        x, mean = (np.add.reduceat(values, starts) / counts for values in (x, y))
        (line,) = ax.plot(x, mean, label=label, **style)
        low, high = np.minimum.reduceat(y, starts), np.maximum.reduceat(y, starts)
        ax.fill_between(x, low, high, alpha=0.25, linewidth=0, color=line.get_color())
    else:
        ax.plot(x, y, label=label, **({"marker": "."} if len(y) == 1 else {}) | style)


def scale_axis(ax: "Axes", *curves: np.ndarray) -> None:
    """Make the y axis logarithmic if all finite values are positive and span a factor above 100,
    and leave it unchanged otherwise."""
    values = np.concatenate([np.ravel(y) for y in curves])
    values = values[np.isfinite(values)]
    if values.size and values.min() > 0 and values.max() > 100 * values.min():
        ax.set_yscale("log")
