"""The options of a training step: which need another, and which exclude each other."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import optax
from jax.sharding import Mesh

from optfn import checks
from optfn import mesh as meshes
from optfn.leaves.tree import Pattern
from optfn.leaves.types import Updates
from optfn.mesh import AxisName
from optfn.parallel.sharding import Kind, Sharded
from optfn.state.placement import num_workers

# (option, the option that it needs, why)
NEEDS = (
    ("shard", "mesh", "params or state are divided over its devices"),
    ("shard_tables", "tables", "a pattern of the leaves whose rows are divided"),
    ("shard_tables", "mesh", "rows are divided over its devices"),
    ("local_steps", "mesh", "its workers train apart"),
    ("outer", "local_steps", "it is the optimizer of rounds of several steps"),
)

_OF_LOSS = "it concerns loss_fn, which value_and_grad replaces"

# (option, an option that excludes it, why)
EXCLUDES = (
    ("recompute", "value_and_grad", _OF_LOSS),
    ("tables", "value_and_grad", _OF_LOSS),
    ("rng", "value_and_grad", _OF_LOSS),
    ("tables", "packed", "a buffer of several leaves has no rows"),
    ("shard_tables", "packed", "a buffer of several leaves has no rows"),
)


@dataclasses.dataclass(frozen=True)
class StepOptions:
    """The arguments of `make_train_step` besides the loss and the optimizer, checked."""

    has_aux: bool = False
    model_state: bool = False
    mesh: Mesh | None = None
    data_axis: AxisName = "data"
    recompute: Sequence[str] | None = None
    packed: bool = False
    tables: Pattern | None = None
    rng: bool | int | jax.Array = False
    value_and_grad: Callable[..., tuple[Any, Updates]] | None = None
    microbatches: int = 1
    local_steps: int = 1
    outer: optax.GradientTransformation | None = None
    shard: Kind | None = None
    shard_tables: bool = False
    donate: bool = True

    def __post_init__(self) -> None:
        for name in ("has_aux", "model_state", "packed", "shard_tables", "donate"):
            checks.flag(name, getattr(self, name))
        checks.count("local_steps", self.local_steps)
        checks.count("microbatches", self.microbatches)
        _check_mesh(self.mesh, self.data_axis)
        _check_together(self.given())
        if self.packed and isinstance(self.shard, Sharded) and self.shard.whole is not None:
            raise ValueError(
                "shard=sharded(..., whole=) cannot be combined with packed=True: a part of a "
                "buffer of several leaves does not consist of whole matrices"
            )

    def given(self) -> dict[str, Any]:
        """Return the options that differ from their defaults."""
        values = {f.name: (getattr(self, f.name), f.default) for f in dataclasses.fields(self)}
        return {name: value for name, (value, default) in values.items() if value is not default}


def _check_together(given: Mapping[str, Any]) -> None:
    for option, needed, why in NEEDS:
        if option in given and needed not in given:
            raise ValueError(f"{_shown(option, given)} needs {needed}: {why}")
    for option, other, why in EXCLUDES:
        if {option, other} <= set(given):
            raise ValueError(
                f"{_shown(option, given)} cannot be combined with {_shown(other, given)}: {why}"
            )


def _shown(option: str, given: Mapping[str, Any]) -> str:
    value = given[option]
    return f"{option}={value!r}" if isinstance(value, str | int) else option


def _check_mesh(mesh: object, data_axis: AxisName) -> None:
    if mesh is not None and not isinstance(mesh, Mesh):
        raise TypeError(
            "mesh must be a jax.sharding.Mesh such as optfn.distributed.data_mesh(); "
            f"got {checks.shown(mesh)}"
        )
    meshes.check_names("data_axis", data_axis)
    if mesh is not None:
        num_workers(mesh, data_axis)


def check_loss(loss_fn: object, value_and_grad: object, options: StepOptions) -> None:
    """Raise a TypeError unless the one that is called takes the arguments of a step."""
    if not callable(loss_fn) and (loss_fn is not None or value_and_grad is None):
        raise TypeError(f"loss_fn must be a function (params, batch) -> loss; got {loss_fn!r}")
    if value_and_grad is not None and not callable(value_and_grad):
        raise TypeError(
            "value_and_grad must be a function (params, batch) -> (loss, gradients); "
            f"got {value_and_grad!r}"
        )
    arguments = ["params", *["model_state"] * options.model_state, "batch"]
    if value_and_grad is not None:
        checks.takes("value_and_grad", value_and_grad, arguments)
    else:
        checks.takes("loss_fn", loss_fn, arguments + ["key"] * (options.rng is not False))
