"""Leaves that a loss can use in one way only."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import jax

from optfn.leaves.types import DType


class OpaqueLeaf(ABC):
    """A leaf that a loss can use in one way only, which a subclass defines.

    The loss can read its path, shape and dtype. All else raises the error of `_refusal`.

    Args:
      array: the leaf.
      path: its path, for errors.
    """

    def __init__(self, array: jax.Array, path: str) -> None:
        self._array, self.path = array, path

    @abstractmethod
    def _refusal(self, use: str) -> TypeError:
        """Return the error for another use of the leaf, such as "its attribute 'T'"."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the leaf."""
        return self._array.shape

    @property
    def dtype(self) -> DType:
        """The dtype of the leaf."""
        return self._array.dtype

    @property
    def ndim(self) -> int:
        """The number of axes of the leaf."""
        return self._array.ndim

    @property
    def size(self) -> int:
        """The number of elements of the leaf."""
        return self._array.size

    def __getitem__(self, index: object) -> Any:
        raise self._refusal(f"the index {index!r}")

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        raise self._refusal(f"its attribute {name!r}")

    def __jax_array__(self) -> Any:
        raise self._refusal("an operation on the whole array")

    def __array__(self, *args: object, **options: object) -> Any:
        raise self._refusal("a conversion to NumPy")


def _refusing(operation: str) -> Callable[..., Any]:
    def refuse(self: OpaqueLeaf, *args: object) -> Any:
        raise self._refusal(operation)

    return refuse


# Python looks up operators in the class, not by __getattr__.
for _name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "matmul", "pow"):
    setattr(OpaqueLeaf, f"__{_name}__", _refusing(_name))
    setattr(OpaqueLeaf, f"__r{_name}__", _refusing(_name))
for _name in (
    *("neg", "abs", "len", "iter", "bool", "contains", "float", "int"),
    *("eq", "ne", "lt", "le", "gt", "ge"),
):
    setattr(OpaqueLeaf, f"__{_name}__", _refusing(_name))
