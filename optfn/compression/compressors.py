"""Compressors: what one worker sends of one leaf. The protocol, and the choice by path.

A compressor is a value with four methods; `top_k`, `quantize` and `power_sgd` make some. Any object
with these methods serves, such as one that sends what is above a threshold as signs:

    class Signs:
        def init(self, shape):
            return ()

        def encode(self, x, state):
            return (x > 0, jnp.mean(jnp.abs(x))), state

        def decode(self, packet, shape):
            positive, size = packet
            return jnp.where(positive, size, -size)

        def num_bytes(self, shape):
            return math.prod(shape) + 4
"""

import dataclasses
import functools
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ParamSpec, Protocol, TypeAlias, TypeVar

import jax

from optfn import checks, core
from optfn.leaves import tree
from optfn.leaves.types import Params, PyTree

P = ParamSpec("P")


class Compressor(Protocol):
    """What one worker sends of one leaf.

    A packet is a tree of arrays, of the same shapes in each step. State is a tree of arrays too, ()
    for none; it is taken to be the same on all workers, but for what is in a `PerWorker`.

    Five more things are optional. `accepts(shape) -> bool`: other leaves are exchanged densely.
    `encode_all(xs, states)`: the results of `encode` for several leaves, where that is cheaper.
    `add_to(total, packet, scale)`: total + scale·decode(packet), where that is cheaper in place.
    `mean_of_sent`: a function as `gathering.mean_by_all_gather`, which is the default; with
    `is_reduced = True` packets go through all-reduces in it.
    """

    def init(self, shape: tuple[int, ...]) -> PyTree:
        """Return the first state for a leaf."""

    def encode(self, x: jax.Array, state: PyTree) -> tuple[PyTree, PyTree]:
        """Return the packet for a float32 leaf, and the next state."""

    def decode(self, packet: PyTree, shape: tuple[int, ...]) -> jax.Array:
        """Return the float32 leaf of this shape that a packet stands for."""

    def num_bytes(self, shape: tuple[int, ...]) -> int:
        """Return the bytes of the packet for a leaf of this shape."""


C = TypeVar("C", bound="ShownAsCall")


@dataclasses.dataclass(frozen=True, repr=False)
class ShownAsCall:
    """A value whose `repr` is the call that made it."""

    call: str = dataclasses.field(default="", compare=False, kw_only=True)

    def __repr__(self) -> str:
        return self.call


def named(factory: Callable[P, C]) -> Callable[P, C]:
    """Decorate a factory of values so that they show its call."""

    @functools.wraps(factory)
    def make(*args: P.args, **kwargs: P.kwargs) -> C:
        call = core.call_text(factory.__name__, args, kwargs)
        return dataclasses.replace(factory(*args, **kwargs), call=call)

    return make


def accepts(compressor: Compressor, shape: tuple[int, ...]) -> bool:
    """Tell whether a compressor takes leaves of this shape; others are exchanged densely."""
    rule = getattr(compressor, "accepts", None)
    return rule is None or bool(rule(shape))


def encode_all(
    compressors: Sequence[Compressor], xs: Sequence[jax.Array], states: Sequence[PyTree]
) -> list[tuple[PyTree, PyTree]]:
    """Return the packet and the next state of each leaf, those of equal compressors together."""
    encoded: list[Any] = [None] * len(xs)
    for i, compressor in enumerate(compressors):
        together: Any = getattr(compressor, "encode_all", None)
        if encoded[i] is None and together is None:
            encoded[i] = compressor.encode(xs[i], states[i])
        elif encoded[i] is None:
            equal = [j for j in range(i, len(xs)) if compressors[j] == compressor]
            results = together([xs[j] for j in equal], [states[j] for j in equal])
            for j, result in zip(equal, results, strict=True):
                encoded[j] = result
    return encoded


def add_decoded(
    compressor: Compressor, total: jax.Array, packet: PyTree, scale: float | jax.Array
) -> jax.Array:
    """Return total + scale·decode(packet)."""
    in_place: Any = getattr(compressor, "add_to", None)
    if in_place is not None:
        return in_place(total, packet, scale)
    return total + scale * compressor.decode(packet, total.shape).reshape(total.shape)


# One compressor for all leaves, or one for each pattern of paths; None is dense.
Choice: TypeAlias = Compressor | Mapping[str, Compressor | None]
_METHODS = ("init", "encode", "decode", "num_bytes")


def check_choice(choice: object) -> Mapping[Any, Compressor | None]:
    """Return the compressors by pattern of paths.

    Raises:
      TypeError: one is not a compressor, or a pattern not a regular expression.
    """
    if not isinstance(choice, Mapping):
        return {re.compile(".*", re.DOTALL): _check("compressor", choice)}
    for pattern, compressor in choice.items():
        if not isinstance(pattern, str | re.Pattern):
            raise TypeError(f"compressor: a pattern must be a regular expression; got {pattern!r}")
        tree.check_pattern("compressor", pattern)
        if compressor is not None:
            _check(f"compressor[{pattern!r}]", compressor)
    return dict(choice)


def _check(argument: str, compressor: Any) -> Compressor:
    missing = [name for name in _METHODS if not callable(getattr(compressor, name, None))]
    if missing or isinstance(compressor, type):
        raise TypeError(
            f"{argument} must be a compressor such as top_k(0.05), with the methods "
            f"{', '.join(_METHODS)}, a mapping from patterns of paths to compressors, or None; got "
            f"{checks.shown(compressor)}"
        )
    return compressor


def chosen(choice: Mapping[Any, Compressor | None], params: Params) -> list[Compressor | None]:
    """Return the compressor of each leaf of a tree: that of the first pattern that matches.

    Raises:
      ValueError: a pattern matches none of the paths.
    """
    found: list[Compressor | None] = [None] * len(tree.flatten(params)[0])
    # Backwards, so that an earlier pattern overwrites a later one.
    for pattern, compressor in reversed(list(choice.items())):
        flags = tree.select(pattern, params, "compressor")
        found = [
            compressor if selected else before
            for (selected,), before in zip(flags, found, strict=True)
        ]
    return found
