"""Random keys in the model state: each worker draws with its own, and all store the same.

A model that draws dropout masks from a key in its state would draw the same masks on all workers.
So the loss gets each key with the number of the worker folded in. If it returns that key, the
state keeps the key from before, so that the next step folds the number into the same key again.
"""

import jax
import jax.numpy as jnp
from jax import lax

from optfn.collectives.axes import Axes, axis_size
from optfn.core import tree
from optfn.core.types import Leaf, PyTree
from optfn.train.loss_form import Inputs


def fold_worker_into_keys(model_state: PyTree, names: Axes) -> PyTree:
    """Fold the number of the worker into each typed key; other leaves, and one worker's, pass.

    Args:
      model_state: the arrays of a model besides params; None if it has none.
      names: the mesh axes of the workers, bound here.
    """
    # One worker draws the masks of a run without a mesh.
    if axis_size(names) == 1:
        return model_state
    worker = lax.axis_index(names)

    def fold(x: Leaf) -> Leaf:
        if not tree.is_key(x):
            return x
        folded = jax.vmap(lambda key: jax.random.fold_in(key, worker))(x.reshape(-1))
        return folded.reshape(x.shape)

    return jax.tree.map(fold, model_state)


def fold_device(inputs: Inputs, names: Axes) -> Inputs:
    """Fold the number of the device along `names` into all keys; a key of None stays None."""
    model_state = fold_worker_into_keys(inputs.model_state, names)
    if inputs.key is None:
        return inputs._replace(model_state=model_state)
    key = jax.random.fold_in(inputs.key, lax.axis_index(names))
    return inputs._replace(model_state=model_state, key=key)


def restore_unchanged_keys(new: PyTree, folded: PyTree, old: PyTree) -> PyTree:
    """Undo the fold of each key that the loss returned unchanged: return the key from before it;
    other leaves stay.

    Args:
      new: the model state that the loss returned.
      folded: the model state that the loss got, from `fold_worker_into_keys`.
      old: the model state from before.
    """

    def restore(x: Leaf, seen: Leaf, before: Leaf) -> Leaf:
        if seen is before or not tree.is_key(x):
            return x
        equal = jax.random.key_data(x) == jax.random.key_data(seen)
        is_unchanged = jnp.all(equal, axis=tuple(range(x.ndim, equal.ndim)))
        return jnp.where(is_unchanged, before, x)

    return jax.tree.map(restore, new, folded, old)
