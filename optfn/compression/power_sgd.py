"""The compressor that sends the product of two thin matrices: PowerSGD."""

import dataclasses
import math
from collections.abc import Sequence
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

from optfn import checks, mesh
from optfn.compression.compressors import LeafInExchange, ShownAsCall, showing_call
from optfn.leaves.types import PyTree
from optfn.mesh import Axes

# With the default precision of accelerators, the product that is sent would differ from the one
# that is subtracted from the residual.
_matmul = partial(jnp.matmul, precision=lax.Precision.HIGHEST)


def as_matrix(x: jax.Array) -> jax.Array:
    """Return a leaf of two or more axes as a matrix; its rows are those of the first axis."""
    return x.reshape(x.shape[0], -1)


def orthonormal(p: jax.Array) -> jax.Array:
    """Return a matrix with orthonormal columns whose span contains the columns of p."""
    q: jax.Array = jnp.linalg.qr(p)[0]
    return q


@dataclasses.dataclass(frozen=True, repr=False)
class PowerSgd(ShownAsCall):
    """See `power_sgd`."""

    rank: int

    is_reduced = True

    @staticmethod
    def reduced(leaves: Sequence[LeafInExchange], axis_name: Axes) -> list[LeafInExchange]:
        """Return leaves with the mean over workers of P̂Q_wᵀ; two all-reduces serve all leaves."""
        matrices = [as_matrix(leaf.accumulated) for leaf in leaves]
        products = [_matmul(m, leaf.state) for m, leaf in zip(matrices, leaves, strict=True)]
        bases = [orthonormal(p) for p in mesh.mean_in_one(products, axis_name)]
        own = [_matmul(m.T, p) for m, p in zip(matrices, bases, strict=True)]
        shared = mesh.mean_in_one(own, axis_name)
        return [
            LeafInExchange(
                _matmul(p, q.T).reshape(leaf.direction.shape),
                (m - _matmul(p, own_q.T)).reshape(-1),
                q,
            )
            for leaf, m, p, own_q, q in zip(leaves, matrices, bases, own, shared, strict=True)
        ]

    def accepts(self, shape: tuple[int, ...]) -> bool:
        """Tell whether a leaf has two axes or more; others are exchanged densely."""
        return len(shape) >= 2

    def _sizes(self, shape: tuple[int, ...]) -> tuple[int, int, int]:
        """Return the two sizes of the matrix, and its rank in a packet."""
        m, n = shape[0], math.prod(shape[1:])
        return m, n, min(self.rank, m, n)

    def init(self, shape: tuple[int, ...]) -> PyTree:
        """Return the first Q̄, normal random numbers from a fixed key; () for a dense leaf."""
        if not self.accepts(shape):
            return ()
        _, n, rank = self._sizes(shape)
        return jax.random.normal(jax.random.key(0), (n, rank), jnp.float32)

    def encode(self, x: jax.Array, state: PyTree) -> tuple[PyTree, PyTree]:
        """Return the packet of a worker without others, (P̂, Q), and Q as the next Q̄."""
        if not self.accepts(x.shape):
            return x, state
        p = orthonormal(_matmul(as_matrix(x), state))
        q = _matmul(as_matrix(x).T, p)
        return (p, q), q

    def decode(self, packet: PyTree, shape: tuple[int, ...]) -> jax.Array:
        """Return P̂Qᵀ in the shape of the leaf."""
        if not self.accepts(shape):
            return packet
        p, q = packet
        return _matmul(p, q.T).reshape(shape)

    def num_bytes(self, shape: tuple[int, ...]) -> int:
        """Return the bytes that one worker passes to the two all-reduces."""
        if not self.accepts(shape):
            return 4 * math.prod(shape)
        m, n, rank = self._sizes(shape)
        return 4 * rank * (m + n)


@showing_call
def power_sgd(rank: int) -> PowerSgd:
    """Return a compressor for `exchange` that sends a matrix as the product of two thin ones.

        P̂ = orthonormal columns of (mean over workers of M_w·Q̄)
        Q_w = M_wᵀ·P̂;  worker w sends P̂·Q_wᵀ
        Q̄ = mean over workers of Q_w;  direction = P̂·Q̄ᵀ

    This is a step of the power method on the mean matrix, which begins with Q̄ of the previous
    step. Two all-reduces of thin matrices serve all leaves, so the bytes that a worker sends hardly
    depend on the number of workers.

    Args:
      rank: the number of columns of P̂ and Q̄, ≥ 1. If a dimension of the matrix is smaller, that
        counts instead.

    A leaf with more than two axes is treated as a matrix whose rows are those of its first axis. A
    leaf with fewer than two is exchanged densely.

    Bytes of an (m, n) leaf: 4·r·(m + n), r = min(rank, m, n), through an all-reduce. State: Q̄,
    float32 (n, r), the same on all workers; the first one is random, from a fixed key.

    Source: Vogels et al. 2019, arXiv 1905.13727, algorithms 1 and 2.

    >>> power_sgd(4).num_bytes((512, 256))
    12288
    """
    return PowerSgd(checks.count("rank", rank))
