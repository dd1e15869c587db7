"""Compressors: the protocol, and the choice of a compressor for each leaf.

A compressor turns a leaf of one worker into a packet. It is a value with four methods; `top_k`,
`quantize` and `power_sgd` return such values, and you can write one. This one sends signs and one
magnitude:

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
from typing import Any, NamedTuple, ParamSpec, TypeAlias, TypeVar

import jax

from optfn.core import checks
from optfn.core.printing import call_text
from optfn.core.types import Leaf, Params, PyTree
from optfn.leaves import contents, patterns
from optfn.mesh.collectives.axes import Axes
from optfn.mesh.collectives.packets import Compressor

P = ParamSpec("P")


class LeafInExchange(NamedTuple):
    """A leaf before and after it is sent.

    direction: zeros, and the mean may be added to them in place, or the gradient, whose memory the
      mean may take; afterwards the mean over workers. Rows if the mean is wanted as Rows.
    residual: the accumulated updates of a worker, float32; afterwards the residual.
    state: the state of the compressor; for deep gradient compression the velocity.
    published: the residual of the mean that a worker, as the owner of a slice, keeps, flat float32
      (see `slicewise`); None if packets are sent to all workers.
    """

    direction: Leaf
    residual: jax.Array
    state: PyTree
    published: jax.Array | None = None


class BaseCompressor(Compressor):
    """A compressor with defaults for the methods that `exchange` calls besides the protocol.

    is_reduced: whether packets are averaged by all-reduces, in `reduced`, instead of gathered
      together with the packets of all gathered leaves.
    bias: how far the mean of a decoded entry may be from the entry, relative to the largest entry
      of the leaf; 0 if a compressor is exact in the mean, or does not say. Without error feedback,
      `sharded(reduce=)` warns from 1/100 on.
    """

    is_reduced = False
    bias: float = 0.0

    @classmethod
    def complete(cls, given: Compressor) -> "BaseCompressor":
        """Return an object with the methods of the given compressor, and defaults for the methods
        that it lacks. A BaseCompressor is returned as it is."""
        if isinstance(given, BaseCompressor):
            return given
        # An instance of the default class gets the methods of the given object as attributes, bound
        # to it.
        completed = cls()
        known = (name for name in dir(cls) if not name.startswith("_") and hasattr(given, name))
        vars(completed).update({name: getattr(given, name) for name in known})
        return completed

    def accepts(self, shape: tuple[int, ...]) -> bool:
        """Tell whether leaves of this shape are compressed, which is True by default, instead of
        exchanged densely."""
        del shape
        return True

    def encode_all(
        self, xs: Sequence[jax.Array], states: Sequence[PyTree]
    ) -> list[tuple[PyTree, PyTree]]:
        """Return the packet and the next state of each of several leaves, by default encoded in
        order by `encode`."""
        return list(map(self.encode, xs, states))

    def encode_slices(self, xs: jax.Array, state: PyTree) -> tuple[PyTree, PyTree]:
        """Return the packets (N, …) of the N slices of a leaf, (N, n), encoded by `vmap` from one
        state, and the next state, which must be the same for all slices."""
        packets, state = jax.vmap(self.encode, in_axes=(0, None), out_axes=(0, None))(xs, state)
        return packets, state

    def add_to(self, total: jax.Array, packet: PyTree, scale: float | jax.Array) -> jax.Array:
        """Return total + scale·decode(packet), in the shape of `total`."""
        return total + scale * self.decode(packet, total.shape).reshape(total.shape)

    def num_entries(self, size: int) -> int | None:
        """Return how many entries with indices a packet of a leaf of `size` elements has, by
        default None for a packet of all entries without indices."""
        del size
        return None

    def entries(self, packet: PyTree, size: int) -> tuple[jax.Array, jax.Array]:
        """Return the rising indices and the values of a packet's entries, or raise a
        NotImplementedError unless overridden, as needed where `num_entries` returns a count."""
        raise NotImplementedError

    @staticmethod
    def reduced(leaves: Sequence[LeafInExchange], axis_name: Axes) -> list[LeafInExchange]:
        """Return leaves with the mean, the residual and the next state by all-reduces, or raise a
        NotImplementedError unless overridden, as needed where `is_reduced`."""
        raise NotImplementedError


C = TypeVar("C", bound="ShownAsCall")


@dataclasses.dataclass(frozen=True, repr=False)
class ShownAsCall(BaseCompressor):
    """A compressor whose `repr` is the call that made it."""

    # Not compared: the same compressor may be written in several ways.
    call: str = dataclasses.field(default="", compare=False, kw_only=True)

    def __repr__(self) -> str:
        return self.call


def show_call(factory: Callable[P, C]) -> Callable[P, C]:
    """Decorate a factory of compressors so that their `repr` is the call that made them."""

    @functools.wraps(factory)
    def make(*args: P.args, **kwargs: P.kwargs) -> C:
        call = call_text(factory.__name__, args, kwargs)
        return dataclasses.replace(factory(*args, **kwargs), call=call)

    return make


# One compressor for all leaves, or one for each pattern of paths; None exchanges densely.
Choice: TypeAlias = Compressor | Mapping[str, Compressor | None]
_METHODS = ("init", "encode", "decode", "num_bytes")


def check_choice(choice: object) -> Mapping[Any, BaseCompressor | None]:
    """Return the compressors by pattern of paths, a single one under a pattern for all paths and
    None as None, or raise an error if one of them is no compressor or no pattern.

    Raises:
      TypeError: a value is not a compressor, or a pattern is not text or a compiled expression.
      ValueError: the text of a pattern is not a regular expression.
    """
    if not isinstance(choice, Mapping):
        # DOTALL, because a key of a mapping may contain a newline.
        return {re.compile(".*", re.DOTALL): _check_compressor("compressor", choice)}
    checked: dict[Any, BaseCompressor | None] = {}
    for pattern, compressor in choice.items():
        checks.instance("compressor: a pattern", pattern, str | re.Pattern, "a regular expression")
        patterns.check_pattern("compressor", pattern)
        if compressor is not None:
            compressor = _check_compressor(f"compressor[{pattern!r}]", compressor)
        checked[pattern] = compressor
    return checked


def _check_compressor(argument: str, compressor: Any) -> BaseCompressor:
    """Return the compressor with all methods of a BaseCompressor, or raise a TypeError if it is a
    class or lacks a method of the protocol."""
    missing = [name for name in _METHODS if not callable(getattr(compressor, name, None))]
    if missing or isinstance(compressor, type):
        raise TypeError(
            f"{argument} must be a compressor such as top_k(0.05) (an object with the methods "
            f"{', '.join(_METHODS)}), a mapping from patterns of paths to compressors, or None; "
            f"got {checks.show(compressor)}"
        )
    return BaseCompressor.complete(compressor)


def choose_compressors(
    choice: Mapping[Any, BaseCompressor | None], params: Params
) -> list[BaseCompressor | None]:
    """Return for each leaf the compressor of the first pattern that matches its path, or None
    without one, and raise a ValueError for a pattern without effect.

    Raises:
      ValueError: a pattern matches none of the paths, or comes after a wider one.
    """
    found: dict[str, BaseCompressor | None] = {}
    for names, compressor in patterns.first_matches(choice, params, "compressor"):
        found |= dict.fromkeys(names, compressor)
    return [found.get(name) for (name,) in contents.leaf_names(params)]
