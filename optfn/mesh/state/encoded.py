"""Declarations of the fields of a state that have codes instead of numbers, and of their scales.

Arithmetic on a state from outside, such as a mean over workers, must decode these fields first. The
type of the state declares them, and the names of `state_dict` begin with the word for that type. So
codes are found by their names, in a state and in a file.
"""

import dataclasses
import re
from collections.abc import Callable, Collection
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from optfn.mesh.state.names import state_word

T = TypeVar("T", bound=type)


@dataclasses.dataclass(frozen=True)
class Encoded:
    """A field of codes, beside a field of their scales.

    Args:
      codes: the name of the field; its leaves are integers.
      scale: the name of the field with the scales of each leaf.
      decode: (codes, scale) -> float32 numbers.
      encode: (numbers, scale, noise) -> codes; the nearest ones where the noise, of 16 bits, is
        half of its range.
      scales: numbers ≥ 0 -> the smallest scales under which they can be encoded.
    """

    codes: str
    scale: str
    decode: Callable[[jax.Array, jax.Array], jax.Array]
    encode: Callable[[jax.Array, jax.Array, jax.Array], jax.Array]
    scales: Callable[[jax.Array], jax.Array]

    def mean(self, codes: np.ndarray, scales: np.ndarray) -> np.ndarray:
        """Return the nearest codes of the mean of several arrays, under the mean of their scales.

        Args:
          codes: the codes of each array, (k, …).
          scales: the scales of each array, (k, …).
        """
        # Decoded by the same program as in a step, so that no code changes if all workers agree.
        decoded = np.asarray(jax.vmap(self.decode)(jnp.asarray(codes), jnp.asarray(scales)))
        numbers = jnp.asarray(np.mean(decoded, axis=0, dtype=np.float64), jnp.float32)
        scale = jnp.asarray(np.mean(scales, axis=0, dtype=np.float64), scales.dtype)
        # A noise of half of its range rounds to the nearest code.
        return np.asarray(self.encode(numbers, scale, jnp.full(numbers.shape, 2**15, jnp.uint32)))


# By type, because a mapping from a file has names and no states.
_fields: dict[type, tuple[Encoded, ...]] = {}


def declare_encoded(*fields: Encoded) -> Callable[[T], T]:
    """Return a decorator that records which fields of the type of a state hold codes, and returns
    the type unchanged."""

    def declare(kind: T) -> T:
        _fields[kind] = fields
        return kind

    return declare


class Codes(NamedTuple):
    """The facts about an array of codes.

    field: the declaration of its field.
    scales: the name of the array of their scales.
    """

    field: Encoded
    scales: str


def find_codes(names: Collection[str]) -> dict[str, Codes]:
    """Map the name of each array of codes to its `Codes`. Other names are left out, and so are
    arrays whose scales are not in `names`.

    Args:
      names: the names of arrays in `state_dict`.
    """
    known, found = set(names), {}
    for kind, fields in _fields.items():
        word = state_word(kind)
        of_kind = [name for name in names if word in name]
        for field in fields:
            # A second transform of the type has a number, as in scale_by_…_2/mu.
            pattern = re.compile(rf"((?:.*/)?{word}(?:_\d+)?/){field.codes}((?:/.*)?)")
            for match in filter(None, map(pattern.fullmatch, of_kind)):
                scales = f"{match[1]}{field.scale}{match[2]}"
                if scales in known:
                    found[match[0]] = Codes(field, scales)
    return found
