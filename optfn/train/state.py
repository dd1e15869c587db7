"""Reading and writing optimizer state by name.

A part of the state is named by words: the transform that owns it, the field, the path of the leaf,
as in "scale_by_adam/mu/layers/0/w". Positions in a chain do not enter, so that a transform put
before another leaves its name as it was.
"""

import re
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp

from optfn import checks
from optfn.learning_rate import (
    DrivenLearningRateState,
    LearningRateState,
    PlateauLearningRateState,
)


def get_learning_rate(opt_state: Any, path: str | None = None) -> jax.Array:
    """Return the learning rate in a state: after init that of step 0, after k updates the k-th's.

    Args:
      opt_state: the state of an optimizer, however wrapped.
      path: which rate, where there are several (`optax.partition`): part of the name of its state,
        whole words, such as the label of the partition.

    Returns:
      A float32 scalar.

    Raises:
      ValueError: there is no rate, or there are several different ones; the error lists them.
    """
    found = _rates(opt_state, path)
    values = {name: _inside(rate.learning_rate) for name, rate in found.items()}
    first, *others = values.values()
    if any(not _equal(first, other) for other in others):
        listed = ", ".join(f"{name!r}: {value}" for name, value in values.items())
        raise ValueError(
            f"the state holds several learning rates; choose one by path=. They are {listed}"
        )
    return first


def set_learning_rate(opt_state: Any, value: Any, path: str | None = None) -> Any:
    """Return `opt_state` with another learning rate; nothing is recompiled.

    Args:
      opt_state: the state of an optimizer, however wrapped.
      value: the rate, a number ≥ 0 or a 0-d array.
      path: which rate, as in `get_learning_rate`; None sets all.

    Raises:
      ValueError: there is no rate, or a schedule or an array drives it.
    """
    checks.nonnegative("value", value)
    found = _rates(opt_state, path)
    driven = [name for name, rate in found.items() if isinstance(rate, DrivenLearningRateState)]
    if driven:
        raise ValueError(
            f"the learning rate of {', '.join(map(repr, driven))} is driven by a schedule or an "
            "array and cannot be set; make the optimizer with a Python number instead"
        )
    chosen = {id(rate) for rate in found.values()}

    def put(node: Any) -> Any:
        if id(node) not in chosen:
            return node
        rate = jax.tree.map(lambda old: jnp.full_like(old, value), node.learning_rate)
        return node._replace(learning_rate=rate)

    return jax.tree.map(put, opt_state, is_leaf=_is_rate)


def _rates(opt_state: Any, path: str | None) -> dict[str, LearningRateState]:
    """Return the rates in a state by name, those that `path` chooses."""
    everything = dict(_named_rates(opt_state, "", {}))
    # A plateau's rate multiplies that of the optimizer before it, which is 1.
    plateau = [k for k, v in everything.items() if isinstance(v, PlateauLearningRateState)]
    found = {name: everything[name] for name in plateau or everything}
    if not found:
        raise ValueError("the state holds no learning rate")
    if path is None:
        return found
    chosen = {name: rate for name, rate in found.items() if f"/{path}/" in f"/{name}/"}
    if not chosen:
        raise ValueError(f"no learning rate at path {path!r}; there are {', '.join(found)}")
    return chosen


def _is_rate(x: Any) -> bool:
    return isinstance(x, LearningRateState)


def _inside(leaf: Any) -> Any:
    """Return the array in a leaf that may be wrapped (nnx keeps state in Variables)."""
    return jax.tree.leaves(leaf)[0]


def _equal(a: Any, b: Any) -> bool:
    if isinstance(a, jax.core.Tracer) or isinstance(b, jax.core.Tracer):
        return a is b
    return bool(jnp.array_equal(a, b))


def _is_state(x: Any) -> bool:
    return isinstance(x, tuple) and type(x).__name__.endswith("State")


def _word(state: Any) -> str:
    """Return "scale_by_adam" for a ScaleByAdamState."""
    name = type(state).__name__.removesuffix("State")
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower()


def _named_rates(
    node: Any, prefix: str, seen: dict[str, int]
) -> Iterator[tuple[str, LearningRateState]]:
    if _is_rate(node):
        yield prefix, node
    elif _is_state(node):
        name = f"{prefix}/{_word(node)}".strip("/")
        seen[name] = seen.get(name, 0) + 1
        if seen[name] > 1:
            name = f"{name}_{seen[name]}"
        for child in node:
            yield from _named_rates(child, name, seen)
    elif isinstance(node, dict):
        for key, child in node.items():
            yield from _named_rates(child, f"{prefix}/{key}".strip("/"), seen)
    elif isinstance(node, tuple | list):
        for child in node:
            yield from _named_rates(child, prefix, seen)
