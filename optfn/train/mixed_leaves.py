"""Rules that a buffer of several leaves would change, found before the first step.

A transformation of another library, or a rule that a user writes, sees a buffer as one flat array.
Where it takes a norm, a mean or a product of an array, it would take that of all leaves together,
and where a mask or a label looks at the axes of an array, or at its path, it would find others:
another model would be trained.
optfn's own transformations look up where each leaf begins, and are not traced.
"""

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import optax

from optfn import core
from optfn.core import checks, tree
from optfn.core.types import Params, Updates
from optfn.interop.calls import show_transform
from optfn.jaxprs.mixtures import Mixture, find_mixtures
from optfn.leaves.packed import make_packed_layout, pack

_REMEDY = (
    "Leave packed=True out, or use transformations of optfn, which know the leaves of a buffer, "
    "such as optfn.lamb, optfn.lars, optfn.muon and optfn.clip_by_norm, with exclude= or "
    "param_attrs= in the place of masks and labels"
)


def refuse_mixed_leaves(argument: str, tx: optax.GradientTransformation, params: Params) -> None:
    """Raise if packing `params` would change the rule of `tx`; say nothing if it cannot be traced.

    Two steps are traced and nothing runs. Of leaves of one shape two are enough: they stand for all
    in every sum over the leaves.

    Args:
      argument: the name of `tx` in the message, "tx" or "outer".
      tx: the optimizer.
      params: the tree before it is packed.

    Raises:
      ValueError: the update of a leaf needs a mix of the elements of some leaves of its buffer, but
        not of all, or of the rows or columns of one. The message has the leaf and the line that
        mixes. Or a mask or a label gives the buffer another rule than a leaf.
    """
    if _is_own(tx):
        return
    try:
        problem = _describe_change(tx, params)
    except Exception:  # it needs values, the axes of a mesh, or arguments that only a step has
        return
    if problem:
        raise ValueError(
            f"{argument}={show_transform(tx)} cannot be combined with packed=True: {problem}. "
            f"{_REMEDY}"
        )


def _describe_change(tx: optax.GradientTransformation, params: Params) -> str:
    """Return what packing `params` would change about `tx`, with the leaf; "" if nothing."""
    layout, leaves = make_packed_layout(params), tree.leaves(params)
    buffers = [[i for run in buffer.runs for i in run.leaves[:2]] for buffer in layout.buffers]
    chosen = sorted(itertools.chain(*buffers))
    shapes = dict.fromkeys(range(len(leaves)), optax.MaskedNode())
    shapes |= {i: jax.ShapeDtypeStruct(leaves[i].shape, leaves[i].dtype) for i in chosen}
    like = layout.structure.unflatten(shapes.values())
    flat = jax.eval_shape(pack, like)

    numbers = _find_numbers(tx, like)
    numbers = {name: x for name, x in numbers.items() if name in _find_numbers(tx, flat)}
    mixtures = dict(zip(chosen, _find_mixtures(tx, like, chosen, numbers), strict=True))
    packed = _find_mixtures(tx, flat, [*range(len(buffers))], numbers)
    for buffer, of_buffer in zip(buffers, packed, strict=True):
        for i in buffer:
            if line := mixtures[i].find_partial(buffer):
                return (
                    f"the update of leaf {layout.paths[i]!r} needs a mix of its elements (a norm, "
                    f"a mean, a product) at {line}, which would mix a whole buffer of leaves"
                )
        for i in buffer:
            # A number of optfn's own, such as the zero for a frozen leaf, has no sign of the rule.
            if leaves[i].ndim and not mixtures[i].has_rule_in(of_buffer):
                return (
                    f"the rule of leaf {layout.paths[i]!r} is not the rule of a flat buffer of "
                    "leaves, as with a mask or a label that looks at the axes, the size or the "
                    "path of a leaf"
                )
    return ""


def _is_own(tx: object) -> bool:
    """Tell whether `tx` and all transformations inside it are optfn's."""
    if not isinstance(tx, core.Transform) or checks.package(tx.module) != "optfn":
        return False
    _, positional, named = tx.call
    # optax.MultiSteps is not a transformation, but has both functions.
    inside = (
        x for x in (*positional, *named.values()) if hasattr(x, "init") and hasattr(x, "update")
    )
    return all(map(_is_own, inside))


def _find_numbers(tx: optax.GradientTransformation, params: Params) -> dict[str, Any]:
    """Return the shapes of the numbers in the state of `tx`, such as rates and counts, by path."""
    return {
        jax.tree_util.keystr(path): jax.ShapeDtypeStruct((), x.dtype)
        for path, x in jax.tree_util.tree_leaves_with_path(jax.eval_shape(tx.init, params))
        if x.shape == () and not tree.is_key(x)
    }


def _find_mixtures(
    tx: optax.GradientTransformation,
    params: Params,
    leaves: list[int],
    numbers: dict[str, Any],
) -> list[Mixture]:
    """Return the mixture of each update of the second step.

    A rule may mix what the first step has left in its state, as optax.sm3 does.

    Args:
      tx: the optimizer.
      params: the shapes of its params.
      leaves: the number of each of them.
      numbers: the shapes of numbers of its state, by path.
    """
    tx = optax.with_extra_args_support(tx)

    def take_two_steps(params: Params, grads: Updates, numbers: dict[str, jax.Array]) -> Updates:
        def read(path: Any, x: Any) -> Any:
            given = numbers.get(jax.tree_util.keystr(path))
            return x if given is None else jnp.maximum(x, given)  # depends on both

        loss = jnp.zeros(())
        extra = {"value": loss, "grad": grads, "value_fn": lambda params: loss}
        state = jax.tree_util.tree_map_with_path(read, tx.init(params))
        _, state = tx.update(grads, state, params, **extra)
        updates, _ = tx.update(grads, state, params, **extra)
        return updates

    sources: list[int | str] = [*leaves, *leaves, *sorted(numbers)]
    found = find_mixtures(take_two_steps, (params, params, numbers), sources)
    return jax.tree.leaves(found, is_leaf=_is_mixture)


def _is_mixture(x: object) -> bool:
    """Tell whether `x` is a Mixture."""
    return isinstance(x, Mixture)
