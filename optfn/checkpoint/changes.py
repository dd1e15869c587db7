"""The differences between a checkpoint and the state that it loads into, in names and arrays."""

import dataclasses
from collections.abc import Sequence

from optfn.core import tree


@dataclasses.dataclass(frozen=True)
class Changes:
    """The differences between the names of a mapping and of the state that it was loaded into.

    carried: the names that were loaded.
    new: names that the mapping lacks; their arrays come from the template.
    dropped: names that the state lacks.
    """

    carried: Sequence[str]
    new: Sequence[str]
    dropped: Sequence[str]

    def __bool__(self) -> bool:
        """Tell whether any name is new or dropped."""
        return bool(self.new or self.dropped)

    def __str__(self) -> str:
        names = {
            "carried over": self.carried,
            "new, as in the template": self.new,
            "dropped": self.dropped,
        }
        return "; ".join(f"{word}: {tree.list_names(x) or 'nothing'}" for word, x in names.items())


class Misfit(ValueError):
    """Raised if names (strict) or shapes do not fit."""

    def __init__(self, names: Sequence[str], arrays: Sequence[str]) -> None:
        words = [*names, *([tree.list_words(arrays, 20)] if arrays else [])]
        super().__init__("the state does not fit: " + "; ".join(words))
        self.arrays = arrays
