"""Real text that every Python installation has: the source of its standard library, as bytes.

Split by file into training and held-out text, by a hash of the file's name, so that the split is
the same everywhere. Tests, data tables and installed packages are left out.
"""

import hashlib
import lzma
import sysconfig
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np

LEFT_OUT = {
    "site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__",
    "encodings", "pydoc_data",
}  # fmt: skip
HELD_OUT = 8 / 256  # of the files


def standard_library() -> tuple[np.ndarray, np.ndarray]:
    """Return the training and the held-out text, uint8."""
    root = Path(sysconfig.get_paths()["stdlib"])
    parts: tuple[list[bytes], list[bytes]] = ([], [])
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root)
        if LEFT_OUT.intersection(name.parts) or name.parts[0].startswith("config-"):
            continue
        if name.name.startswith("_sysconfigdata"):  # generated
            continue
        first = hashlib.sha256(name.as_posix().encode()).digest()[0]
        parts[first < 256 * HELD_OUT].append(path.read_bytes())
    train, held_out = (np.frombuffer(b"".join(part), np.uint8) for part in parts)
    return train, held_out


def batches(text: np.ndarray, batch: int, length: int, seed: int) -> Iterator[np.ndarray]:
    """Yield random windows of `length` + 1 bytes, int32 (batch, length + 1), for ever."""
    rng = np.random.default_rng(seed)
    while True:
        starts = rng.integers(0, len(text) - length, batch)
        yield text[starts[:, None] + np.arange(length + 1)].astype(np.int32)


def compressors(text: np.ndarray) -> dict[str, float]:
    """Return the bits per byte of general compressors on `text` as one stream."""
    data = text.tobytes()
    sizes = {
        "zlib": len(zlib.compress(data, 9)),
        "lzma": len(lzma.compress(data, preset=9 | lzma.PRESET_EXTREME)),
    }
    return {name: 8 * size / len(data) for name, size in sizes.items()}


def bits_per_byte(
    losses_fn: Callable[[Any, jax.Array], jax.Array],
    params: Any,
    text: np.ndarray,
    length: int,
    batch: int = 16,
) -> float:
    """Return the mean bits of a byte of `text`, each predicted from at least length/2 before it.

    Windows of `length` bytes overlap by half, and the second half of each counts; of every three
    windows one is taken, the same ones for every model.

    Args:
      losses_fn: (params, windows (batch, length + 1)) -> nats of each next byte (batch, length).
      params: of the model.
      text: uint8.
      length: the model's context.
      batch: windows at a time.
    """
    starts = np.arange(0, len(text) - length - 1, length // 2)[::3]
    starts = starts[: len(starts) // batch * batch].reshape(-1, batch)
    run = jax.jit(lambda params, windows: losses_fn(params, windows)[:, length // 2 :].mean())
    windows = (text[s[:, None] + np.arange(length + 1)].astype(np.int32) for s in starts)
    return float(np.mean([float(run(params, w)) for w in windows])) / float(np.log(2))
