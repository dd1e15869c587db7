"""The gathers that a layer runs first, found by tracing the layer, and results in their places."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
from jax import lax

from optfn.jaxprs.equations import Value
from optfn.jaxprs.sharded_param import Shard, ShardedParam

# Leaves are gathered ahead if they have at most this share of the bytes that a layer gathers: they
# are held twice beside the layer.
_LARGEST_SHARE = 1 / 4
# XLA for GPUs merges the products of the first two, if they share an operand as those of queries
# and keys do. A third is gathered beside these products, and would only delay the scatters.
_MOST_LEAVES = 2
# In place of a dtype: a scan inside of the layer takes the leaf, and gathers it layer by layer.
_BY_LAYERS = object()


class FirstGather(NamedTuple):
    """A leaf that a layer gathers first.

    position: its place in the layer.
    dtype: the dtype in which it is gathered.
    is_sent_alone: whether no other collective is in flight while it is gathered.
    """

    position: int
    dtype: Any
    is_sent_alone: bool

    def gather(
        self, stacks: Sequence[Value], number: Any, after: Sequence[jax.Array] = ()
    ) -> jax.Array:
        """Return the leaf of the layer with this number, gathered once `after` is computed."""
        stack = stacks[self.position]
        array = _take_entry(stack.shard.array, number)
        # XLA would move the gather of a constant number out of the loop over microbatches, and
        # hold the leaf.
        if after:
            array, *_ = lax.optimization_barrier([array, *after])
        return self._gather(stack.shard.layer(array))

    def place(self, layer: Sequence[Value], whole: jax.Array) -> list[Value]:
        """Return the layer with the gathered leaf in it, whose gradient is scattered as before."""
        param = layer[self.position]
        replace = jax.custom_vjp(lambda shard, whole: whole)

        def backward(shard: Shard, cotangent: jax.Array) -> tuple[Any, None]:
            # The forward pass of this derivative is dead code.
            (of_shard,) = jax.vjp(self._gather, shard)[1](cotangent)
            return of_shard, None

        replace.defvjp(lambda shard, whole: (whole, shard), backward)
        shard = param.shard.with_whole(replace(param.shard, whole), self.dtype)
        placed = list(layer)
        placed[self.position] = dataclasses.replace(param, shard=shard)
        return placed

    def _gather(self, shard: Shard) -> jax.Array:
        return shard.gather(self.dtype)


def find_first_gathers(
    run: Callable[[Sequence[Value]], list[Value]],
    operands: Sequence[Value],
    stacks: Sequence[Value],
) -> list[FirstGather]:
    """Return the gathers that a layer runs first, at most two; none where the devices want none.

    Leaves of more than a quarter of the layer's bytes, which would be held twice, and leaves that
    the layer gathers again, in another dtype or in a scan, are left out, and all leaves after them.

    Args:
      run: [*operands, *layer] -> results.
      operands: what it takes before the layer.
      stacks: the layers; a ShardedParam is divided within each layer.
    """
    if not any(isinstance(x, ShardedParam) and x.shard.is_gathered_ahead for x in stacks):
        return []
    gathers = _record_gathers(run, operands, stacks)
    most_bytes = _LARGEST_SHARE * sum(x.num_bytes for x in gathers)
    found: list[FirstGather] = []
    for x in gathers[:_MOST_LEAVES]:
        most_bytes -= x.num_bytes
        is_used_once = [other.position for other in gathers].count(x.position) == 1
        if x.dtype is _BY_LAYERS or not is_used_once or most_bytes < 0:
            break
        found.append(FirstGather(x.position, x.dtype, stacks[x.position].shard.is_sent_alone))
    return found


def _record_gathers(
    run: Callable[[Sequence[Value]], list[Value]],
    operands: Sequence[Value],
    stacks: Sequence[Value],
) -> list["_Gather"]:
    """Return the gathers of a layer in the order of their first uses."""
    record: list[_Gather] = []

    def run_recorded(operands: Sequence[Value], stacks: Sequence[Value]) -> list[Value]:
        layer = take_layer(stacks, 0)
        for i, x in enumerate(layer):
            if isinstance(x, ShardedParam):
                shard: Any = _RecordedShard(x.shard, i, record)
                layer[i] = dataclasses.replace(x, shard=shard)
        return run([*operands, *layer])

    jax.eval_shape(run_recorded, operands, stacks)
    return list(dict.fromkeys(record))


def take_layer(stacks: Sequence[Value], number: Any) -> list[Value]:
    """Return the layer with this number of each stack."""
    layer = []
    for x in stacks:
        is_param = isinstance(x, ShardedParam)
        layer.append(
            x.layer(_take_entry(x.shard.array, number)) if is_param else _take_entry(x, number)
        )
    return layer


def _take_entry(stack: jax.Array, number: Any) -> jax.Array:
    return lax.dynamic_index_in_dim(stack, number, 0, keepdims=False)


class _Gather(NamedTuple):
    """A gather of a leaf by its position in a layer: in a dtype, of so many bytes."""

    position: int
    dtype: Any
    num_bytes: int


@partial(
    jax.tree_util.register_dataclass, data_fields=["shard"], meta_fields=["position", "record"]
)
@dataclasses.dataclass(frozen=True, eq=False)
class _RecordedShard:
    """A shard that records its gathers."""

    shard: Shard
    position: int
    record: list[_Gather]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.shard, name)

    def gather(self, dtype: Any = None) -> jax.Array:
        """Return the whole array."""
        x = self.shard.gather(dtype)
        self.record.append(_Gather(self.position, dtype, math.prod(x.shape) * x.dtype.itemsize))
        return x

    def divide_layers(self) -> Shard | None:
        """Return this array divided within each layer, for a scan inside of the layer."""
        # The scan gathers it a layer at a time, so that it may not be gathered ahead.
        self.record.append(_Gather(self.position, _BY_LAYERS, 0))
        return self.shard.divide_layers()
