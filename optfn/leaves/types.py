"""Names for the kinds of values that functions here take and return, and what a leaf may be."""

import abc
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias, TypeVar

import jax

# Any nesting of containers that JAX knows; its leaves are arrays unless the text says otherwise.
PyTree: TypeAlias = Any
Params: TypeAlias = PyTree  # parameters of a model
Updates: TypeAlias = PyTree  # gradients or updates, structured like params
OptState: TypeAlias = PyTree  # the state of a gradient transformation
Batch: TypeAlias = PyTree  # what a loss function takes after params
Leaf: TypeAlias = Any  # one leaf of a tree: an array, Rows, or the mark of a masked leaf
DType: TypeAlias = Any  # whatever jnp.dtype accepts
LossFn: TypeAlias = Callable[..., Any]

T = TypeVar("T", bound=type)


def declares(**attributes: bool | str | tuple[str, ...]) -> Callable[[T], T]:
    """Decorate a NamedTuple class with attributes that other modules read from the type.

    An attribute of the type needs no array in the state and survives every wrapper: see
    `optfn.state.per_worker`, `optfn.leaves.tree.is_transparent` and
    `optfn.state.names.retired_fields`.
    """

    def declare(kind: T) -> T:
        for name, value in attributes.items():
            setattr(kind, name, value)
        return kind

    return declare


class LeafKind(abc.ABC):
    """A leaf that is no dense array, such as `Rows`: it says how a rule on arrays meets it.

    A pytree node whose numbers are `values`; it represents an array of `shape`.
    """

    values: Leaf

    @property
    @abc.abstractmethod
    def shape(self) -> tuple[int, ...]:
        """The shape of the array that it represents."""

    @property
    def ndim(self) -> int:
        """The number of its axes."""
        return len(self.shape)

    @property
    def dtype(self) -> DType:
        """The dtype of the values."""
        return self.values.dtype

    @abc.abstractmethod
    def map(self, fn: Callable[[Leaf], Leaf]) -> "LeafKind":
        """Return the leaf with fn(values), for an elementwise fn with fn(0) = 0."""

    def astype(self, dtype: DType) -> "LeafKind":
        """Return the leaf with values of `dtype`."""
        return self.map(lambda values: values.astype(dtype))

    @abc.abstractmethod
    def check(self, what: str) -> None:
        """Raise an error that begins with `what` unless the leaf is well formed."""

    @abc.abstractmethod
    def merged(self) -> "LeafKind":
        """Return the same leaf with no element twice in `values`, as norms need it."""

    @abc.abstractmethod
    def dense(self) -> jax.Array:
        """Return the array that it represents."""

    @abc.abstractmethod
    def add_to(self, p: jax.Array) -> jax.Array:
        """Return p plus the array that it represents, in the dtype of p."""

    @abc.abstractmethod
    def apply(
        self,
        rule: Callable[..., Any],
        rows: str,
        accumulators: Sequence[jax.Array],
        params: Sequence[jax.Array],
    ) -> Any:
        """Return what a rule gives for this gradient; see `leafwise.apply` for `rows`."""
