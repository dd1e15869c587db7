"""Names for the kinds of trees that functions here take and give."""

from collections.abc import Callable
from typing import Any, TypeAlias

# A tree of arrays, or of whatever the text says: any nesting of containers that JAX knows.
PyTree: TypeAlias = Any
Params: TypeAlias = PyTree  # parameters of a model
Updates: TypeAlias = PyTree  # gradients or updates, structured like params
OptState: TypeAlias = PyTree  # the state of a gradient transformation
Batch: TypeAlias = PyTree  # what a loss function is given beside params
Leaf: TypeAlias = Any  # one leaf of a tree: an array, Rows, or what stands for a masked leaf
DType: TypeAlias = Any  # whatever jnp.dtype takes
LossFn: TypeAlias = Callable[..., Any]
