"""Params and optimizer state that are spread over the workers of a mesh, 1/N on each.

`Sharding` says where each leaf lies. The gradient is computed in a `shard_map`, where each worker
gathers the params that it needs and sends each part of its gradient to the worker that keeps it.
The update runs outside, on whole arrays to look at, each device on its part, so that norms are
those of all workers whatever the optimizer.
"""

import contextlib
import re
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from typing import Any, NamedTuple, TypeAlias, TypeGuard

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from optfn.checks import shown
from optfn.leaves import tree
from optfn.leaves.types import Leaf, LeafKind, OptState, Params, PyTree, Updates
from optfn.mesh import AxisName, axes, restricted
from optfn.state import names as state_names
from optfn.state.per_worker import PerWorker, exchanges, nodes_of
from optfn.state.placement import num_workers

# "state", "params", or PartitionSpecs of params by patterns of paths.
Kind: TypeAlias = str | Mapping[str, P]
KINDS = ("state", "params")


def is_spec(x: object) -> TypeGuard[P]:
    """Tell whether `x` is a PartitionSpec."""
    return isinstance(x, P)


class _Shard(NamedTuple):
    """The part of an array that a worker keeps, and how the whole of it is gathered."""

    whole: jax.Array
    part: jax.Array
    dimension: int
    sharding: "Sharding"

    def of_each_layer(self) -> "_Shard | None":
        """Return the same array by parts of each layer, instead of some whole layers.

        None where N divides no dimension of a layer.
        """
        if self.dimension > 0:
            return self
        names, workers = axes(self.sharding.data_axis), self.sharding.workers
        fitting = [d for d, n in enumerate(self.whole.shape) if d > 0 and n % workers == 0]
        if not fitting:
            return None
        part = lax.all_to_all(self.part, names, fitting[0], 0, tiled=True)
        return self._replace(part=part, dimension=fitting[0])

    def layer(self, part: jax.Array) -> jax.Array:
        """Return a whole layer of this worker's part of it."""
        return self.sharding.gather(part, self.dimension - 1)


# The parts of the arrays that a loss function sees whole, by their id, while it is traced.
_shards: ContextVar[dict[int, _Shard]] = ContextVar("shards", default={})  # noqa: B039


