"""How accumulated updates are sent: densely, as packets to all workers, or slice by slice."""

import dataclasses
from collections.abc import Sequence
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

from optfn.compression.compressors import BaseCompressor, LeafInExchange
from optfn.compression.feedback import add_feedback
from optfn.compression.gathering import mean_by_all_gather
from optfn.compression.slicewise import slicewise_mean
from optfn.core import tree
from optfn.core.checks import Number
from optfn.core.types import Leaf, LeafKind
from optfn.mesh.collectives.axes import Axes, mark_varying, vma_axes
from optfn.mesh.collectives.means import pmean_leaves
from optfn.mesh.compilers.groups import map_groups
from optfn.transforms.in_place import run_if


@dataclasses.dataclass(frozen=True)
class Sending:
    """The arguments of `exchange` that say how a worker sends its updates."""

    axis_name: Axes
    error_feedback: Number
    warmup_steps: int
    route: str

    def send(
        self,
        compressors: Sequence[BaseCompressor],
        skip: jax.Array,
        step: jax.Array,
        updates: list[jax.Array],
        leaves: list[LeafInExchange],
    ) -> list[LeafInExchange]:
        """Accumulate the updates and return leaves with the mean of all packets, or before
        `warmup_steps` the dense mean, or if `skip` zeros, the last two with old residuals.

        In the last two cases states do not change either. The branch is the same on all workers, so
        it may contain collectives. All arrays are updated in place, since residuals have the size
        of the model.
        """
        axes = self.axis_name
        sends = ~skip & (step >= self.warmup_steps)
        checked = vma_axes(axes)

        def accumulate(g: jax.Array, leaf: LeafInExchange) -> LeafInExchange:
            """Add g to the residual where packets are sent. Elsewhere the residual keeps its
            values."""
            total = add_feedback(g, mark_varying(leaf.residual, checked), self.error_feedback)
            published = None if leaf.published is None else mark_varying(leaf.published, checked)
            # In the warm-up the mean is dense and exact, so nothing is left over.
            residual = jnp.where(sends, total, leaf.residual)
            return leaf._replace(residual=residual, published=published)

        leaves = list(map(accumulate, updates, leaves))
        if self.warmup_steps:
            # The branch without a collective costs nothing after the warm-up. It is the branch of
            # a condition that holds, which `plan_memory` counts.
            means = lax.cond(
                skip | (step >= self.warmup_steps),
                lambda g, zeros: zeros,
                lambda g, zeros: [lax.pmean(x, axes) for x in g],
                updates,
                [leaf.direction for leaf in leaves],
            )
            leaves = list(map(lambda leaf, mean: leaf._replace(direction=mean), leaves, means))
        (sent,) = run_if(sends, [partial(self._send_accumulated, compressors)], (leaves,))
        return sent

    def _send_accumulated(
        self, compressors: Sequence[BaseCompressor], leaves: list[LeafInExchange]
    ) -> tuple[list[LeafInExchange]]:
        """Return the leaves with means over workers and new residuals, sent slice by slice through
        their owners for the route "parts", else by all-reduces and one all-gather of packets.

        The residuals that are given have the updates in them. For the route "gather", compressors
        that are reduced make the all-reduces.
        """
        if self.route == "parts":
            return (slicewise_mean(compressors, leaves, self.axis_name, self.error_feedback),)

        def together(numbers: list[int]) -> list[LeafInExchange]:
            """Exchange leaves of one kind: by their all-reduces,
            or all gathered ones in one all-gather."""
            first, members = compressors[numbers[0]], [leaves[i] for i in numbers]
            if first.is_reduced:
                return first.reduced(members, self.axis_name)
            return mean_by_all_gather([compressors[i] for i in numbers], members, self.axis_name)

        def kind(i: int) -> object:
            """Return the method that reduces leaf i, which is the key of its group. For gathered
            leaves return False."""
            return compressors[i].is_reduced and compressors[i].reduced

        # Matrices of all ranks share their all-reduces, and all gathered packets one all-gather.
        return (map_groups(together, range(len(leaves)), kind),)


def exchange_densely(
    leaves: list[Leaf], compressed: list[int], skip: jax.Array, axis_name: Axes
) -> list[Leaf]:
    """Return the leaves averaged over workers, row-sparse ones as rows, with means of 0 if
    `skip`, while compressed and masked leaves are returned unchanged.

    All dense arrays are averaged at once.
    """

    def finite(x: jax.Array) -> jax.Array:
        return jnp.where(skip, 0.0, x)

    new = list(leaves)
    dense = [i for i, x in enumerate(leaves) if i not in compressed and not tree.is_leaf(x)]
    for i, mean in zip(dense, pmean_leaves([leaves[i] for i in dense], axis_name), strict=True):
        new[i] = finite(mean)
    return [x.mean_over(axis_name).map(finite) if isinstance(x, LeafKind) else x for x in new]
