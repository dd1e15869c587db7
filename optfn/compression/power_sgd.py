"""The compressor that sends the product of two thin matrices: PowerSGD."""

import dataclasses
import math
from collections.abc import Sequence
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

from optfn import mesh
from optfn.compression.compressors import LeafInExchange, ShownAsCall, showing_call
from optfn.core import checks
from optfn.core.types import PyTree
from optfn.mesh import Axes

# With the default precision of accelerators, the product that is sent would differ from the one
# that is subtracted from the residual.
_matmul = partial(jnp.matmul, precision=lax.Precision.HIGHEST)


def orthonormal(p: jax.Array) -> jax.Array:
    """Return matrices with orthonormal columns whose span contains the columns of p."""
    q: jax.Array = jnp.linalg.qr(p)[0]
    return q


@dataclasses.dataclass(frozen=True, repr=False)
class PowerSgd(ShownAsCall):
    """See `power_sgd`."""

    rank: int

    is_reduced = True

    @staticmethod
    def reduced(leaves: Sequence[LeafInExchange], axis_name: Axes) -> list[LeafInExchange]:
        """Return leaves with the mean over workers of P̂Q_w; two all-reduces serve all leaves."""
        matrices = [leaf.accumulated for leaf in leaves]
        products = [_matmul(leaf.accumulated, leaf.state.mT) for leaf in leaves]
        bases = list(map(orthonormal, mesh.mean_in_one(products, axis_name)))
        local = list(map(lambda p, m: _matmul(p.mT, m), bases, matrices))

        def sent(m: jax.Array, p: jax.Array, local: jax.Array, q: jax.Array) -> LeafInExchange:
            return LeafInExchange(_matmul(p, q), (m - _matmul(p, local)).reshape(-1), q)

        return list(map(sent, matrices, bases, local, mesh.mean_in_one(local, axis_name)))

    def accepts(self, shape: tuple[int, ...]) -> bool:
        """Tell whether a leaf has two axes or more, none of them empty."""
        return len(shape) >= 2 and 0 not in shape

    def _sizes(self, shape: tuple[int, ...]) -> tuple[int, int, int]:
        """Return the two sizes of each matrix, and its rank in a packet."""
        m, n = shape[-2:]
        return m, n, min(self.rank, m, n)

    def init(self, shape: tuple[int, ...]) -> PyTree:
        """Return the first Q̄, the same random numbers for each matrix; () for a dense leaf."""
        if not self.accepts(shape):
            return ()
        _, n, rank = self._sizes(shape)
        q = jax.random.normal(jax.random.key(0), (n, rank), jnp.float32).T
        return jnp.broadcast_to(q, (*shape[:-2], rank, n))

    def encode(self, x: jax.Array, state: PyTree) -> tuple[PyTree, PyTree]:
        """For one worker: the packet (P̂, Q); Q is the next shared factor."""
        if not self.accepts(x.shape):
            return x, state
        p = orthonormal(_matmul(x, state.mT))
        q = _matmul(p.mT, x)
        return (p, q), q

    def decode(self, packet: PyTree, shape: tuple[int, ...]) -> jax.Array:
        """Return P̂Q in the shape of the leaf."""
        return _matmul(*packet) if self.accepts(shape) else packet

    def num_bytes(self, shape: tuple[int, ...]) -> int:
        """Return the bytes that one worker passes to the two all-reduces."""
        if not self.accepts(shape):
            return 4 * math.prod(shape)
        m, n, rank = self._sizes(shape)
        return 4 * math.prod(shape[:-2]) * rank * (m + n)


@showing_call
def power_sgd(rank: int) -> PowerSgd:
    """Return a compressor for `exchange` that sends a matrix as the product of two thin ones.

        P̂ = orthonormal columns of (mean over workers of M_w·Q̄ᵀ)
        Q_w = P̂ᵀ·M_w;  worker w sends P̂·Q_w
        Q̄ = mean over workers of Q_w;  direction = P̂·Q̄

    This is a step of the power method on the mean matrix, which begins with Q̄ of the previous
    step. Two all-reduces of thin matrices serve all leaves, so the bytes that a worker sends hardly
    depend on the number of workers.

    Args:
      rank: the number of columns of P̂ and of rows of Q̄, ≥ 1. If a dimension of the matrix is
        smaller, that counts instead.

    All axes before the last two count matrices, each with its factors: the layers of a
    `Stacked`, and the places of a kernel (h, w, in, out). Of a kernel (out, in, h, w) the matrices
    are those of (h, w), whose factors are larger than the kernel; exchange it densely. A leaf with
    fewer than two axes is exchanged densely.

    Bytes of an (m, n) matrix: 4·r·(m + n), r = min(rank, m, n), through an all-reduce; of a leaf
    (…, m, n), so many for each matrix. That is less than the matrix itself if r < m·n/(m + n).
    State: Q̄, float32 (…, r, n), the same on all workers; the first one is random, from a fixed
    key, and equal for all matrices of a leaf.

    Source: Vogels et al. 2019, arXiv 1905.13727, algorithms 1 and 2.

    >>> power_sgd(4).num_bytes((512, 256))
    12288
    >>> power_sgd(4).num_bytes((24, 512, 256))  # 24 stacked layers
    294912
    """
    return PowerSgd(checks.count("rank", rank))