class Sharding(NamedTuple):
    """Where params and state lie.

    kind: which of them are sharded; None for none.
    mesh: its axes are left to the compiler, or bound in `shard_map`.
    data_axis: the axes over whose workers the batch is split.
    tables: the leaves whose rows are sharded in any case.
    """

    kind: Kind | None
    mesh: Mesh
    data_axis: AxisName
    tables: tree.Pattern | None = None

    @property
    def workers(self) -> int:
        """The number of workers: the product of the sizes of the data axes."""
        return num_workers(self.mesh, self.data_axis)

    def of_params(self, params: Params) -> PyTree:
        """Return the PartitionSpec of each leaf of params."""
        if self.kind == "state":
            return self._with_tables(jax.tree.map(lambda x: P(), params), params)
        return self.of_gradients(params)

    def is_table(self, params: Params) -> PyTree:
        """Tell for each leaf of params whether its rows are sharded."""
        leaves, structure = tree.flatten(params)
        if self.tables is None:
            return structure.unflatten([False] * len(leaves))
        return structure.unflatten([flag for (flag,) in tree.select(self.tables, params, "tables")])

    def _with_tables(self, specs: PyTree, params: Params) -> PyTree:
        """Return `specs`, with those of tables in their places."""
        rows = P(axes(self.data_axis))
        for path, x, flag in zip(
            tree.paths(params), tree.flatten(params)[0], jax.tree.leaves(self.is_table(params)),
            strict=True,
        ):  # fmt: skip
            if flag:
                _check_fit(path, jnp.shape(x), rows, self.mesh)
        return jax.tree.map(
            lambda spec, flag: rows if flag else spec, specs, self.is_table(params), is_leaf=is_spec
        )

    def of_gradients(self, params: Params) -> PyTree:
        """Return the PartitionSpec of the gradient of each leaf of params, and of its moments."""
        if self.kind is None:
            specs = jax.tree.map(lambda x: P(), params)
        elif isinstance(self.kind, str):
            leaves, structure = tree.flatten(params)
            pairs = zip(leaves, tree.stacked_axes(params), strict=True)
            divided = [
                self._divided(x, stacked) if tree.is_inexact(x) else P() for x, stacked in pairs
            ]
            specs = structure.unflatten(divided)
        else:
            specs = _matched(self.kind, params, self.mesh)
        return self._with_tables(specs, params)

    def _divided(self, x: Leaf, stacked: int = 0) -> P:
        """Return the spec that divides the first dimension that N divides.

        Axes that count stacked layers come last, so that each worker has a part of each layer. A
        leaf without such a dimension lies on every worker.
        """
        order = [*range(stacked, x.ndim), *range(stacked)]
        fitting = [d for d in order if x.shape[d] and x.shape[d] % self.workers == 0]
        if not fitting:
            return P()
        return P(*[None] * fitting[0], axes(self.data_axis))

    def of_state(self, state: OptState, params: Params) -> PyTree:
        """Return the PartitionSpec of each leaf of the state of an optimizer.

        What has the shape of the parameter that it belongs to lies as its gradient does; other
        arrays, such as scales of blocks, are divided where N divides them.
        """
        specs = tree.flatten(self.of_gradients(params))[0]
        leaves = tree.flatten(params)[0]
        pairs: list[tuple[Leaf, P]] = list(zip(leaves, specs, strict=True))
        by_path = dict(zip(tree.paths(params), pairs, strict=True))

        def spec_of(path: str | None, x: Leaf) -> P:
            if path is None:
                return P()
            p, spec = by_path[path]
            if jnp.shape(p) == jnp.shape(x):
                return spec
            return self._divided(x) if any(map(self._has_data, spec)) else P()

        owned = state_names.with_owners(state_names.named_parts(state), by_path)
        found = [spec_of(path, x) for path, x in owned]
        return jax.tree.unflatten(jax.tree.structure(state), found)

    def place(self, specs: PyTree) -> PyTree:
        """Return the NamedShardings of PartitionSpecs."""
        return jax.tree.map(lambda spec: NamedSharding(self.mesh, spec), specs, is_leaf=is_spec)

    def _has_data(self, entry: Any) -> bool:
        return not set(axes(self.data_axis)).isdisjoint(axes(entry))

    def on_workers(self, spec: P) -> P:
        """Return the part of a spec that speaks of the data axes, which `shard_map` binds."""
        return restricted(spec, axes(self.data_axis))

    def _dimension(self, spec: P) -> int | None:
        """Return the dimension along which the workers share an array; None if each has it all."""
        return next((d for d, entry in enumerate(spec) if self._has_data(entry)), None)

    @contextlib.contextmanager
    def whole(self, params: Params, specs: PyTree, tables: PyTree) -> Iterator[Params]:
        """Give the whole params of a worker's parts, for the time in which a loss is traced.

        `scan_layers` finds the parts of what it is given, and gathers them layer by layer. Tables
        are only looked up, and stay parts.

        Args:
          params: what the worker keeps.
          specs: the PartitionSpecs of whole params.
          tables: which leaves are tables.
        """
        found: dict[int, _Shard] = {}

        def gathered(spec: P, is_table: bool, x: Leaf) -> Leaf:
            dimension = self._dimension(spec)
            if dimension is None or is_table:
                return x
            whole = self.gather(x, dimension)
            found[id(whole)] = _Shard(whole, x, dimension, self)
            return whole

        token = _shards.set(found)
        try:
            yield jax.tree.map(gathered, specs, tables, params, is_leaf=is_spec)
        finally:
            _shards.reset(token)

    def own_part(self, grads: Updates, params: Params, specs: PyTree) -> Updates:
        """Return a worker's part of the mean gradient.

        Args:
          grads: the worker's own gradients: of whole params, or of parts, which `whole` has made
            means already.
          params: what the worker keeps of params.
          specs: the PartitionSpecs of whole gradients.
        """

        def reduced(g: Leaf, p: Leaf, spec: P) -> Leaf:
            if isinstance(g, LeafKind) or not tree.is_inexact(g):
                return g  # rows are at their owners
            dimension = self._dimension(spec)
            if dimension is None:
                return lax.pmean(g, axes(self.data_axis))
            if jnp.shape(p) == jnp.shape(g) and self.kind != "state":
                return g
            return self.mean_part(g, dimension)

        return jax.tree.map(reduced, grads, params, specs, is_leaf=tree.is_leaf)

    def gather(self, part: jax.Array, dimension: int) -> jax.Array:
        """Return a whole array; its gradient is the worker's part of the mean over workers."""

        names = axes(self.data_axis)

        @jax.custom_vjp
        def gather(x: jax.Array) -> jax.Array:
            whole: jax.Array = lax.all_gather(x, names, axis=dimension, tiled=True)
            return whole

        def backward(residual: None, cotangent: jax.Array) -> tuple[jax.Array]:
            return (self.mean_part(cotangent, dimension),)

        gather.defvjp(lambda x: (gather(x), None), backward)
        return gather(part)

    def mean_part(self, x: jax.Array, dimension: int) -> jax.Array:
        """Return the worker's part of the mean of an array over workers, by a reduce-scatter."""
        names = axes(self.data_axis)
        if not self._is_gloo:
            total: jax.Array = lax.psum_scatter(x, names, scatter_dimension=dimension, tiled=True)
            return total / self.workers
        # Between CPU processes the reduce-scatter is wrong (jax issue 40830).
        parts = jnp.stack(jnp.split(x, self.workers, dimension))
        return jnp.mean(lax.all_to_all(parts, names, 0, 0), 0)

    @property
    def _is_gloo(self) -> bool:
        """Whether CPU devices of several processes take part."""
        devices = self.mesh.devices.flat
        return devices[0].platform == "cpu" and len({d.process_index for d in devices}) > 1


