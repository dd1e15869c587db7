"""Batches of arrays in memory, in an order that the seed and the epoch alone decide."""

from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from optfn.core import checks, tree
from optfn.core.types import Batch, PyTree
from optfn.leaves.foreign import check_arrays


def shuffled(arrays: PyTree, size: int, *, seed: int = 0, drop_last: bool = True) -> "Shuffled":
    """Return an iterable of the batches of arrays in memory, shuffled anew in each epoch, without a
    shorter last one unless `drop_last` is False.

        order = np.random.default_rng([seed, epoch]).permutation(examples)
        batch i = arrays[order[i·size : (i + 1)·size]]

    Pass the result as `batches` to `minimize` or `fit`, which set the epoch. A run that resumes
    gets the batches that it has not used, also from the same object, and draws no used one. In a
    loop that you write, call `set_epoch(epoch)` before each pass; without it each pass is epoch 0.

    Args:
      arrays: a tree of arrays with the examples along their leading axis.
      size: the examples of a batch, ≥ 1.
      seed: an integer ≥ 0; another one gives another order.
      drop_last: whether the remainder of an epoch is left out. False makes a last batch of it,
        which is shorter: the step compiles once more, and on a mesh the workers must divide it.

    Returns:
      An iterable with a length, the number of batches of an epoch.

    Raises:
      TypeError: an argument is of another type.
      ValueError: the arrays have no leading axis of one length, or too few examples for a batch.

    >>> import numpy as np, optfn
    >>> batches = optfn.shuffled({"x": np.arange(5)}, 2, drop_last=False)
    >>> [batch["x"].tolist() for batch in batches], len(batches)
    ([[2, 4], [3, 0], [1]], 3)
    """
    checks.count("shuffled: size", size)
    checks.count("shuffled: seed", seed, low=0)
    checks.flag("shuffled: drop_last", drop_last)
    check_arrays("shuffled: array", arrays)
    lengths = {}
    for path, x in tree.arrays_with_paths(arrays):
        if not np.ndim(x):
            raise ValueError(f"shuffled: arrays need a leading axis of examples; {path!r} has none")
        lengths[path] = np.shape(x)[0]
    if len({*lengths.values()}) != 1:
        raise ValueError(
            "shuffled: arrays must have the same number of examples along their leading axes; got "
            f"{lengths}"
        )
    (count,) = {*lengths.values()}
    if count < (size if drop_last else 1):
        raise ValueError(
            f"shuffled: {count} examples make no batch of size={size}; pass a smaller size, or "
            "drop_last=False"
        )
    return Shuffled(jax.tree.map(np.asarray, arrays), count, size, seed, drop_last)


class Shuffled:
    """The batches of `shuffled`.

    count: the number of examples.
    epoch: the epoch of the next pass, from 0.
    """

    def __init__(self, arrays: PyTree, count: int, size: int, seed: int, drop_last: bool) -> None:
        self.arrays, self.count, self.size = arrays, count, size
        self.seed, self.drop_last, self.epoch = seed, drop_last, 0

    def __repr__(self) -> str:
        return (
            f"shuffled({self.count} examples, {self.size}, seed={self.seed}, "
            f"drop_last={self.drop_last})"
        )

    def __len__(self) -> int:
        return self.count // self.size if self.drop_last else -(-self.count // self.size)

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next pass, from 0, which decides its order."""
        self.epoch = checks.count("set_epoch: epoch", epoch, low=0)

    def __iter__(self) -> Iterator[Batch]:
        return _Pass(self)

    @property
    def sizes(self) -> set[int]:
        """The counts of examples that the batches have."""
        last = self.count % self.size
        return {self.size} if self.drop_last or not last else {min(self.size, self.count), last}


class _Pass:
    """One pass over the batches, whose position a checkpoint keeps."""

    def __init__(self, batches: Shuffled) -> None:
        self.batches, self.next = batches, 0
        self._set_order(batches.epoch)

    def _set_order(self, epoch: int) -> None:
        """Set the epoch, and draw its order of the examples from it and the seed."""
        rng = np.random.default_rng([self.batches.seed, epoch])
        self.epoch, self.order = epoch, rng.permutation(self.batches.count)

    def __iter__(self) -> "_Pass":
        return self

    def __next__(self) -> Batch:
        if self.next >= len(self.batches):
            raise StopIteration
        chosen = self.order[self.next * self.batches.size : (self.next + 1) * self.batches.size]
        self.next += 1
        return jax.tree.map(lambda x: x[chosen], self.batches.arrays)

    def get_state(self) -> dict[str, Any]:
        """Return the epoch, the index of the next batch, and the values that decide the batches."""
        return {"epoch": self.epoch, "next": self.next, **self._fixed}

    def set_state(self, state: dict[str, Any]) -> None:
        """Continue at a position, or raise a ValueError if examples, size, seed or drop_last
        differ, and so the batches of an epoch."""
        for name, x in self._fixed.items():
            if state.get(name, x) != x:
                raise ValueError(f"{name} was {state.get(name)}, and is {x} now")
        self._set_order(state["epoch"])
        self.next = state["next"]

    @property
    def _fixed(self) -> dict[str, Any]:
        """The values that decide the batches of an epoch, by name."""
        source = self.batches
        rest = {name: getattr(source, name) for name in ("size", "seed", "drop_last")}
        return {"examples": source.count, **rest}
