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

from optfn.loss.jaxprs import primitives
from optfn.loss.jaxprs.equations import Value, bind, variables
from optfn.loss.jaxprs.primitives import Equation

# The name of a gathered array in a program.
GATHERED = "optfn.gathered"


class Shard(Protocol):
    """The shard of an array that a device keeps, as a pytree."""

    @property
    def array(self) -> jax.Array:
        """The shard."""

    def whole_type(self) -> jax.ShapeDtypeStruct:
        """Return the shape and dtype of the whole array."""

    def gather(self, dtype: Any = None) -> jax.Array:
        """Return the whole array, cast to `dtype` unless that is None."""

    def divide_layers(self) -> "Shard | None":
        """Return this array divided within each layer, or None if no dimension of a layer fits."""

    def group_layers(self, groups: int) -> "Shard | None":
        """Return this array of divided layers as (groups, layers of a group, …), or None if the
        layers themselves are divided."""

    def layer(self, array: jax.Array) -> "Shard":
        """Return the shard of one layer of this array of divided layers."""


@dataclasses.dataclass(frozen=True, eq=False)
class Operation:
    """An equation on one variable and literals, such as a cast.

    equation: the equation.
    order: the order of the axes that it gives the array; None if it keeps theirs.
    sizes: the shape that it gives the array; None if it is no reshape.
    """

    equation: Equation
    order: tuple[int, ...] | None
    sizes: tuple[int, ...] | None

    @classmethod
    def of(cls, equation: Equation) -> "Operation | None":
        """Return the operation if an equation is a transpose, a plain reshape, a cast or arithmetic
        on one variable and literals, else None."""
        order, sizes = primitives.as_transpose(equation), primitives.as_reshape(equation)
        is_known = order is not None or sizes is not None or primitives.is_same_on_layers(equation)
        is_unary = len(variables(equation.invars)) == 1
        return cls(equation, order, sizes) if is_known and is_unary else None

    @property
    def keeps_shape(self) -> bool:
        """Whether it treats each entry of the array by itself, as all but transposes and reshapes
        do."""
        return self.order is None and self.sizes is None

    def apply(self, x: jax.Array) -> jax.Array:
        """Apply the operation to x, in place of the equation's operand that is no literal."""
        if self.order is not None:
            return lax.transpose(x, self.order)
        if self.sizes is not None:
            return lax.reshape(x, self.sizes)
        inputs = [a.val if isinstance(a, jex.Literal) else x for a in self.equation.invars]
        return bind(self.equation, *inputs)[0]

    def groups_of(self, length: int) -> int | None:
        """Return G if this reshapes `length` layers to (G, layers of a group, …), else None."""
        (operand,) = variables(self.equation.invars)
        old, new = primitives.type_of(operand).shape, self.sizes or ()
        splits = len(new) == len(old) + 1 and new[2:] == old[1:] and old[0] == length
        return new[0] if splits else None

    def of_layer(self, length: int) -> "Operation | None":
        """Return the operation on one of `length` layers, or None if it mixes layers."""
        if self.order is not None:
            first, *order = self.order
            return None if first else dataclasses.replace(self, order=tuple(d - 1 for d in order))
        if self.sizes is not None:
            first, *sizes = self.sizes or [0]
            return dataclasses.replace(self, sizes=tuple(sizes)) if first == length else None
        return self


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
        """Gather the whole array, apply the operations that wait, and return the result, where a
        first cast to fewer bits is made before the array is sent.

        The gradient of that cast is reduced in the dtype of the param, as if the array had been
        cast after it.
        """
        dtype = primitives.as_cast(self.operations[0].equation) if self.operations else None
        if dtype is not None and self._is_narrower(jnp.dtype(dtype)):
            x, remaining = self.shard.gather(dtype), self.operations[1:]
        else:
            x, remaining = self.shard.gather(), self.operations
        for operation in remaining:
            x = operation.apply(x)
        return x

    def _is_narrower(self, dtype: Any) -> bool:
        """Tell whether a dtype is floating-point and has fewer bytes than the shard's dtype."""
        is_smaller = dtype.itemsize < self.shard.array.dtype.itemsize
        return jnp.issubdtype(dtype, jnp.floating) and is_smaller

    @functools.cached_property
    def gathered_by_name(self) -> jax.Array:
        """The whole value, under a name that the policy of a checkpoint finds."""
        # A policy sees the equations inside of a jitted call, but only the name of a composite.
        named = lax.composite(ShardedParam.gather, GATHERED)
        value = jax.custom_vjp(named)

        def backward(param: ShardedParam, cotangent: jax.Array) -> tuple["ShardedParam"]:
            return jax.vjp(ShardedParam.gather, param)[1](cotangent)

        value.defvjp(lambda param: (named(param), param), backward)
        return value(self)

    def divide_within_layers(self, length: int) -> "ShardedParam | None":
        """Return this stack divided within each layer, with its operations on one layer, or None if
        it cannot be divided so and a scan needs it whole.

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
                is_fit = all(x.keeps_shape for x in operations)
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
        """Return one layer of the result of `divide_within_layers`, from its shard."""
        return dataclasses.replace(self, shard=self.shard.layer(array))


def is_sharded_param(x: object) -> bool:
    """Tell whether `x` is a ShardedParam, this device's shard of a param."""
    return isinstance(x, ShardedParam)


def gather_params(operands: Iterable[Value], by_name: bool = False) -> list[Value]:
    """Gather the whole value of each ShardedParam among the operands, by name for checkpoints if
    `by_name`."""
    whole = []
    for x in operands:
        if isinstance(x, ShardedParam):
            x = x.gathered_by_name if by_name else x.gather()
        whole.append(x)
    return whole
