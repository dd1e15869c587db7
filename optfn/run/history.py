"""The history of a run: the metrics of each step, and the evaluations."""

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from optfn.core import tree
from optfn.core.types import Leaf, PyTree
from optfn.mesh.state.reports import is_curve

# The metrics of each step that the history keeps, besides those that an optimizer reports; for
# nested ones such as "aux/accuracy", the first word.
PER_STEP = ("loss", "weight", "learning_rate", "bytes_sent", "epoch", "aux")

# When this many steps have their metrics on the device, all of them are moved to the host.
_CHUNK = 1000


class History:
    """The metrics of each step, the latest ones still on the device, and the evaluations.

    weightless: the number, from 0, of the first call on the host whose loss, a `Mean`, had no
      weight; None without any.
    nonfinite: the number and the value of the first loss on the host that is not finite; None
      without any.
    """

    def __init__(self) -> None:
        self.earlier: dict[str, np.ndarray] = {}
        self.steps: list[dict[str, Any]] = []
        self.evaluations: list[dict[str, float]] = []
        self._on_host = 0
        self.nonfinite: tuple[int, float] | None = None
        self.weightless: int | None = None

    def first_nonfinite(self) -> tuple[int, float] | None:
        """Move all losses to the host, and return the index, from 0, and the value of the first
        that is not finite but has weight, or None if there is none."""
        self._move_to_host()
        return self.nonfinite

    def append(self, metrics: Mapping[str, Any]) -> None:
        """Add the metrics of a step that the history keeps. They stay on the device until the
        metrics of many steps are moved to the host together."""
        if len(self.steps) == _CHUNK:
            self._move_to_host()
        kept = {k: x for k, x in metrics.items() if k.partition("/")[0] in PER_STEP or is_curve(k)}
        self.steps.append(_scalars_by_name(kept))

    def arrays(self) -> dict[str, np.ndarray]:
        """Move all metrics to the host, and return an array for each, earlier entries first, with
        NaN where one is missing."""
        self._move_to_host()
        per_step, evaluations = self._split_tables()
        return per_step | _join_tables(evaluations, _to_columns(self.evaluations))

    def drop_last_evaluation(self) -> None:
        """Forget the last evaluation of an earlier part of the run."""
        steps, evaluations = self._split_tables()
        shorter = {k: x[:-1] for k, x in evaluations.items()}
        self.earlier = steps | {k: x for k, x in shorter.items() if len(x)}

    def _split_tables(self) -> list[dict[str, np.ndarray]]:
        """Return two dicts of the columns on the host, of the steps and of the evaluations."""
        return [
            {k: x for k, x in self.earlier.items() if k.startswith("evaluation") == of_evaluations}
            for of_evaluations in (False, True)
        ]

    def _move_to_host(self) -> None:
        """Move the latest steps to the host in one transfer, and note the first loss that is not
        finite and the first without weight. Each transfer waits for the device."""
        columns = _to_columns(_copy_to_host(self.steps))
        loss = columns.get("loss", np.zeros(0))
        # Such a step has changed nothing, and its loss is 0/0.
        without = columns.get("weight", np.ones(loss.shape)) == 0
        if self.weightless is None and without.any():
            self.weightless = self._on_host + int(np.argmax(without))
        bad = np.flatnonzero(~np.isfinite(loss) & ~without)
        if len(bad) and self.nonfinite is None:
            self.nonfinite = self._on_host + int(bad[0]), float(loss[bad[0]])
        self._on_host += len(self.steps)
        self.earlier |= _join_tables(self._split_tables()[0], columns)
        self.steps.clear()


def _copy_to_host(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return metrics with their arrays on the host. NumPy reads the memory of a CPU, for which
    `device_get` takes four times as long, as long as a third of a step of a small model."""
    arrays = [x for x in rows[-1].values() if isinstance(x, jax.Array)] if rows else []
    if any(device.platform != "cpu" for x in arrays for device in x.devices()):
        return jax.device_get(rows)
    return [{k: np.asarray(x) for k, x in row.items()} for row in rows]


def _to_columns(rows: list[dict[str, Any]]) -> dict[str, np.ndarray]:
    """Return an array for each name that any of the rows has, with NaN where a row lacks it."""
    names = dict.fromkeys(name for row in rows for name in row)
    return {k: np.array([row.get(k, np.nan) for row in rows]) for k in names}


def _join_tables(
    first: dict[str, np.ndarray], then: dict[str, np.ndarray]
) -> dict[str, np.ndarray]:
    """Join two tables by column, the rows of `first` before the rows of `then`, with NaN for the
    rows of a table that lacks the column."""
    tables = [table for table in (first, then) if table]
    missing = [np.full(len(next(iter(table.values()))), np.nan, np.float32) for table in tables]
    return {
        k: np.concatenate([table.get(k, nan) for table, nan in zip(tables, missing, strict=True)])
        for k in first | then
    }


def _scalars_by_name(metrics: Mapping[str, Any]) -> dict[str, Leaf]:
    """Return the numbers among metrics by path, such as "aux/accuracy", without keys and arrays
    that have axes."""
    if jax.tree_util.all_leaves(metrics.values()):  # nothing to name
        return {k: x for k, x in metrics.items() if _is_number(x)}
    return {
        jax.tree_util.keystr(path, simple=True, separator="/"): x
        for path, x in jax.tree_util.tree_leaves_with_path(dict(metrics))
        if _is_number(x)
    }


def _is_number(x: Leaf) -> bool:
    """Tell whether a leaf of metrics is a number, and neither an array with axes nor a key."""
    return not (getattr(x, "ndim", 0) or tree.is_key(x))


def describe_arrays(aux: PyTree) -> str:
    """Return the arrays of aux, which the history leaves out, as words, or "" without any."""
    named = tree.arrays_with_paths({"aux": aux})
    return tree.list_words([f"{path} {np.shape(x)}" for path, x in named if np.ndim(x)], 20)


def scalars(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Return the scalars among metrics by path, as Python numbers, without arrays that have
    axes."""
    return {name: np.asarray(x).item() for name, x in _scalars_by_name(metrics).items()}


def to_python_numbers(metrics: Mapping[str, Any]) -> PyTree:
    """Return metrics on the host, scalars as Python numbers and arrays as NumPy arrays."""
    return jax.tree.map(
        lambda x: x.item() if _is_number(x) and hasattr(x, "item") else x,
        jax.device_get(dict(metrics)),
    )
