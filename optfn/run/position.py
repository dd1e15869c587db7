"""The position of an iterator of batches in a checkpoint, so that no used batch is read again."""

import base64
import json
from collections.abc import Mapping
from typing import NamedTuple, Protocol, runtime_checkable

import jax
import numpy as np

from optfn.core import checks
from optfn.parallel import processes

# The name of the entry of a checkpoint, among the arrays of the history.
BATCHES = "batches"


@runtime_checkable
class StatefulIterator(Protocol):
    """An iterator of batches that can save and restore its position, such as one of grain."""

    def get_state(self) -> object:
        """Return the state: bytes, or a tree of values that JSON can represent."""

    def set_state(self, state: object) -> None:
        """Continue from a state."""


class Position(NamedTuple):
    """The position of a run in its batches.

    epoch: the number of the pass, from 1.
    state: the state of its iterator.
    """

    epoch: int
    state: object


class TakenPosition(NamedTuple):
    """A position as JSON, taken at once: an iterator may change the state that it returned.

    text: the JSON; "" if it does not keep the state.
    refused: the state that it does not keep, in words.
    """

    text: str
    refused: str = ""


def encode_position(position: TakenPosition | None, is_shared: bool) -> dict[str, np.ndarray]:
    """Return the positions of all processes as one entry of a checkpoint; {} if none has one.

    Args:
      position: the position of this process. You get a warning if JSON does not keep it.
      is_shared: whether all processes call this; the entry then has the positions of all.
    """
    text, refused = position or TakenPosition("")
    if refused:
        checks.warn(
            "the checkpoint is saved without the state of the iterator of batches, so a run that "
            "resumes will draw the used batches again and skip them. get_state must return bytes, "
            f"or a value that JSON keeps unchanged; got {refused}"
        )
    texts = processes.gather_texts(text) if is_shared else [text]
    if not any(texts):
        return {}
    content = "[" + ", ".join(text or "null" for text in texts) + "]"
    # A checkpoint has arrays only, so the text becomes bytes.
    return {BATCHES: np.frombuffer(content.encode(), np.uint8)}


def decode_position(history: Mapping[str, np.ndarray]) -> Position | None:
    """Return the position of this process from the entry of `encode_position`, or None.

    It is None without an entry, or if the number of processes has changed and their positions were
    not the same.
    """
    if BATCHES not in history:
        return None
    found = json.loads(np.asarray(history[BATCHES]).tobytes())
    is_same = all(one == found[0] for one in found)
    is_known = is_same or len(found) == jax.process_count()
    one = found[0 if is_same else jax.process_index()] if is_known else None
    if one is None:
        return None
    state = base64.b64decode(one["bytes"]) if "bytes" in one else one["state"]
    return Position(one["epoch"], state)


def take_position(epoch: int, state: object) -> TakenPosition:
    """Return the position of an iterator whose `get_state` returned `state`, in pass `epoch`."""
    if isinstance(state, bytes):
        encoded = base64.b64encode(state).decode()
        return TakenPosition(json.dumps({"epoch": epoch, "bytes": encoded}))
    try:
        text = json.dumps({"epoch": epoch, "state": state})
        # JSON turns tuples into lists, and keys into text, without an error.
        if json.loads(text)["state"] == state:
            return TakenPosition(text)
    except (TypeError, ValueError):  # a type that JSON does not have, or a circular reference
        pass
    return TakenPosition("", checks.show(state))
