"""Checks of flax and equinox models as params: some of their arrays must not be trained.

Batch statistics, counters and flags would be trained as if they were weights. They are recognized
by the types of these libraries, which are not imported: whoever has such a model has loaded them.
"""

import sys
from collections.abc import Iterator, Mapping

import jax

from optfn.core import tree
from optfn.core.types import Params


def check_split(name: str, params: Params) -> None:
    """Raise a TypeError if params have arrays of a flax or equinox model that must not be trained.

    The error has the line that splits the model.

    Args:
      name: the function that takes the params.
      params: a tree, which may contain modules of these libraries.
    """
    _check_nnx(name, params)
    _check_linen(name, params)
    _check_equinox(name, params)


def _iterate_nodes(params: Params, kind: type) -> Iterator[tuple[str, object]]:
    """Yield (path, node) for the nodes of a type, and for the leaves outside of them."""
    for keys, x in jax.tree_util.tree_leaves_with_path(
        params, is_leaf=lambda x: isinstance(x, kind)
    ):
        yield jax.tree_util.keystr(keys, simple=True, separator="/"), x


def _check_nnx(name: str, params: Params) -> None:
    """Raise a TypeError for variables and modules of flax.nnx that are no nnx.Param, or do nothing
    if nnx is not loaded."""
    nnx = sys.modules.get("flax.nnx")
    if nnx is None:
        return
    untrained = []
    for path, x in _iterate_nodes(params, nnx.Variable):
        if isinstance(x, nnx.Variable | nnx.Module) and not isinstance(x, nnx.Param):
            untrained.append(f"{path!r} of type {type(x).__name__}")
    if untrained:
        raise TypeError(
            f"{name}: the only flax.nnx variables in params must be nnx.Param; got "
            f"{tree.list_words(untrained, 5)}. Split the model: graphdef, params, rest = "
            "nnx.split(model, nnx.Param, ...). Train params, pass rest as the model_state, and "
            "call nnx.merge(graphdef, params, rest) in the loss"
        )


def _check_linen(name: str, params: Params) -> None:
    """Raise a TypeError for the `variables` of linen: a mapping of collections, one of them
    "params" but not all."""
    if "flax.linen" not in sys.modules or not isinstance(params, Mapping):
        return
    # All values of linen's variables are mappings. A tree that a user makes seldom has only
    # mappings.
    untrained = [str(key) for key in params if key != "params"]
    if untrained and "params" in params and all(isinstance(x, Mapping) for x in params.values()):
        state = f'variables["{untrained[0]}"]' if len(untrained) == 1 else "the others"
        raise TypeError(
            f"{name}: params must be one collection of a flax.linen model; got all variables, with "
            f'{tree.list_words(untrained, 5)} beside "params". Train variables["params"], pass '
            f"{state} as the model_state, and put both together in the loss. (If this is a tree of "
            'your own, use another key than "params")'
        )


def _check_equinox(name: str, params: Params) -> None:
    """Raise a TypeError for leaves of equinox modules that are no floating-point arrays, or do
    nothing if equinox is not loaded."""
    eqx = sys.modules.get("equinox")
    if eqx is None:
        return
    untrained = []
    for path, node in _iterate_nodes(params, eqx.Module):
        if not isinstance(node, eqx.Module):
            continue
        for inner, x in tree.leaves_with_paths(node):
            if not (tree.is_masked(x) or (tree.is_array(x) and tree.is_inexact(x))):
                untrained.append(f"{tree.join(path, inner)!r} of type {type(x).__name__}")
    if untrained:
        raise TypeError(
            f"{name}: an equinox module in params must have only floating-point arrays; got "
            f"{tree.list_words(untrained, 5)}. Split the model: params, static = "
            "eqx.partition(model, eqx.is_inexact_array), and call eqx.combine(params, static) in "
            "the loss"
        )
