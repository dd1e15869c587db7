"""Rules that a buffer of several leaves would change, found before the first step.

A transformation of another library, or a rule that a user writes, sees a buffer as one flat array.
Where it takes a norm, a mean or a product of an array, it would take that of all leaves together,
and where a mask looks at the axes of an array, it would find one: another model would be trained.
optfn's own transformations look up where each leaf begins, and are not traced.
"""

import itertools
from collections.abc import Callable
from typing import TypeAlias

import jax
import jax.numpy as jnp
import optax

from optfn import core
from optfn.core import checks, tree
from optfn.core.types import Params, Updates
from optfn.interop.calls import show_transform
from optfn.jaxprs.dependence import find_dependent_leaves
from optfn.jaxprs.mixtures import Mixture, find_mixtures
from optfn.leaves.packed import make_packed_layout, pack

Steps: TypeAlias = Callable[[Params, Updates], Updates]

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
        mixes. Or a mask takes the parameter away from a rule that would read it in the tree.
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
    like, steps = layout.structure.unflatten(shapes.values()), _take_two_steps(tx)

    found = find_mixtures(steps, (like, like), chosen * 2)
    mixtures = dict(zip(chosen, jax.tree.leaves(found, is_leaf=_is_mixture), strict=True))
    reads = dict(zip(chosen, _find_reading(steps, like), strict=True))
    packed_reads = _find_reading(steps, jax.eval_shape(pack, like))
    for buffer, is_read in zip(buffers, packed_reads, strict=True):
        for i in buffer:
            if line := mixtures[i].find_partial(buffer):
                return (
                    f"the update of leaf {layout.paths[i]!r} needs a mix of its elements (a norm, "
                    f"a mean, a product) at {line}, which would mix a whole buffer of leaves"
                )
        reading = [layout.paths[i] for i in buffer if reads[i]]
        if reading and not is_read:
            return (
                f"it reads the parameter {reading[0]!r}, but not a flat buffer of leaves, as "
                "with a mask that looks at the axes or the path of a leaf"
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


def _take_two_steps(tx: optax.GradientTransformation) -> Steps:
    """Return a function of params and gradients to the updates of the second step.

    A rule may mix what the first step has left in its state, as optax.sm3 does.
    """
    tx = optax.with_extra_args_support(tx)

    def steps(params: Params, grads: Updates) -> Updates:
        loss = jnp.zeros(())
        extra = {"value": loss, "grad": grads, "value_fn": lambda params: loss}
        _, state = tx.update(grads, tx.init(params), params, **extra)
        updates, _ = tx.update(grads, state, params, **extra)
        return updates

    return steps


def _find_reading(steps: Steps, params: Params) -> list[bool]:
    """Tell for each array of `params` whether its update depends on a parameter."""
    marks = [jax.tree.map(lambda x, mark=mark: mark, params) for mark in (True, False)]
    return jax.tree.leaves(find_dependent_leaves(steps, (params, params), marks))


def _is_mixture(x: object) -> bool:
    """Tell whether `x` is a Mixture."""
    return isinstance(x, Mixture)
