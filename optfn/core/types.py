"""Names for the kinds of values that functions here take and return, and of leaves."""

import abc
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeAlias

import jax
import numpy as np
from jax.typing import DTypeLike

# Any nesting of containers that JAX knows; its leaves are arrays unless the text says otherwise.
PyTree: TypeAlias = Any
Params: TypeAlias = PyTree  # parameters of a model
Updates: TypeAlias = PyTree  # gradients or updates, structured like params
OptState: TypeAlias = PyTree  # the state of a gradient transformation
Stepped: TypeAlias = tuple[Updates, OptState]  # the result of `update`
Batch: TypeAlias = PyTree  # the argument of a loss function after params
Leaf: TypeAlias = Any  # one leaf of a tree: an array, Rows, or the mark of a masked leaf
DType: TypeAlias = DTypeLike  # a dtype of NumPy or JAX, or its name
LossFn: TypeAlias = Callable[..., Any]
Arrays: TypeAlias = Sequence[jax.Array]
Scalars: TypeAlias = Mapping[str, Any]  # the hyper-parameters of a rule by name


class LeafKind(abc.ABC):
    """A leaf that is not a dense array, such as `Rows`, and defines how rules apply to it.

    It is a pytree node whose numbers are `values`, and represents an array of `shape`.
    """

    values: jax.Array

    @property
    @abc.abstractmethod
    def shape(self) -> tuple[int, ...]:
        """The shape of the array that it represents."""

    @property
    def ndim(self) -> int:
        """The number of its axes."""
        return len(self.shape)

    @property
    def dtype(self) -> np.dtype[Any]:
        """The dtype of the values."""
        return self.values.dtype

    @abc.abstractmethod
    def mean_over(self, axes: tuple[Any, ...]) -> "LeafKind":
        """Return the mean over the workers along mesh axes, where these axes are bound."""

    @abc.abstractmethod
    def sum_leading(self) -> "LeafKind":
        """Return the sum over the leading axis of its arrays, which counts leaves."""

    @property
    def mesh_axes(self) -> tuple[Any, ...]:
        """The mesh axes over whose devices its arrays are divided."""
        return ()

    @abc.abstractmethod
    def map(self, fn: Callable[[jax.Array], jax.Array]) -> "LeafKind":
        """Return the leaf with fn(values), for an elementwise fn with fn(0) = 0."""

    def astype(self, dtype: DType) -> "LeafKind":
        """Return the leaf with values of `dtype`."""
        return self.map(lambda values: values.astype(dtype))

    @abc.abstractmethod
    def check(self, subject: str) -> None:
        """Raise a TypeError or a ValueError that begins with `subject` unless the leaf is well
        formed."""

    @abc.abstractmethod
    def merge(self) -> "LeafKind":
        """Return the same leaf with no element twice in `values`, as norms need it."""

    @abc.abstractmethod
    def dense(self) -> jax.Array:
        """Return the array that it represents."""

    @abc.abstractmethod
    def add_to(self, p: jax.Array) -> jax.Array:
        """Return p plus the array that it represents, in the dtype of p."""

    def __add__(self, other: Leaf) -> Leaf:
        """Return other + self, an array."""
        return self.add_to(other)

    def __radd__(self, other: Leaf) -> Leaf:
        return self + other

    def apply(
        self, rule: Callable[..., Any], rows: str, accumulators: Arrays, p: Arrays, scalars: Scalars
    ) -> Any:
        """Return rule(g, *accumulators, *p, **scalars) for this leaf, on its values, its array or
        its rows, as `rows` says."""
        if rows == "linear":
            return self.map(partial(rule, **scalars))
        if rows == "dense":
            return rule(self.dense(), *accumulators, *p, **scalars)
        return self.apply_to_rows(rule, accumulators, p, scalars)

    @abc.abstractmethod
    def apply_to_rows(
        self, rule: Callable[..., Any], accumulators: Arrays, params: Arrays, scalars: Scalars
    ) -> Any:
        """Apply a rule to the rows, to each once, and to the same rows of the arrays."""
