"""Access to the learning rates in a state: read, set, and list them."""

import functools
from collections.abc import Iterable
from typing import TypeGuard

import jax
import jax.numpy as jnp
import numpy as np
import optax

from optfn.core import checks
from optfn.core.checks import Number
from optfn.core.types import OptState, PyTree
from optfn.mesh.state import names as state_names
from optfn.mesh.state.per_worker import PerWorker
from optfn.mesh.state.reports import read_local
from optfn.transforms.learning_rate import (
    DrivenLearningRateState,
    GivenLearningRateState,
    LearningRateState,
    PlateauLearningRateState,
    RateState,
)


def is_rate(x: object) -> TypeGuard[RateState]:
    """Tell whether `x` is the state of a learning rate."""
    return isinstance(x, LearningRateState | GivenLearningRateState)


def get_learning_rate(opt_state: OptState, path: str | None = None) -> jax.Array:
    """Return the learning rate of a state's last update, or after init of step 0, and raise a
    ValueError if the state has none or several different ones.

    Args:
      opt_state: the state of an optimizer, however wrapped.
      path: if there are several rates (`optax.partition`), words of the name of one's state, such
        as the label of the partition. With local steps, None is the inner rate and "outer" the
        outer one.

    Returns:
      A scalar, float32, or float64 with `jax_enable_x64`. If workers have different rates, it is
      the largest. For a state that was made inside `jax.vmap` it is an array with the rate of each
      run.

    Raises:
      ValueError: the state has no rate, or several different ones, which the error lists.
    """
    found = _select_rates(opt_state, path)
    values = {name: _rate_of_workers(rate.learning_rate) for name, rate in found.items()}
    if not _are_same(values.values()):
        listed = ", ".join(f"{name!r}: {value}" for name, value in values.items())
        raise ValueError(
            f"the state has several learning rates; choose one by path=. They are {listed}"
        )
    return next(iter(values.values()))


def largest_rate(opt_state: OptState) -> jax.Array:
    """Return the largest learning rate of the last update in a state, or 1 if the state has
    none."""
    found = _find_rates(opt_state).values()
    values = [_rate_of_workers(x.learning_rate) for x in found]
    return functools.reduce(jnp.maximum, values) if values else jnp.ones(())


def set_learning_rate(opt_state: OptState, value: Number, path: str | None = None) -> OptState:
    """Return `opt_state` with the rate at `path`, or all rates without a path, set to `value`, and
    raise a ValueError if a schedule or an array determines one.

    A compiled step is not compiled again.

    Args:
      opt_state: the state of an optimizer, however wrapped. If you have a TrainState, of optfn or
        of flax, pass its `opt_state`, or the whole TrainState.
      value: the new rate, a number ≥ 0 or a 0-d array.
      path: selects one rate, as in `get_learning_rate`; None sets all of them.

    Raises:
      ValueError: the state has no rate, or a schedule or an array determines it.
    """
    checks.nonnegative("value", value)
    found = _select_rates(opt_state, path)
    kinds = DrivenLearningRateState | GivenLearningRateState
    if driven := [name for name, rate in found.items() if isinstance(rate, kinds)]:
        raise ValueError(
            f"the learning rate of {', '.join(map(repr, driven))} cannot be set, since a schedule "
            "or an array determines it. Make the optimizer with a Python number instead; to anneal "
            "that number too, put optax.scale_by_schedule(fraction) behind the optimizer"
        )
    chosen = {id(rate) for rate in found.values()}

    def put(node: PyTree) -> PyTree:
        if id(node) not in chosen:
            return node
        # jax.tree.map keeps a wrapper around the array, such as an nnx.Variable.
        rate = jax.tree.map(lambda old: jnp.full_like(old, value), node.learning_rate)
        return node._replace(learning_rate=rate)

    return jax.tree.map(put, opt_state, is_leaf=is_rate)


def _select_rates(opt_state: OptState, path: str | None) -> dict[str, RateState]:
    """Return by name the rates whose name has `path` as whole words, or for None all rates of the
    main state, and raise a ValueError if there are none."""
    if not state_names.is_state(opt_state):
        opt_state = getattr(opt_state, "opt_state", opt_state)  # flax's TrainState
    if path is None:
        opt_state = state_names.find_main_state(opt_state)
    found = _find_rates(opt_state)
    if not found:
        raise ValueError("the state has no learning rate")
    if path is None:
        return found
    chosen = {name: rate for name, rate in found.items() if f"/{path}/" in f"/{name}/"}
    if not chosen:
        raise ValueError(f"no learning rate at path {path!r}; there are {', '.join(found)}")
    return chosen


