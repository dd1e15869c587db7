"""The state of a training run, and checks, copies and shardings of the arrays that begin it."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from optfn.core import checks, errors, tree
from optfn.core.types import Batch, Leaf, OptState, Params, PyTree
from optfn.interop.modules import check_split
from optfn.leaves.foreign import check_arrays, check_integers, check_keys
from optfn.mesh.state.names import arrays_with_names

# The name of an optimizer's operations in profiles, and in the equations of a step.
UPDATE_SCOPE = "optimizer_update"


class TrainState(NamedTuple):
    """The state of a training run, which each step takes and returns.

    A checkpoint has its arrays under the names "train/step", "train/params/<path>" and
    "train/model_state/<path>", from the name of this type. Those of `opt_state` begin with the name
    of their transform instead, "scale_by_adam/mu/<path>".

    step: the number of steps taken so far, int32.
    params: the parameters that are trained.
    opt_state: the state of the optimizer.
    model_state: further arrays of the model, such as batch statistics, or None.
    """

    step: jax.Array
    params: Params
    opt_state: OptState
    model_state: PyTree = None


def refuse_deleted(state: TrainState, leaves: Sequence[Leaf]) -> None:
    """Raise a ValueError if an earlier call has overwritten an array of a state, as one of its
    leaves tells.

    On several devices JAX 0.10 passes such an array on, and the process ends by a segmentation
    fault.
    """
    kind = type(state.step)  # of an array that is not traced
    if not isinstance(state.step, jax.Array):
        return
    if any(type(x) is kind and x.is_deleted() for x in leaves):
        arrays = tree.arrays_with_paths(state)
        gone = [path for path, x in arrays if type(x) is kind and x.is_deleted()]
        raise ValueError(
            f"{tree.list_names(gone)} has been deleted: an earlier call of the step has "
            "overwritten the state that it belongs to. Continue with the state that this call "
            "returned, or make the step with donate=False"
        )


# (state, batch) -> (state, metrics)
StepFn: TypeAlias = Callable[[TrainState, Batch], tuple[TrainState, dict[str, Any]]]


def check_initial_params(params: Params, who: str = "TrainStep.init") -> None:
    """Raise a TypeError unless params are arrays and one of them is floating point, while an empty
    tree is accepted.

    Args:
      params: the params.
      who: the method that takes them, for the errors.
    """
    check_keys(f"{who}: params", params)
    if any(isinstance(x, TrainState) for x in jax.tree.leaves(params, is_leaf=is_train_state)):
        raise TypeError(
            f"{who}: params must be the parameters alone; got a TrainState, which init "
            "returns. Pass state.params to begin anew; to go on from a state, pass it to the step "
            "or to fit(step, state, batches)"
        )
    check_split(who, params)
    errors.check_params(who, params, "")
    check_arrays(f"{who}: parameter", params)
    check_integers(f"{who}: parameter", params)
    leaves = jax.tree.leaves(params)
    if leaves and not any(map(tree.is_inexact, leaves)):
        raise TypeError(
            f"{who}: params must contain a floating-point array, since integers are not "
            f"trained; got {checks.show(params)}"
        )


def is_train_state(x: object) -> bool:
    """Tell whether `x` is a TrainState."""
    return isinstance(x, TrainState)


@contextlib.contextmanager
def name_foreign_state(state: TrainState, init: Callable[[TrainState], OptState]) -> Iterator[None]:
    """Turn any error inside into a TypeError if another optimizer has made the state, and otherwise
    raise it unchanged.

    The names of the arrays in a fresh state tell it. They are compared after an error only, since
    an optimizer may change its state as it likes.

    Args:
      state: the state of the call inside.
      init: the function that makes the optimizer's state for the params and the model state of
        a state.
    """
    try:
        yield
    except Exception as error:
        try:
            fresh = jax.eval_shape(init, state)
        except Exception:  # an init for bound axes
            raise error from None
        known = {name for name, _ in arrays_with_names(fresh)}
        foreign = [x for x, _ in arrays_with_names(state.opt_state) if x not in known]
        if not foreign:
            raise
        # Counters of optax have different names here, so they would begin anew without a word.
        advice = (
            'rename the counters of optax: docs/moving/optax.md, "A state of optax"'
            if any(x.endswith("/count") for x in foreign)
            and any(x.endswith("/step") for x in known)
            else "load the arrays that both have: optfn.load_state_dict(step.init(state.params), "
            "optfn.state_dict(state), strict=False)"
        )
        raise TypeError(
            f"the state was made by another optimizer: it has {tree.list_names(foreign)}, which "
            "the optimizer of this step does not have. Begin with step.init(state.params), or "
            + advice
        ) from error


def copy(x: Leaf) -> jax.Array:
    """Return a copy of a leaf as an array of the same dtype."""
    # JAX copies an aligned NumPy array later, when it may have changed (JAX 0.10 to 0.12, CPU).
    x = np.array(x) if isinstance(x, np.ndarray) else x
    # A weakly typed parameter would come back strongly typed, and the step would compile again.
    return jnp.array(x, dtype=jnp.asarray(x).dtype, copy=True)


def copy_each(opt_state: OptState) -> OptState:
    """Copy the arrays of a state one after the other, and let go of each.

    An optimizer may keep an array that it puts into its state, as `optax.inject_hyperparams` does,
    and a step would overwrite it.
    """
    leaves, structure = jax.tree.flatten(opt_state)
    del opt_state
    for i, x in enumerate(leaves):
        leaves[i] = copy(x)
    return jax.tree.unflatten(structure, leaves)


def copy_repeated(state: TrainState) -> TrainState:
    """Copy the arrays that occur again in a state, because a buffer can be donated only once, and
    weakly typed ones.

    An average that begins as the params is such an array. Weakly typed arrays, such as counters of
    optax's line searches, are copied too: a step returns them strongly typed, and the next call
    would compile again.
    """
    seen: set[int] = set()

    def once(x: jax.Array) -> jax.Array:
        # The init of a user may also return Python's numbers.
        if id(x) in seen or not tree.is_array(x) or (not tree.is_key(x) and x.weak_type):
            return copy(x)
        seen.add(id(x))
        return x

    return jax.tree.map(once, state)


def copy_shared(values: PyTree, donated: Sequence[Leaf]) -> PyTree:
    """Copy the arrays of a tree that a call donates too, since JAX refuses a buffer that a call
    donates and reads. Params of a target network are an example."""
    read = {id(x) for x in jax.tree.leaves(values) if isinstance(x, jax.Array)}
    shared = read and read.intersection(map(id, donated))
    if not shared:
        return values
    return jax.tree.map(lambda x: copy(x) if id(x) in shared else x, values)


def replicate_counters(state: TrainState) -> TrainState:
    """Replicate arrays that lie on one device, such as counters, over the mesh of the params, or
    return the state unchanged without one mesh.

    Otherwise the first step would replicate them, and the second would be compiled again for the
    new sharding. Params that lie on several meshes, or are traced, have no one mesh.
    """
    leaves = jax.tree.leaves(state.params)
    if checks.is_traced(leaves):
        return state
    meshes = {x.sharding.mesh for x in leaves if isinstance(x.sharding, NamedSharding)}
    if len(meshes) != 1:
        return state
    everywhere = NamedSharding(meshes.pop(), PartitionSpec())
    return jax.tree.map(
        lambda x: x if isinstance(x.sharding, NamedSharding) else jax.device_put(x, everywhere),
        state,
    )
