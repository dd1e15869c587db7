"""What a loss gathers of divided params, found by a dry run of its program."""

import dataclasses
import re
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend import source_info_util
from jax.sharding import AbstractMesh, AxisType, use_abstract_mesh

from optfn.collectives.axes import Axes
from optfn.core import tree
from optfn.core.types import Leaf, Params, PyTree
from optfn.jaxprs.equations import Equations
from optfn.jaxprs.primitives import name_of
from optfn.jaxprs.sharded import has_scan_over_arrays
from optfn.jaxprs.sharded_param import ShardedParam
from optfn.parallel.mesh_layout import Layout, ParamEntry
from optfn.parallel.scans import LeafShard
from optfn.sparse.loss_program import LossProgram

# The folders of installed packages.
_LIBRARY = re.compile(r"[\\/](site|dist)-packages[\\/]")


class LeafGathers(NamedTuple):
    """What a loss gathers of a divided leaf.

    scans: how many scans take the leaf layer by layer.
    whole: the line of the loss that needs the whole leaf; None if no line does.
    """

    scans: int
    whole: str | None


class _Record:
    """What the dry run has seen, by the path of a leaf."""

    def __init__(self) -> None:
        self.scans: dict[str, set[object]] = {}
        self.whole: dict[str, str] = {}


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["array", "step", "counts"],
    meta_fields=[
        *("divisions", "slices", "layout", "mean_axes", "path", "record", "scan", "of_layers"),
    ],
)
@dataclasses.dataclass(frozen=True)
class _DryShard(LeafShard):
    """A whole leaf in place of its shard, which records what is gathered, and sends nothing."""

    path: str
    record: _Record
    scan: object = None  # the scan that takes the leaf, which may trace its body several times
    of_layers: int = 0  # how many layers the leaf has of which this is one; 0: this is the leaf

    def whole_type(self) -> Any:
        """Return the shape and dtype of the array."""
        return jax.ShapeDtypeStruct(self.array.shape, self.array.dtype)

    def gather(self, dtype: Any = None) -> jax.Array:
        """Return the array, and record the line that needs it, unless it is a layer."""
        if not self.of_layers:
            line = _find_line(source_info_util.current())
            self.record.whole.setdefault(self.path, line)
        return self.array.astype(dtype or self.array.dtype)

    def divide_layers(self) -> "_DryShard | None":
        """Return the array for a scan over its layers."""
        shard: Any = super().divide_layers()
        # A scan inside of a layer counts to the scan over the layer.
        scan = self.scan if self.of_layers else object()
        return None if shard is None else dataclasses.replace(shard, scan=scan)

    def layer(self, array: jax.Array) -> "_DryShard":
        """Return a layer, and record the scan."""
        if not self.of_layers:
            self.record.scans.setdefault(self.path, set()).add(self.scan)
        layer: Any = super().layer(array)
        return dataclasses.replace(layer, of_layers=self.array.shape[0])

    def _exchange_layers(self, dimension: int, names: Axes) -> jax.Array:
        return self.array


def find_gathers(
    loss_fn: Callable[..., Any], params: Params, arguments: Sequence[PyTree], layout: Layout
) -> dict[str, LeafGathers]:
    """Return what a loss gathers of each leaf that the layout divides, by path.

    Args:
      loss_fn: (params, *arguments) -> loss, or (loss, aux).
      params: arrays or their shapes, without tables.
      arguments: the model state, if any, and the batch of one device, or their shapes.
      layout: how params are divided.

    Raises:
      ValueError: the loss needs a batch, which is None.
    """
    record = _Record()
    types = dict.fromkeys(layout.mesh.axis_names, AxisType.Auto)
    mesh = layout.mesh.abstract_mesh.update_axis_types(types)
    # Sharding constraints in the loss need a mesh. JAX lets no mesh replace one of another size,
    # but an empty one.
    with use_abstract_mesh(AbstractMesh((), ())), use_abstract_mesh(mesh):
        program = _trace_loss(loss_fn, params, arguments)
        has_scan = has_scan_over_arrays(program.equations)
        if has_scan:
            _run_dry(loss_fn, params, arguments, layout, record)
    uses = _find_first_uses(program, tree.array_paths(params))
    found = {}
    for entry in jax.tree.leaves(layout.describe(params)):
        path = entry.path
        if layout.divisions(entry.spec):
            # Without a scan the step gathers all leaves before the loss.
            whole = record.whole.get(path) if has_scan else ""
            # A function of JAX that is jitted, such as jnp.take, has no lines of the loss inside.
            line = uses.get(path, "no line reads it") if whole == "" else whole
            found[path] = LeafGathers(len(record.scans.get(path, ())), line)
    return found


def _run_dry(
    loss_fn: Callable[..., Any],
    params: Params,
    arguments: Sequence[PyTree],
    layout: Layout,
    record: _Record,
) -> None:
    """Record what the loss gathers, by a run on shapes with whole leaves in place of shards."""

    def wrap(entry: ParamEntry, x: Leaf) -> Leaf:
        shard = LeafShard.of(x, entry, layout, jnp.zeros((), jnp.int32))
        if shard is None:
            return x
        fields = {f.name: getattr(shard, f.name) for f in dataclasses.fields(LeafShard)}
        return ShardedParam(_DryShard(**fields, path=entry.path, record=record))

    def run(params: Params, *arguments: PyTree) -> Any:
        wrapped = jax.tree.map(wrap, layout.describe(params), params)
        return LossProgram(lambda params: loss_fn(params, *arguments), wrapped).value()

    jax.eval_shape(run, *jax.eval_shape(lambda *trees: trees, params, *arguments))


def _trace_loss(
    loss_fn: Callable[..., Any], params: Params, arguments: Sequence[PyTree]
) -> Equations:
    """Trace the loss; if that fails without a batch, raise an error that asks for one."""
    try:
        shapes = jax.eval_shape(lambda *trees: trees, params, *arguments)
        return Equations(loss_fn, *shapes, inline=False)
    except Exception as error:  # of any kind, from the user's loss
        if arguments[-1] is not None:
            raise
        raise ValueError(
            "plan_memory: loss_fn needs batch, arrays or their shapes as loss_fn takes them; "
            f"without it tracing loss_fn fails: {type(error).__name__}: {error}"
        ) from error


def _find_first_uses(program: Equations, paths: Sequence[str]) -> dict[str, str]:
    """Return the line of the first equation that reads each input, or else the name of its
    primitive, by path."""
    uses = {}
    for path, variable in zip(paths, program.inputs, strict=False):
        first = next((e for e in program.equations if variable in e.invars), None)
        if first is not None:
            uses[path] = _find_line(first.source_info) or name_of(first)
    return uses


def _find_line(info: source_info_util.SourceInfo) -> str:
    """Return the innermost line outside of libraries, or else of a library; "" without a line."""
    lines = source_info_util.summarize(info, num_frames=1000).splitlines()[::-1]
    own = str(Path(__file__).parents[1])
    lines = [line for line in lines if not line.startswith(own)]
    outside = [line for line in lines if not _LIBRARY.search(line)]
    return next(iter(outside + lines), "")
