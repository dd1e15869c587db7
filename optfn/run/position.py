"""The position of an iterator of batches in a checkpoint, so that no used batch is read again."""

import base64
import json
import zlib
from collections.abc import Mapping
from typing import NamedTuple, Protocol, runtime_checkable

import jax
import numpy as np

from optfn.core import checks
from optfn.core.types import Batch
from optfn.mesh.layout import processes

# The name of the entry of a checkpoint, among the arrays of the history.
BATCHES = "batches"
# Of each array, about as many entries are in the checksum of a batch.
_ENTRIES = 1000


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


class Saved(NamedTuple):
    """The data and the random numbers of a run, as far as a checkpoint has them. A missing field is
    None.

    position: the position of this process.
    checksum: the checksum of the last batch of this process, by `find_checksum`.
    rng: the numbers of the key of `rng=`, and the name of its implementation.
    provisional: the step of an evaluation that the run made only because it ended there.
    first: the step that the run began at, and the evaluation of its state, which no history has.
    """

    position: Position | None = None
    checksum: int | None = None
    rng: list[int | str] | None = None
    provisional: int | None = None
    first: list[float] | None = None


NOTHING = Saved()


def encode_position(
    position: TakenPosition | None, is_shared: bool, beside: Saved = NOTHING
) -> dict[str, np.ndarray]:
    """Return a dict of one entry of a checkpoint, with what `Saved` has of each process, or {} if
    there is nothing.

    Args:
      position: the position of this process. You get a warning if JSON does not keep it.
      is_shared: whether all processes call this; the entry then has the positions of all of them.
      beside: the fields besides the position.
    """
    text, refused = position or TakenPosition("")
    if refused:
        checks.warn(
            "the checkpoint is saved without the state of the iterator of batches, so a run that "
            "resumes will draw the used batches again and skip them. get_state must return bytes, "
            f"or a value that JSON keeps unchanged; got {refused}"
        )
    own = json.loads(text) if text else {}
    own |= {name: x for name, x in beside._asdict().items() if x is not None}
    text = json.dumps(own) if own else ""
    texts = processes.gather_texts(text) if is_shared else [text]
    if not any(texts):
        return {}
    content = "[" + ", ".join(text or "null" for text in texts) + "]"
    # A checkpoint has arrays only, so the text becomes bytes.
    return {BATCHES: np.frombuffer(content.encode(), np.uint8)}


def decode_position(history: Mapping[str, np.ndarray]) -> Saved:
    """Return what the entry of `encode_position` has of this process, or NOTHING without such an
    entry.

    If the count of processes has changed, the checksum is None, and so is the position unless all
    processes had the same.
    """
    if BATCHES not in history:
        return NOTHING
    found = [one or {} for one in json.loads(np.asarray(history[BATCHES]).tobytes())]
    is_known = len(found) == jax.process_count()
    checksums, keys, provisional, first = (
        [one.pop(name, None) for one in found]
        for name in ("checksum", "rng", "provisional", "first")
    )
    is_same = all(one == found[0] for one in found)
    one = found[0] if is_same else found[jax.process_index()] if is_known else {}
    position = None
    if one:
        state = base64.b64decode(one["bytes"]) if "bytes" in one else one["state"]
        position = Position(one["epoch"], state)
    checksum = checksums[jax.process_index()] if is_known else None
    return Saved(position, checksum, keys[0], provisional[0], first[0])


def find_checksum(batch: Batch) -> int | None:
    """Return a checksum of some entries of each array of a batch that lies on the host, or None
    without such an array.

    Each batch gets one, so it reads at most a thousand entries of an array, evenly spaced. Arrays
    of JAX are left out, because reading them waits for a device.
    """
    checksum = None
    for x in jax.tree.leaves(batch):
        if isinstance(x, jax.Array):
            continue
        try:
            array = np.asarray(x)
        except Exception:  # of another library, which `convert_batch` refuses with a better error
            continue
        flat = array.reshape(-1) if array.flags.c_contiguous else array.flat
        entries = np.ascontiguousarray(flat[:: 1 + array.size // _ENTRIES])
        if not entries.dtype.hasobject:
            checksum = zlib.crc32(entries.tobytes(), checksum or 0)
    return checksum


def take_position(epoch: int, state: object) -> TakenPosition:
    """Return the state of an iterator and its pass as JSON, or with empty text and the state in
    words if JSON does not keep it unchanged."""
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
