"""The option `whole=` of sharding: a leaf is divided by layers, each matrix is on one device."""

import jax.numpy as jnp

from optfn.core import tree
from optfn.core.types import Params
from optfn.leaves import contents, patterns
from optfn.leaves.patterns import Pattern


def find_layer_axes(
    whole: Pattern | None, tables: Pattern | None, params: Params, count: int
) -> dict[str, int]:
    """Map the path of each leaf that `whole` selects to its axis of layers with the least padding,
    or raise a ValueError for a table or a leaf of no stacked matrices.

    The choice is the first axis of layers that `count` divides, or else the axis that needs the
    least padding. Masked leaves and integers are left out.

    Args:
      whole: the pattern of the leaves.
      tables: the pattern of the leaves whose rows are divided.
      params: arrays or their shapes.
      count: the number of devices that divide a leaf.

    Raises:
      ValueError: the pattern selects a leaf that is not stacked, does not consist of matrices, or
        is a table.
    """
    chosen = patterns.match_names(whole, params, "whole")
    rows = patterns.match_names(tables, params, "tables")
    stacked_axes, found = contents.count_stacked_axes(params), {}
    for place, x in tree.items(params):
        path = str(place)
        if path not in chosen or tree.is_masked(x) or not tree.is_inexact(x):
            continue
        shape, stacked = jnp.shape(x), stacked_axes[place.number]
        if problem := _find_layer_problem(shape, stacked, path in rows):
            raise ValueError(
                f"whole: the pattern selects leaf {path!r} of shape {shape}, {problem}"
            )
        # The factor by how much padding lengthens the axis; the first axis of equal ones.
        found[path] = min(
            range(stacked), key=lambda d: -(-shape[d] // count) * count / max(1, shape[d])
        )
    return found


def _find_layer_problem(shape: tuple[int, ...], stacked: int, is_table: bool) -> str:
    """Return why a leaf cannot be divided by layers, because it is a table, is not stacked, or has
    no matrices, or "" if it can."""
    if is_table:
        return "a table, whose rows are divided"
    if not stacked:
        return (
            "which is not stacked. Put layers of equal shape into an optfn.Stacked, whose leaves "
            "have a leading axis of layers, or say so by ParamAttr(stacked=1)"
        )
    if len(shape) - stacked < 2:
        return (
            f"which has {len(shape) - stacked} axes besides the {stacked} stacked ones; a matrix "
            "has two. Make a pattern that selects only matrices"
        )
    return ""
