"""How the state of an optimizer declares its per-worker arrays and the gradients that it reduces.

A transform that exchanges gradients may keep per-worker arrays, and takes gradients that are not
yet averaged. Its state declares both, and all code around it (placement, checkpoints, rescaling,
guards, accumulation, the training step) asks the state:

* Which arrays are per-worker, that is, different on each worker? They are in a `PerWorker`, and the
  state has an int32 field `num_workers`. `mark_per_worker(value, axis_name)` also says their axes.
* Which arrays do all workers share, a slice on each? They are in a `Divided`.
* Of which leaves does it take each worker's gradients and exchange them? An `Exchanged` has these
  leaves and the mesh axes, and may say how many bytes the exchange takes
  (`optfn.mesh.layout.traffic`). Over the remaining axes of the workers, the training step averages
  the gradients first.
* Which steps left params and state as they were? The int32 field `skipped` of a state counts them.
* May its updates be row-sparse? Its state type then has `@traits(passes_rows=True)`, and `update`
  takes `row_updates=True`.

A wrapper may enclose such a transform if the wrapper's state is right on every worker; its type
then has `@traits(passes_own_gradients=True)`.

`state_dict` splits per-worker arrays of a packed buffer into arrays of its leaves. If they need an
array that has one number for the whole buffer, as codes need their scale, the state type has
`@traits(spans_buffers=True)`, and these arrays stay whole.

    class MySchemeState(NamedTuple):
        num_workers: jax.Array      # int32, 1 at init; init_state and rescale_residuals set it
        residual: PerWorker         # flat arrays (n,) in init; (N·n,) on a mesh
        published: Divided          # flat arrays (n,) in init; 1/N on each worker of a mesh
        exchanged: Exchanged        # mark_exchanged(params, axis_name) in init
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import optax

from optfn.core import tree
from optfn.core.traits import traits, traits_of
from optfn.core.types import OptState, Params, PyTree
from optfn.leaves import contents
from optfn.mesh.collectives.axes import Axes, AxisName, join_axes, to_axes
from optfn.mesh.collectives.devices import Workers, join_workers
from optfn.mesh.state.names import get_children
from optfn.mesh.state.static import get_static, set_static


@traits(transparent=True)
class PerWorker(NamedTuple):
    """Per-worker arrays of a state, each with at least one axis, (n, …).

    On a mesh each array is (N·n, …), sharded along its first axis, so that a worker sees (n, …).
    It does not change the names of `state_dict`.

    value: a tree of arrays.
    """

    value: PyTree

    @property
    def axes(self) -> Axes:
        """The mesh axes that tell its workers apart, or none if all worker axes do."""
        return get_static(self, "axes", Axes())

    def __getitem__(self, key: Any) -> Any:
        # Integers and slices are keys of the tuple, all else is a key of the tree.
        return tuple.__getitem__(self, key) if isinstance(key, int | slice) else self.value[key]


def is_per_worker(x: object) -> bool:
    """Tell whether `x` is a `PerWorker`, so that each worker has a separate value of it."""
    return isinstance(x, PerWorker)


def mark_per_worker(value: PyTree, axis_name: AxisName) -> PerWorker:
    """Mark a tree of arrays as per-worker along these axes, or along all worker axes if `axis_name`
    has none."""
    names = to_axes(axis_name)
    return set_static(PerWorker(value), axes=names) if names else PerWorker(value)


@traits(transparent=True)
class Divided(NamedTuple):
    """Arrays of a state that all workers share, a slice on each worker.

    `init` returns the whole array, flat, (n,). On a mesh it is padded with zeros to N slices of
    equal length, (N·⌈n/N⌉,), and sharded along its last axis. If the devices of a worker divide a
    leaf, each has such an array for its shard of the leaf, as a row.

    value: a tree of arrays.
    """

    value: PyTree

    @property
    def axes(self) -> Axes:
        """The mesh axes of the workers."""
        return get_static(self, "axes", Axes())

    @property
    def sizes(self) -> tuple[int, ...]:
        """The n of each array, in the order of the leaves."""
        return get_static(self, "sizes", ())

    def __getitem__(self, key: Any) -> Any:
        return tuple.__getitem__(self, key) if isinstance(key, int | slice) else self.value[key]


def mark_divided(value: PyTree, names: Axes) -> Divided:
    """Mark whole flat arrays, (n,), as shared by workers along these axes that keep a slice
    each."""
    sizes = tuple(x.size for x in jax.tree.leaves(value))
    return set_static(Divided(value), axes=names, sizes=sizes)


class ExchangedLeaf(NamedTuple):
    """The mark of a leaf in an `Exchanged`, without arrays."""


class Exchanged(NamedTuple):
    """The leaves whose gradients a transform takes from each worker and exchanges.

    leaves: a tree like the params, with an `ExchangedLeaf` or a masked leaf instead of each array.

    It has no arrays.
    """

    leaves: PyTree

    @property
    def axes(self) -> Axes:
        """The mesh axes that the transform exchanges or averages over."""
        return get_static(self, "axes", Axes())

    @property
    def traffic(self) -> Any:
        """The record of the bytes sent (see `mesh.layout.traffic`), or () if there is none."""
        return get_static(self, "traffic", ())


def mark_exchanged(params: Params, axis_name: AxisName, traffic: Any = ()) -> Exchanged:
    """Mark all leaves of `params` that are not masked as exchanged over these axes, and keep with
    them a record of the bytes sent."""
    leaves = tree.map_arrays(lambda p: ExchangedLeaf(), params)
    return set_static(Exchanged(leaves), axes=to_axes(axis_name), traffic=traffic)


def _is_instance_of(kind: type | tuple[type, ...]) -> Callable[[Any], bool]:
    """Return a function that tells whether a node is of a type."""
    return lambda x: isinstance(x, kind)


def find_nodes(kind: type, state: OptState) -> list[Any]:
    """Return the nodes of a type in a state, but none inside another such node."""
    return [x for x in jax.tree.leaves(state, is_leaf=_is_instance_of(kind)) if isinstance(x, kind)]


def map_divided(fn: Callable[[Divided], Any], state: OptState) -> OptState:
    """Replace each `Divided` node of a state by `fn` of it."""
    return tree.replace_nodes(_is_instance_of(Divided), fn, state)


def has_exchange(state: OptState) -> bool:
    """Tell whether a transform in the state exchanges gradients itself, which an `Exchanged` node
    declares."""
    return bool(find_nodes(Exchanged, state))


def join_exchange_axes(state: OptState) -> Axes:
    """Return the mesh axes of all exchanges in a state, each once, or () if no transform
    exchanges."""
    return join_axes(*(mark.axes for mark in find_nodes(Exchanged, state)))


def join_agreeing_workers(
    name: str, axis_name: AxisName, state: OptState, extra: Mapping[str, Any]
) -> Workers:
    """Return the workers that must agree on what a wrapper reads of gradients: those of the step
    and of `axis_name`, and those whose gradients a transform inside exchanges.

    Args:
      name: the name of the wrapper in errors.
      axis_name: the axes that the caller gave the wrapper; None for none.
      state: the state of the wrapper.
      extra: the extra arguments of its update.

    Raises:
      ValueError: an axis is not bound.
    """
    return join_workers(name, join_axes(axis_name, join_exchange_axes(state)), extra)


def has_per_worker_state(state: OptState) -> bool:
    """Tell whether a state has per-worker arrays. A `PerWorker` without arrays, as `accumulate`
    often has, does not count."""
    return any(jax.tree.leaves(node) for node in find_nodes(PerWorker, state))


def find_exchange_axes(state: OptState, params: Params) -> list[Axes]:
    """Return for each leaf of `params` the mesh axes of its exchange, or () without one, and raise
    a ValueError if `params` lacks an exchanged leaf.

    Over the remaining axes, gradients have to be averaged before the transform sees them. Leaves
    are identified by their names, because a wrapper may mask some of them.

    Raises:
      ValueError: a transform exchanges a leaf that `params` does not have, because a wrapper around
        it changes the tree.
    """
    covered: dict[str, Axes] = {}
    for node in find_nodes(Exchanged, state):
        for name in _find_exchanged(node):
            covered[name] = join_axes(covered.get(name), node.axes)
    names_of_leaves = contents.leaf_names(params)
    unknown = sorted(set(covered).difference(*names_of_leaves))
    if unknown:
        raise ValueError(
            "a transform that exchanges gradients has leaves that params do not have, "
            f"{tree.list_names(unknown)}. Wrappers around it must keep the tree of params, which "
            "optax.flatten does not"
        )
    return [join_axes(*map(covered.get, names)) for names in names_of_leaves]


# Wrappers of optax whose state is the same on all workers.
_KNOWN_WRAPPERS = (
    optax.MaskedState,
    optax.transforms.PartitionState,
    optax.InjectHyperparamsState,
    optax.InjectStatefulHyperparamsState,
)


def check_wrappers(who: str, state: OptState) -> None:
    """Raise a ValueError if an exchange is inside a wrapper not known to be correct there, or
    behind a link of a chain that keeps the gradients it exchanges.

    A wrapper is known if its state type declares `passes_own_gradients`, or if it is one of optax
    that is in `_KNOWN_WRAPPERS`; a chain, list or dict of states is no wrapper. Another may read or
    keep the gradients of one worker, so that workers would diverge.
    """
    if not has_exchange(state) or isinstance(state, Exchanged):
        return
    nodes = get_children(state)
    is_collection = _is_chain(state) or isinstance(state, list | dict)
    is_known = isinstance(state, _KNOWN_WRAPPERS) or traits_of(state).passes_own_gradients
    if not (is_collection or is_known or any(isinstance(x, Exchanged) for x in nodes)):
        raise ValueError(
            f"{who}: {type(state).__name__} encloses a transform that exchanges gradients, so "
            "it would see different gradients on each worker, and workers would diverge. Put "
            "it inside, or use optfn.accumulate, optfn.skip_nonfinite or optfn.record_metrics "
            "instead. If the state of your own wrapper is the same on all workers, declare "
            "traits(passes_own_gradients=True)"
        )
    if _is_chain(state):
        _check_before(who, state)
    for child in nodes:
        check_wrappers(who, child)


def _check_before(who: str, chain: OptState) -> None:
    """Raise a ValueError if a link of a chain keeps gradients that a later link exchanges.

    Such a link sees the gradients of one worker, although on a mesh its state is replicated.
    """
    for i, link in enumerate(chain):
        covered = set[str]().union(*map(_find_exchanged, find_nodes(Exchanged, chain[i + 1 :])))
        # The name of an array that follows a parameter ends with the path of the parameter.
        ends = tuple(name and f"/{name}" for name in covered)
        paths = [] if has_exchange(link) else _find_floating(link)
        kept = [path for path in paths if f"/{path}".endswith(ends)]
        if kept:
            raise ValueError(
                f"{who}: {kept[0]!r} in the state of part {i} of a chain would differ between "
                "workers, since it is made of gradients that a later part exchanges. Put it after "
                "that part"
            )


def _find_exchanged(mark: Exchanged) -> set[str]:
    """Return the names of the leaves that a mark covers, those in packed buffers included and
    masked leaves left out."""
    is_mark = _is_instance_of(ExchangedLeaf)
    marks = jax.tree.map(is_mark, mark.leaves, is_leaf=is_mark)
    return {name for name, x in contents.leaves_with_names(marks) if not tree.is_masked(x)}


def _find_floating(state: OptState) -> list[str]:
    """Return the names of floating-point arrays, without scalars, per-worker arrays and divided
    arrays."""
    is_laid_out = _is_instance_of((PerWorker, Divided))
    shared = tree.replace_nodes(is_laid_out, lambda x: optax.MaskedNode(), state)
    # Scalars are steps and rates, which do not come from gradients.
    return [name for name, x in contents.leaves_with_names(shared) if tree.is_inexact(x) and x.ndim]


def may_give_rows(state: OptState) -> bool:
    """Tell whether an optimizer may return Rows under `row_updates=True`, because it exchanges
    gradients and all that its updates pass through declares to take Rows.

    Some transforms treat Rows as two arrays, so all transforms that updates pass through must be
    known to take Rows. The state tells:

    * A NamedTuple may return Rows if its type has `@traits(passes_rows=True)`, and it has an
      `Exchanged` field or a field whose value may return Rows.
    * A plain tuple, the state of a chain, may return Rows if one of its links may, and the
      remaining links pass them on.
    * Anything else may not.

    A NamedTuple passes Rows on if its type has that trait and the state in its field `inner_state`,
    if it has one, passes them on. A plain tuple does if all of its links do.
    """
    if _is_chain(state):
        passing = (may_give_rows(x) if has_exchange(x) else _passes_rows(x) for x in state)
        return any(map(may_give_rows, state)) and all(passing)
    if not _has_rows_trait(state):
        return False
    return any(isinstance(x, Exchanged) or may_give_rows(x) for x in state)


def _is_chain(state: OptState) -> bool:
    """Tell whether a state is a plain tuple, as a chain's."""
    return type(state) is tuple


def _has_rows_trait(state: OptState) -> bool:
    """Tell whether a state's type declares that its updates may be Rows."""
    return isinstance(state, tuple) and traits_of(state).passes_rows


def _passes_rows(state: OptState) -> bool:
    """Tell whether Rows pass through a state's transform: every link of a chain, or a wrapper and
    all that it wraps, must declare that its updates may be Rows."""
    if _is_chain(state):
        return all(map(_passes_rows, state))
    return _has_rows_trait(state) and _passes_rows(state._asdict().get("inner_state", ()))