def _find_rates(opt_state: OptState) -> dict[str, RateState]:
    """Return the rates of a state by name, without the rates of optimizers that a
    `reduce_on_plateau` below the same labels scales."""
    rates = dict(state_names.states_with_names(is_rate, opt_state))
    # `reduce_on_plateau` multiplies the rate of the optimizer before it, which is 1.
    plateaus = {k: x for k, x in rates.items() if isinstance(x, PlateauLearningRateState)}
    places = [f"/{_find_label(name)}/".replace("//", "/") for name in plateaus]
    return {
        name: x
        for name, x in rates.items()
        if name in plateaus or not any(f"/{name}/".startswith(place) for place in places)
    }


def _find_label(name: str) -> str:
    """Return the labels in front of a rate's word, which are "head" for
    "head/scale_by_learning_rate", or "" if it has none."""
    return name.rpartition("/")[0]


def collect_rates(opt_state: OptState) -> dict[str, jax.Array]:
    """Return the main state's rates for the metrics of a step, as one "learning_rate" if all are
    equal, else one for each label, and {} if there are none.

    Of different rates, as a partition has them, each is "learning_rate/<label>", with the whole
    name of its state in place of a label that is empty or not unique.
    """
    found = _find_rates(state_names.find_main_state(opt_state))
    values = {name: _rate_of_workers(rate.learning_rate) for name, rate in found.items()}
    if _are_same(values.values()):
        return {"learning_rate": next(iter(values.values()))}
    labels = [_find_label(name) for name in values]
    return {
        f"learning_rate/{label if label and labels.count(label) == 1 else name}": value
        for label, (name, value) in zip(labels, values.items(), strict=True)
    }


def numbers_of_rates(
    opt_state: OptState, kind: type[RateState] = LearningRateState
) -> dict[str, float]:
    """Return by name, as floats, the rates of exactly this `kind`, by default those that were given
    as numbers, without traced ones.

    Schedules, arrays and `reduce_on_plateau` set the remaining kinds. If workers have different
    rates, it is the largest of this process. Inside `optax.inject_hyperparams` there are none: its
    hyperparameters set them.

    Args:
      opt_state: the state of an optimizer, however wrapped.
      kind: the type of the rates; rates given as arrays have `GivenLearningRateState`.
    """
    found: dict[str, float] = {}
    for name, x in state_names.states_with_names(_is_rate_or_injected, opt_state):
        if type(x) is kind and not checks.is_traced(x):
            found[name] = _read_rate(x.learning_rate)
    return found


def rates_of_hyperparams(opt_state: OptState) -> dict[str, float]:
    """Return by name, as floats, the learning rates that `optax.inject_hyperparams` has as numbers,
    without those of schedules and traced ones."""
    found: dict[str, float] = {}
    for name, x in state_names.states_with_names(_is_rate_or_injected, opt_state):
        if isinstance(x, optax.InjectStatefulHyperparamsState) and not checks.is_traced(x):
            numbers = {k: v for k, v in x.hyperparams.items() if k not in x.hyperparams_states}
            if "learning_rate" in numbers:
                found[name] = _read_rate(numbers["learning_rate"])
    return found


def _is_rate_or_injected(x: object) -> bool:
    """Tell whether `x` is the state of a rate or of `optax.inject_hyperparams`."""
    return is_rate(x) or isinstance(x, optax.InjectStatefulHyperparamsState)


def _read_rate(rate: PyTree) -> float:
    """Return the largest rate of this process's workers."""
    # np.max of a JAX array would run on the devices of the mesh in the context.
    return float(np.max(read_local(jax.tree.leaves(rate)[0])))


def _rate_of_workers(rate: PyTree) -> jax.Array:
    """Return the largest rate of the workers if each has a separate one, else the rate, an
    array."""
    array: jax.Array = jax.tree.leaves(rate)[0]
    return take_largest(array) if isinstance(rate, PerWorker) else array


def take_largest(rate: jax.Array) -> jax.Array:
    """Return the largest of an array of rates, or a scalar unchanged."""
    return jnp.max(rate) if rate.ndim else rate


def _are_same(values: Iterable[jax.Array]) -> bool:
    """Tell whether there is at least one rate and all are equal, where traced rates are equal only
    if they are the same array."""
    found = [*values]
    return bool(found) and all(_is_same(found[0], other) for other in found[1:])


def _is_same(a: jax.Array, b: jax.Array) -> bool:
    """Tell whether two rates are equal or, if either is traced, whether they are the same array."""
    return a is b if checks.is_traced((a, b)) else bool(jnp.array_equal(a, b))
