"""Text that every Python installation has: the source of its standard library, as bytes.

Files are training or held-out text by a hash of their names, so the split is the same everywhere.
`python -m examples.text` prints the sizes, and the bits per byte of compressors on the held-out
text.
"""

import contextlib
import hashlib
import sysconfig
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np

# Left out: packages installed next to the library, its tests, and two packages of generated tables,
# whose files are nearly equal or not code.
LEFT_OUT = {
    *("site-packages", "dist-packages", "__pycache__"),
    *("test", "tests", "idle_test"),
    *("encodings", "pydoc_data"),
}
HELD_OUT = 8  # files in 256


def standard_library() -> tuple[np.ndarray, np.ndarray]:
    """Return the training and the held-out text, uint8, files in the order of their names."""
    root = Path(sysconfig.get_paths()["stdlib"])
    training, held_out = [], []
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root)
        built = name.parts[0].startswith(("config-", "_sysconfigdata"))  # made by the installation
        if built or LEFT_OUT.intersection(name.parts):
            continue
        first = hashlib.sha256(name.as_posix().encode()).digest()[0]
        (held_out if first < HELD_OUT else training).append(path.read_bytes())
    if not training or not held_out:
        raise FileNotFoundError(f"no source of the standard library in {root}")
    return np.frombuffer(b"".join(training), np.uint8), np.frombuffer(b"".join(held_out), np.uint8)


def batches(text: np.ndarray, batch: int, length: int, seed: int) -> Iterator[np.ndarray]:
    """Yield random windows of `length` + 1 bytes, int32 (batch, length + 1), for ever."""
    rng = np.random.default_rng(seed)
    while True:
        starts = rng.integers(0, len(text) - length, batch)
        yield text[starts[:, None] + np.arange(length + 1)].astype(np.int32)


def compressors(text: np.ndarray) -> dict[str, float]:
    """Return the bits per byte of zlib and lzma at their best, on `text` as one stream.

    A compressor that this Python was built without is left out.
    """
    data, sizes = text.tobytes(), {}
    with contextlib.suppress(ImportError):
        import zlib

        sizes["zlib"] = len(zlib.compress(data, 9))
    with contextlib.suppress(ImportError):
        import lzma

        sizes["lzma"] = len(lzma.compress(data, preset=9 | lzma.PRESET_EXTREME))
    return {name: 8 * size / len(data) for name, size in sizes.items()}


def bits_per_byte(
    losses: Callable[[Any, jax.Array], jax.Array],
    params: Any,
    text: np.ndarray,
    length: int,
    batch: int = 16,
) -> float:
    """Return the bits per byte that the model needs for `text`.

    Each byte counts once. The first costs 8 bits. The others are predicted from all bytes before
    them, if these are fewer than length/2, else from the last length/2 to length bytes.

    Args:
      losses: (params, windows (batch, length + 1)) -> nats of each next byte (batch, length);
        should be jitted.
      params: of the model.
      text: uint8, longer than `length`.
      length: the model's context.
      batch: windows at a time.
    """
    starts = np.append(np.arange(0, len(text) - length - 1, length // 2), len(text) - length - 1)
    ends = starts + length  # the last byte that a window predicts
    counted = np.insert(ends[:-1], 0, 0)  # up to here, by earlier windows
    nats = 0.0
    for i in range(0, len(starts), batch):
        sample = np.resize(starts[i : i + batch], batch)  # fills up a short last batch, for jit
        windows = text[sample[:, None] + np.arange(length + 1)].astype(np.int32)
        each = np.asarray(losses(params, windows), np.float64)[: len(starts) - i]
        position = starts[i : i + batch, None] + 1 + np.arange(length)
        nats += each[position > counted[i : i + batch, None]].sum()
    return (8 + nats / np.log(2)) / len(text)


if __name__ == "__main__":
    training, held_out = standard_library()
    print(f"{len(training):,} bytes of training text, {len(held_out):,} held out")
    for name, bits in compressors(held_out).items():
        print(f"{name} {bits:.3f} bits per byte of the held-out text")
