"""The loss of a plan, and the leaves that it gathers whole. The loss is the user's, or one that
reads each leaf once."""

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend import source_info_util
from jax.sharding import AbstractMesh, AxisType, use_abstract_mesh

from optfn.core import tree
from optfn.core.types import Batch, Leaf, Params, PyTree
from optfn.loss.jaxprs import primitives, sharded
from optfn.loss.jaxprs.equations import Equations
from optfn.loss.mean import is_mean
from optfn.loss.scans import RecordedGather, scan_layers
from optfn.mesh.layout.mesh_layout import Layout

# The folders of installed packages.
_LIBRARY = re.compile(r"[\\/](site|dist)-packages[\\/]")


class PlannedLoss(NamedTuple):
    """A loss to trace a step with.

    fn: the loss function, with the arguments that a step passes.
    batch: the shapes of the batch of all devices.
    has_aux: whether the loss returns auxiliary data.
    program: the equations of the user's loss for the examples of one microbatch; None without one.
    """

    fn: Callable[..., Any]
    batch: Batch
    has_aux: bool = False
    program: Equations | None = None


def plan_users_loss(
    loss_fn: Callable[..., Any], params: Params, model_state: PyTree, batch: Batch,
    layout: Layout, parts: int,
) -> PlannedLoss:  # fmt: skip
    """Trace the user's loss, and return it with a batch that can be divided, or raise a ValueError
    if it needs a batch and has none.

    Args:
      loss_fn: the loss of the user.
      params: the shapes of params.
      model_state: the shapes of the model state, or None.
      batch: the batch of all devices, arrays or shapes; None if the loss takes none.
      layout: how params are divided.
      parts: into how many microbatches of a device the batch is divided.

    Raises:
      ValueError: the loss needs a batch, which is None.
    """
    part = jax.tree.map(partial(_change_size, lambda n: -(-n // parts)), batch)
    arguments = [part] if model_state is None else [model_state, part]
    program = _trace_loss(loss_fn, params, arguments, layout)
    rest = program.shapes if model_state is None else program.shapes[1]
    is_pair = isinstance(rest, tuple) and len(rest) == 2 and not is_mean(rest)
    # The model state may be a pair itself.
    has_aux = is_pair and (model_state is None or tree.paths(rest) != tree.paths(model_state))
    if batch is None:
        examples = jax.ShapeDtypeStruct((parts,), jnp.float32)
        return PlannedLoss(lambda *given: loss_fn(*given[:-1], None), examples, has_aux, program)
    whole = jax.tree.map(partial(_change_size, lambda n: n * parts), part)
    return PlannedLoss(loss_fn, whole, has_aux, program)


def plan_any_loss(
    layout: Layout, params: Params, ids: Mapping[str, int], tables: Collection[str], parts: int
) -> PlannedLoss:
    """Return a loss that reads each leaf once: stacked leaves in a scan, and rows of tables.

    Args:
      layout: how params are divided; it tells which leaves are stacked.
      params: the shapes of params.
      ids: how many ids a device looks up for a microbatch, by the path of the table.
      tables: the paths of all tables; a table without ids is not read.
      parts: into how many microbatches of a device the batch is divided.
    """
    stacked = {entry.path for entry in jax.tree.leaves(layout.describe(params)) if entry.stacked}
    batch = {path: jax.ShapeDtypeStruct((n * parts,), jnp.int32) for path, n in ids.items()}
    batch[""] = jax.ShapeDtypeStruct((parts,), jnp.float32)

    def loss_fn(params: Params, batch: Mapping[str, jax.Array]) -> jax.Array:
        total = jnp.mean(batch[""])
        for path, x in tree.arrays_with_paths(params):
            if path in ids:
                total += _read_array(x[batch[path]])
            elif path in tables:
                continue
            elif path in stacked:
                total = scan_layers(lambda layer, total: total + _read_array(layer), x, total)
            elif tree.is_inexact(x):
                total += _read_array(x)
        return total

    return PlannedLoss(loss_fn, batch)


def _read_array(x: jax.Array) -> jax.Array:
    """Return Σ x², whose gradient reads x again, as most gradients do."""
    return jnp.sum(jnp.real(x * jnp.conj(x))).astype(jnp.float32)


def _change_size(size: Callable[[int], int], x: Leaf) -> jax.ShapeDtypeStruct:
    """Return the shape and dtype of an array with size(n) examples in the place of n, or of a
    scalar."""
    shape = jnp.shape(x)
    first = [size(shape[0])] if shape else []
    return jax.ShapeDtypeStruct((*first, *shape[1:]), jnp.result_type(x))


def _trace_loss(
    loss_fn: Callable[..., Any], params: Params, arguments: Sequence[PyTree], layout: Layout
) -> Equations:
    """Trace the loss and return its equations, or raise a ValueError that asks for a batch if that
    fails without one."""
    types = dict.fromkeys(layout.mesh.axis_names, AxisType.Auto)
    mesh = layout.mesh.abstract_mesh.update_axis_types(types)
    try:
        shapes = jax.eval_shape(lambda *trees: trees, params, *arguments)
        # Sharding constraints in the loss need a mesh. JAX lets no mesh replace one of another
        # size, but an empty one.
        with use_abstract_mesh(AbstractMesh((), ())), use_abstract_mesh(mesh):
            return Equations(loss_fn, *shapes, inline=False)
    except Exception as error:  # of any kind, from the user's loss
        if arguments[-1] is not None:
            raise
        raise ValueError(
            "plan_memory: loss_fn needs batch, arrays or their shapes as loss_fn takes them; "
            f"without it tracing loss_fn fails: {type(error).__name__}: {error}"
        ) from error


def find_whole_gathers(
    program: Equations, paths: Sequence[str], divided: Sequence[str], gathers: list[RecordedGather]
) -> dict[str, str]:
    """For each divided leaf that is gathered whole, return by its path the line that reads it.

    Leaves that only scans take are gathered layer by layer, and are left out.

    Args:
      program: the equations of the loss.
      paths: the paths of all leaves of params.
      divided: the paths of the leaves that devices divide.
      gathers: the gathers of the traced step.
    """
    uses = _find_first_uses(program, paths)
    has_scan = sharded.has_scan_over_arrays(program.equations)
    lines = {}
    for x in reversed(gathers):
        if x.layer_bytes is None and x.path in divided:
            # Without a scan the step gathers all leaves before the loss.
            line = _find_line(x.source) if has_scan else ""
            # A function of JAX that is jitted, such as jnp.take, has no lines of the loss inside.
            lines[x.path] = line or uses.get(x.path, "no line reads it")
    return {path: lines[path] for path in divided if path in lines}


def _find_first_uses(program: Equations, paths: Sequence[str]) -> dict[str, str]:
    """Return the line of the first equation that reads each input, or else the name of its
    primitive, by path."""
    uses = {}
    for path, variable in zip(paths, program.inputs, strict=False):
        first = next((e for e in program.equations if variable in e.invars), None)
        if first is not None:
            uses[path] = _find_line(first.source_info) or primitives.name_of(first)
    return uses


def _find_line(info: source_info_util.SourceInfo) -> str:
    """Return the innermost line outside of libraries, or else of a library, or "" without a
    line."""
    lines = source_info_util.summarize(info, num_frames=1000).splitlines()[::-1]
    own = str(Path(__file__).parents[1])
    lines = [line for line in lines if not line.startswith(own)]
    outside = [line for line in lines if not _LIBRARY.search(line)]
    return next(iter(outside + lines), "")
