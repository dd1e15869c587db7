"""Random keys in the model state: each worker draws with a different key, and all store the same.

A model that draws dropout masks from a key in its state would draw the same masks on all workers.
So the loss gets each key with the number of the worker folded in. If it returns that key, the
state keeps the key from before, so that the next step folds the number into the same key again.
"""

import jax
import jax.numpy as jnp
from jax import lax

from optfn.core import tree
from optfn.core.types import Leaf, PyTree
from optfn.loss.loss_form import Inputs
from optfn.mesh.collectives.axes import Axes, axis_size


def fold_in(key: jax.Array, number: jax.Array | int) -> jax.Array:
    """Return `jax.random.fold_in(key, number)`, of a key that is split before if it is one of
    unsafe_rbg: its folds of several numbers do not depend on their order, and equal ones cancel."""
    if jax.random.key_impl(key) == "unsafe_rbg":
        key = jax.random.split(key, 1)[0]
    return jax.random.fold_in(key, number)


def fold_worker_into_keys(model_state: PyTree, names: Axes) -> PyTree:
    """Return the model state with the index of the worker folded into each typed key, or unchanged
    if there is only one worker.

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
        return jax.vmap(lambda key: fold_in(key, worker))(x.reshape(-1)).reshape(x.shape)

    return jax.tree.map(fold, model_state)


def fold_device(inputs: Inputs, names: Axes) -> Inputs:
    """Fold the index of the device along `names` into the key of the loss, unless it is None, and
    into the keys of the model state if there are several devices."""
    model_state = fold_worker_into_keys(inputs.model_state, names)
    if inputs.key is None:
        return inputs._replace(model_state=model_state)
    key = fold_in(inputs.key, lax.axis_index(names))
    return inputs._replace(model_state=model_state, key=key)


def restore_unchanged_keys(new: PyTree, folded: PyTree, old: PyTree) -> PyTree:
    """Return the new model state, with the key from before the fold for each key that the loss
    returned unchanged, and with the remaining leaves as the loss returned them.

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
