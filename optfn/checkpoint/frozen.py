"""Params that are not trained: a checkpoint may have their checksums in place of the arrays."""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
import optax

from optfn.checkpoint.snapshot import Snapshot
from optfn.core import checks, tree
from optfn.core.types import PyTree
from optfn.mesh.layout.fingerprint import fingerprints
from optfn.train.state import TrainState
from optfn.wrappers.attributes import attributes_of

# The name of the checksums among the arrays of the history.
FROZEN = "frozen_checksums"


class FrozenParams:
    """Leaves the params that `tx` freezes out of checkpoints.

    The checksums are computed once for all saves of a run, because frozen params do not change.
    """

    def __init__(self, tx: optax.GradientTransformation) -> None:
        self.tx = tx
        self._entry: dict[str, np.ndarray] = {}

    def leave_out(self, snapshot: Snapshot) -> tuple[Snapshot, dict[str, np.ndarray]]:
        """Return a snapshot without its frozen params and an entry with their checksums, or the
        snapshot unchanged and {} if no param is frozen.

        Raises:
          TypeError: it is not of a TrainState.
        """
        if not isinstance(snapshot.state, TrainState):
            raise TypeError(
                "save_checkpoint: save_frozen=False takes a TrainState; got "
                + checks.show(snapshot.state)
            )
        attrs = attributes_of(self.tx, snapshot.state.params)
        frozen = {f"train/params/{path}" for path, attr in attrs.items() if not attr.trainable}
        if not frozen:
            return snapshot, {}
        if not self._entry:
            left_out = {name: x for name, x in snapshot.arrays.items() if name in frozen}
            # A checkpoint has arrays only, so the text becomes bytes.
            text = json.dumps(_describe_arrays(left_out))
            self._entry = {FROZEN: np.frombuffer(text.encode(), np.uint8)}
        return snapshot.without(frozen), self._entry


def _describe_arrays(arrays: Mapping[str, Any]) -> dict[str, list[Any]]:
    """Return the dtype, shape and checksum of each array by name. All processes must call it."""
    sums = fingerprints(list(arrays.values())).tolist()
    return {
        name: [str(jax.dtypes.canonicalize_dtype(x.dtype)), list(x.shape), row]
        for (name, x), row in zip(arrays.items(), sums, strict=True)
    }


def select_frozen(entry: np.ndarray, template: PyTree) -> dict[str, Any]:
    """Return by name the arrays of a template that a checkpoint left out as frozen.

    Args:
      entry: the checksums in the checkpoint.
      template: a state with the params that the run began with.
    """
    named = Snapshot.of(template).arrays
    return {name: named[name] for name in _decode_entry(entry) if name in named}


def compare_frozen(
    where: object,
    entry: np.ndarray,
    template: PyTree,
    is_selected: Callable[[str], bool],
    shown: Callable[[str], str],
) -> None:
    """Raise a ValueError that names the arrays unless the selected frozen params of a template have
    the checksums that a checkpoint lists.

    In a run of several processes, all must call it.

    Args:
      where: the checkpoint, for the error.
      entry: the checksums in it.
      template: the state that it was loaded into.
      is_selected: tells whether the array with a name is compared.
      shown: returns a name as errors show it.

    Raises:
      ValueError: an array differs; the error names it.
    """
    known = _decode_entry(entry)
    found = select_frozen(entry, template)
    compared = _describe_arrays({k: x for k, x in found.items() if is_selected(k)})
    different = [
        shown(name) for name, facts in compared.items() if not _is_same_array(facts, known[name])
    ]
    if different:
        raise ValueError(
            f"{where} was saved without its frozen params (save_frozen=False), and "
            f"{tree.list_names(different)} of your params are not those that it was saved beside: "
            "their checksums differ. Pass the params that the run began with, or the names to load "
            "beside others by only= of restore_checkpoint"
        )


def _is_same_array(facts: Sequence[Any], others: Sequence[Any]) -> bool:
    """Tell whether two descriptions are of the same array, whose stages may be folded in another
    way (`stack_stages`): a checksum does not depend on the shape."""
    (*kind, shape, row), (*other_kind, other_shape, other_row) = facts, others
    is_folded = math.prod(shape) == math.prod(other_shape) and any(
        len(shape) >= i and len(other_shape) >= j and shape[i:] == other_shape[j:]
        for i, j in ((1, 2), (2, 1), (2, 2))
    )
    return (kind, row) == (other_kind, other_row) and (shape == other_shape or is_folded)


def _decode_entry(entry: np.ndarray) -> dict[str, list[Any]]:
    """Return the dtype, shape and checksum of each frozen param, from a checkpoint's entry."""
    return json.loads(np.asarray(entry).tobytes())