def _matched(patterns: Mapping[str, P], params: Params, mesh: Mesh) -> PyTree:
    """Return the specs that patterns give to the leaves of params, checked."""
    leaves, structure = tree.flatten(params)
    specs = [P()] * len(leaves)
    for pattern, spec in reversed(list(patterns.items())):
        flags = tree.select(pattern, params, "shard")
        specs = [spec if flag else old for (flag,), old in zip(flags, specs, strict=True)]
    for path, x, spec in zip(tree.paths(params), leaves, specs, strict=True):
        _check_fit(path, jnp.shape(x), spec, mesh)
    return structure.unflatten(specs)


def _check_fit(path: str, shape: tuple[int, ...], spec: P, mesh: Mesh) -> None:
    if len(spec) > len(shape):
        raise ValueError(f"shard: {spec} has more entries than leaf {path!r} of shape {shape} axes")
    for dimension, entry in enumerate(spec):
        count = num_workers(mesh, axes(entry))
        if shape[dimension] % count:
            raise ValueError(
                f"shard: dimension {dimension} of leaf {path!r}, of shape {shape}, must be "
                f"divisible by the {count} devices of {entry!r}"
            )


def check(shard: object, mesh: Mesh) -> Kind:
    """Return the argument `shard` of a training step, checked against the mesh.

    Raises:
      TypeError: it is neither of the names nor a mapping from patterns to PartitionSpecs.
      ValueError: a spec names an axis that the mesh does not have.
    """
    if isinstance(shard, Mapping):
        for pattern, spec in shard.items():
            if not isinstance(pattern, str | re.Pattern) or not isinstance(spec, P):
                raise TypeError(
                    f"shard must map patterns of paths to PartitionSpecs; got {pattern!r}: {spec!r}"
                )
            missing = [a for entry in spec for a in axes(entry) if a not in mesh.shape]
            if missing:
                raise ValueError(
                    f"shard: the mesh has no axis {missing[0]!r} for {pattern!r}; its axes are "
                    f"{mesh.axis_names}"
                )
        return dict(shard)
    if shard not in KINDS:
        raise TypeError(
            'shard must be "state", "params" or a mapping from patterns to PartitionSpecs; '
            f"got {shard!r}"
        )
    return str(shard)


def scan_layers(fn: Callable[[PyTree, PyTree], PyTree], stacked: PyTree, x: PyTree) -> PyTree:
    """Return x after x = fn(layer, x) for each layer of stacked params.

    With `make_train_step(..., shard="params")` the layers are gathered one at a time, in the
    forward pass and again in the backward pass, which also computes the activations inside a layer
    again: a worker holds its part of all layers, one whole layer, and x after each. Otherwise this
    is `jax.lax.scan`.

    Args:
      fn: (params of one layer, x) -> x.
      stacked: params with the layers along the leading axis of each leaf; a leaf of the params
        that the loss is given, as it is (a leaf that is cast before is gathered whole).
      x: what goes through the layers, a tree of arrays.

    Raises:
      TypeError: `fn` is no function, or `stacked` a list, as of layers that are not stacked.
    """
    if not callable(fn):
        raise TypeError(f"scan_layers: fn must be a function (layer, x) -> x; got {shown(fn)}")
    if isinstance(stacked, list):
        raise TypeError(
            f"scan_layers: stacked is a list of {len(stacked)}; put the layers into one tree: "
            "optfn.Stacked(jax.tree.map(lambda *leaves: jnp.stack(leaves), *layers))"
        )
    known = _shards.get()
    leaves, structure = jax.tree.flatten(_unmarked(stacked))
    shards = [s and s.of_each_layer() for s in map(known.get, map(id, leaves))]
    parts = [leaf if s is None else s.part for leaf, s in zip(leaves, shards, strict=True)]

    def body(x: PyTree, parts: list[jax.Array]) -> tuple[PyTree, None]:
        pairs = zip(parts, shards, strict=True)
        layer = [part if s is None else s.layer(part) for part, s in pairs]
        return fn(jax.tree.unflatten(structure, layer), x), None

    if any(s is not None for s in shards):
        body = jax.checkpoint(body, prevent_cse=False)
    return lax.scan(body, x, parts)[0]


def _unmarked(stacked: PyTree) -> PyTree:
    """Return a tree without the marks of stacked layers."""

    def is_mark(x: object) -> bool:
        return tree.is_transparent(x)

    def without(x: PyTree) -> PyTree:
        if not is_mark(x):
            return x
        (inner,) = x
        return _unmarked(inner)

    return jax.tree.map(without, stacked, is_leaf=is_mark)


def init_state(tx: optax.GradientTransformation, params: Params, sharding: Sharding) -> OptState:
    """Return the state of step 0, each leaf where it is to lie; it is never whole on a device.

    Raises:
      ValueError: a part of the state is a worker's own.
    """
    shapes = jax.eval_shape(tx.init, params)
    if exchanges(shapes) or jax.tree.leaves(nodes_of(PerWorker, shapes)):
        raise ValueError(
            "shard with a tx that communicates by itself or keeps a state on each worker: its "
            "state already lies on the workers; leave shard out"
        )
    shardings = sharding.place(sharding.of_state(shapes, params))
    return jax.jit(tx.init, out_shardings=shardings)(params)
