"""Names for the kinds of values that functions here take and return."""

from collections.abc import Callable
from typing import Any, TypeAlias, TypeVar

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


def declares(**flags: bool) -> Callable[[T], T]:
    """Decorate a NamedTuple class with flags that other modules read from the type.

    A flag on the type needs no array in the state and survives every wrapper: see
    `optfn.parallel.per_worker` and `optfn.leaves.tree.is_transparent`.
    """

    def declare(kind: T) -> T:
        for name, value in flags.items():
            setattr(kind, name, value)
        return kind

    return declare
