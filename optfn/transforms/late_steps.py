"""Counts of steps for leaves whose moments begin later than the state that they are in.

A frozen parameter has no moments. If a run continues and trains it, its moments begin at zero in a
state that has counted many steps. With that count there would be hardly any bias correction, and
the first steps of Adam would be too large, up to (1 − β₁)/√(1 − β₂) and more. So the state
remembers the step when the moments of such a leaf began, and its steps are counted from there.
`load_state_dict` makes these counts; a state whose leaves all began together has none.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import jax

from optfn import core
from optfn.core import leafwise
from optfn.core.checks import Scalar
from optfn.core.traits import traits, traits_of
from optfn.core.types import OptState, PyTree, Updates
from optfn.leaves import tensors


@traits(words=("step", "begun"))
class LateStepsState(NamedTuple):
    """The step count of a state with leaves that began late: int32, and 4 bytes for each such leaf.

    begun: the count when the moments of a leaf began, by its path.
    """

    step: jax.Array
    begun: dict[str, jax.Array]


# The count of steps of a state.
Steps: TypeAlias = jax.Array | LateStepsState


def global_count(step: Steps) -> jax.Array:
    """Return the count of steps that the state has made, which in a LateStepsState is the count of
    its oldest leaves."""
    return step.step if isinstance(step, LateStepsState) else step


def advance_by_leaf(
    of_step: Callable[[jax.Array], dict[str, Scalar]], step: Steps, like: Updates
) -> tuple[Steps, dict[str, Any]]:
    """Return the count one step later, and the values of `of_step` for it by name, as scalars or,
    if some leaves began late, as PerLeafs by the count of each leaf.

    A LateStepsState keeps the first steps of its leaves.

    Args:
      of_step: from the number of steps, int32, to scalars by name.
      step: the count of a state.
      like: a tree with the paths of the leaves.
    """
    if not isinstance(step, LateStepsState):
        step = core.next_step(step)
        return step, of_step(step)
    step = step._replace(step=core.next_step(step.step))
    # Most leaves share the state's count: the numbers are computed once for them.
    usual = of_step(step.step)
    own = {path: of_step(step.step - begun) for path, begun in step.begun.items()}

    def number(name: str) -> leafwise.PerLeaf:
        return tensors.scalars_of_leaves(lambda path: own.get(path, usual)[name], like)

    return step, {name: number(name) for name in usual}


def copy_counts(state: PyTree, counted: OptState) -> PyTree:
    """Return `state` with its count made a LateStepsState, whose late leaves begin at its step,
    wherever `counted` has one, and unchanged elsewhere.

    Args:
      state: a tree of the structure that `tx.init` gives.
      counted: a later state of the same optimizer.
    """
    # Both states have the same states that count, in the same order.
    nodes = filter(has_leaf_counts, jax.tree.leaves(counted, is_leaf=has_leaf_counts))
    steps = (node.step for node in nodes)

    def convert(node: PyTree) -> PyTree:
        if not has_leaf_counts(node):
            return node
        late = next(steps)
        if not isinstance(late, LateStepsState):
            return node
        return node._replace(step=LateStepsState(node.step, dict.fromkeys(late.begun, node.step)))

    return jax.tree.map(convert, state, is_leaf=has_leaf_counts)


def has_leaf_counts(x: object) -> bool:
    """Tell whether `x` is the state of a transform that counts the steps of its leaves."""
    return bool(traits_of(x).counted)
