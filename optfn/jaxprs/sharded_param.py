"""A param that is not gathered yet: its shard, and the operations that wait until it is."""

import dataclasses
import functools
from collections.abc import Iterable
from functools import partial
from typing import Any, Protocol

import jax
import jax.extend.core as jex
import jax.numpy as jnp
from jax import lax

from optfn.jaxprs.equations import Equation, Value, type_of, variables

# Operations on an array and literals that are the same on each layer of a stack.
ELEMENTWISE = (
    *("convert_element_type", "copy", "copy_p", "reduce_precision", "stop_gradient"),
    *("neg", "mul", "add", "sub", "div"),
)
# The name of a gathered array in a program.
GATHERED = "optfn.gathered"


class Shard(Protocol):
    """The shard of an array that a device keeps; a pytree."""

    @property
    def array(self) -> jax.Array:
        """The shard."""

    @property
    def is_gathered_ahead(self) -> bool:
        """Whether a scan may gather it for the next layer while the layer before runs."""

    @property
    def is_sent_alone(self) -> bool:
        """Whether the devices have one collective in flight at a time."""

    def whole_type(self) -> jax.ShapeDtypeStruct:
        """Return the shape and dtype of the whole array."""

    def gather(self, dtype: Any = None) -> jax.Array:
        """Return the whole array, cast to `dtype`; None keeps the dtype."""

    def with_whole(self, whole: jax.Array, dtype: Any) -> "Shard":
        """Return the shard with its whole array, which `gather(dtype)` then returns."""

    def divide_layers(self) -> "Shard | None":
        """Return this array divided within each layer; None if no dimension of a layer fits."""

    def group_layers(self, groups: int) -> "Shard | None":
        """Return this array of divided layers as (groups, layers of a group, …).

        None if the layers themselves are divided.
        """

    def layer(self, array: jax.Array) -> "Shard":
        """Return the shard of one layer of this array of divided layers."""


@dataclasses.dataclass(frozen=True, eq=False)
class Operation:
    """An equation on one variable and literals, such as a cast.

    equation: the equation.
    params: its params, or those of the same operation on one layer.
    """

    equation: Equation
    params: dict[str, Any]

    @property
    def name(self) -> str:
        """The name of the primitive."""
        name: str = self.equation.primitive.name
        return name

    def apply(self, x: jax.Array) -> jax.Array:
        """Return the result of the operation on x."""
        operands = [a.val if isinstance(a, jex.Literal) else x for a in self.equation.invars]
        result: jax.Array = self.equation.primitive.bind(*operands, **self.params)
        return result

    def groups_of(self, length: int) -> int | None:
        """Return G if this reshapes `length` layers to (G, layers of a group, …), else None."""
        (operand,) = variables(self.equation.invars)
        old = type_of(operand).shape
        new = self.params.get("new_sizes", ())
        splits = self.name == "reshape" and len(new) == len(old) + 1 and new[2:] == old[1:]
        return new[0] if splits and old[0] == length and self.params["dimensions"] is None else None

    def of_layer(self, length: int) -> "Operation | None":
        """Return the operation on one of `length` layers; None if it mixes layers."""
        if self.name == "transpose":
            first, *order = self.params["permutation"]
            return None if first else self._with(permutation=tuple(d - 1 for d in order))
        if self.name == "reshape":
            first, *sizes = self.params["new_sizes"] or [0]
            keeps_layers = first == length and self.params["dimensions"] is None
            return self._with(new_sizes=tuple(sizes)) if keeps_layers else None
        return self

    def _with(self, **params: Any) -> "Operation":
        return dataclasses.replace(self, params=self.params | params)


@partial(jax.tree_util.register_dataclass, data_fields=["shard"], meta_fields=["operations"])
@dataclasses.dataclass(frozen=True)
class ShardedParam:
    """A param that is not gathered yet, and operations that wait until it is.

    shard: the shard that a device keeps.
    operations: operations on the whole array.
    """

    shard: Shard
    operations: tuple[Operation, ...] = ()

    def gather(self) -> jax.Array:
        """Return the whole value.

        A first cast to fewer bits is made before the array is sent; its gradient is reduced in the
        dtype of the param, as if the array had been cast after it.
        """
        first = self.operations[:1]
        if first and first[0].name == "convert_element_type" and self._narrows(first[0]):
            x = self.shard.gather(first[0].params["new_dtype"])
            remaining = self.operations[1:]
        else:
            x, remaining = self.shard.gather(), self.operations
        for operation in remaining:
            x = operation.apply(x)
        return x

    def _narrows(self, cast: Operation) -> bool:
        old, new = self.shard.array.dtype, jnp.dtype(cast.params["new_dtype"])
        return jnp.issubdtype(new, jnp.floating) and new.itemsize < old.itemsize

    @functools.cached_property
    def gathered_by_name(self) -> jax.Array:
        """The whole value, under a name by which the policy of a checkpoint finds it."""
        # A policy sees the equations inside of other calls, but only the name of a composite.
        named = lax.composite(ShardedParam.gather, GATHERED)
        value = jax.custom_vjp(named)

        def backward(param: ShardedParam, cotangent: jax.Array) -> tuple["ShardedParam"]:
            return jax.vjp(ShardedParam.gather, param)[1](cotangent)

        value.defvjp(lambda param: (named(param), param), backward)
        whole: jax.Array = value(self)
        return whole

    def divide_within_layers(self, length: int) -> "ShardedParam | None":
        """Return this stack of layers, divided within each layer; None if a scan needs it whole.

        Args:
          length: the number of layers.
        """
        shard = self.shard.divide_layers()
        operations: list[Operation] = []
        for operation in self.operations:
            if shard is None:
                return None
            if (groups := operation.groups_of(shard.array.shape[0])) is not None:
                # An operation before it on the axes of a layer would now get groups of layers.
                is_fit = all(x.name in ELEMENTWISE for x in operations)
                shard = shard.group_layers(groups) if is_fit else None
                continue
            of_layer = operation.of_layer(shard.array.shape[0])
            if of_layer is None:
                return None
            operations.append(of_layer)
        if shard is None or shard.array.shape[0] != length:
            return None
        return ShardedParam(shard, tuple(operations))

    def layer(self, array: jax.Array) -> "ShardedParam":
        """Return one layer of what `divide_within_layers` returns, from its shard."""
        return dataclasses.replace(self, shard=self.shard.layer(array))


def is_sharded_param(x: object) -> bool:
    """Tell whether `x` is a ShardedParam."""
    return isinstance(x, ShardedParam)


def gather_params(operands: Iterable[Value], by_name: bool = False) -> list[Value]:
    """Return operands, with the whole value in place of each ShardedParam."""
    whole = []
    for x in operands:
        if isinstance(x, ShardedParam):
            x = x.gathered_by_name if by_name else x.gather()
        whole.append(x)
    return whole
