"""Momentum correction: the velocity and the residual of a compressed leaf on one worker.

A plain residual of gradients would apply momentum only when an entry is sent, which may be hundreds
of steps late. So each worker keeps a velocity, and its residual adds up velocities.
"""

import dataclasses

import jax

from optfn.compression.compressors import LeafInExchange
from optfn.core import numerics
from optfn.core.checks import Number
from optfn.transforms.moment import momentum_rule


@dataclasses.dataclass(frozen=True)
class MomentumCorrection:
    """The arguments of `deep_gradient_compression` that say how momentum enters the residual.

    In each leaf `state` is the velocity u and `residual` is v, both flat float32.

    momentum: μ.
    nesterov: whether to use Nesterov momentum.
    masking: whether u becomes 0 where entries of v are sent.
    """

    momentum: Number
    nesterov: bool
    masking: bool

    def accumulate(self, leaf: LeafInExchange) -> LeafInExchange:
        """Return the leaf with u = μu + g and v = v + u, or, if `nesterov` is True, with u = μ(u +
        g) and v = v + u + g."""
        g, u = leaf.direction, leaf.state
        mu = numerics.scalar(self.momentum, g)
        if self.nesterov:
            u = mu * (u + g)
            return leaf._replace(state=u, residual=leaf.residual + u + g)
        u = mu * u + g
        return leaf._replace(state=u, residual=leaf.residual + u)

    def average(self, mean: jax.Array, velocity: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Return the direction and velocity of plain momentum, or Nesterov's with `nesterov`, on a
        gradient that is already the mean over workers."""
        return momentum_rule(mean, velocity, momentum=self.momentum, nesterov=self.nesterov)

    def clear_sent(
        self, leaf: LeafInExchange, places: jax.Array, remainder: jax.Array
    ) -> LeafInExchange:
        """Return the leaf with v set to `remainder` at the entries sent, and with u set to 0 there
        if `masking`, else unchanged.

        Args:
          leaf: the accumulated leaf.
          places: the indices of the entries, increasing.
          remainder: the part of each entry that its packet lacks.
        """

        def set_entries(x: jax.Array, values: jax.Array | float) -> jax.Array:
            # `search` returns rising indices without repeats; told so, XLA needs no sort.
            return x.at[places].set(values, indices_are_sorted=True, unique_indices=True)

        velocity = set_entries(leaf.state, 0.0) if self.masking else leaf.state
        return leaf._replace(state=velocity, residual=set_entries(leaf.residual, remainder))
