"""Declarations of the fields of a state that have codes instead of numbers, and of their scales.

Arithmetic on a state from outside, such as a mean over workers, must decode these fields first. The
type of the state declares them, so that they can be found in a state and, by the names of its
fields, in a mapping from `state_dict`.
"""

import dataclasses
import re
from collections.abc import Callable, Mapping
from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from optfn.core.types import OptState
from optfn.state.names import state_word

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
        decoded = np.asarray(jax.vmap(self.decode)(jnp.asarray(codes), jnp.asarray(scales)))
        numbers = jnp.asarray(np.mean(decoded, axis=0, dtype=np.float64), jnp.float32)
        scale = jnp.asarray(np.mean(scales, axis=0, dtype=np.float64), scales.dtype)
        return np.asarray(self.nearest(numbers, scale))

    def nearest(self, numbers: jax.Array, scale: jax.Array) -> jax.Array:
        """Return the codes that are nearest to numbers."""
        return self.encode(numbers, scale, jnp.full(numbers.shape, 2**15, jnp.uint32))


_fields: dict[type, tuple[Encoded, ...]] = {}


def encodes(*fields: Encoded) -> Callable[[T], T]:
    """Decorate the type of a state with those of its fields that hold codes."""

    def declare(kind: T) -> T:
        _fields[kind] = fields
        return kind

    return declare


def encoded_fields(state: OptState) -> tuple[Encoded, ...]:
    """Return the fields of one state that hold codes."""
    return _fields.get(type(state), ())


def has_codes(x: object) -> bool:
    """Tell whether `x` is a state with fields that hold codes."""
    return type(x) in _fields


def encoded_names(mapping: Mapping[str, object]) -> dict[str, tuple[Encoded, str]]:
    """Map the name of each array of codes to its field and the name of its scales."""
    found = {}
    for kind, fields in _fields.items():
        for field in fields:
            pattern = re.compile(rf"((?:.*/)?{state_word(kind)}(?:_\d+)?/){field.codes}((?:/.*)?)")
            for name in mapping:
                match = pattern.fullmatch(name)
                scale = f"{match[1]}{field.scale}{match[2]}" if match else ""
                if scale in mapping:
                    found[name] = field, scale
    return found
