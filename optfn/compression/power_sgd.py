"""The compressor that sends the product of two thin matrices: PowerSGD."""

import dataclasses
import math
from collections.abc import Sequence
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from optfn.compression.compressors import LeafInExchange, ShownAsCall, show_call
from optfn.core import checks
from optfn.core.types import PyTree
from optfn.mesh.collectives.axes import Axes, mark_varying
from optfn.mesh.collectives.means import pmean_leaves
from optfn.mesh.compilers.groups import varying_axes

# With the default precision of accelerators, the product that is sent would differ from the one
# that is subtracted from the residual.
_einsum = partial(jnp.einsum, precision=lax.Precision.HIGHEST)
# Of matrices M (…, m, n) and factors Pᵀ (…, r, m) and Q (…, r, n), whose long axes are the last.
_products = partial(_einsum, "...mn,...rn->...rm")  # (M·Qᵀ)ᵀ
_factor = partial(_einsum, "...rm,...mn->...rn")  # Pᵀ·M
_product = partial(_einsum, "...rm,...rn->...mn")  # P·Q
# A row lies in the span of the rows before it if it adds less than this fraction of its norm.
_DEPENDENT = 1e-5


def orthonormalize(p: jax.Array) -> jax.Array:
    """Return matrices (…, r, n) with orthonormal rows whose span contains the rows of p. Fixed
    numbers replace a row of p that depends on the rows above it.

    This is Gram and Schmidt's method, with repeated projections. Compilers for TPUs make far less
    of it than of `qr`. The fixed numbers see to it that no direction of the power method is lost
    for ever.
    """
    r, n = p.shape[-2:]
    largest = jnp.max(jnp.abs(p), axis=(-2, -1), keepdims=True)
    # Squares of float32 overflow above 1.8e19; relative to the largest entry none does.
    p = p / jnp.where(largest > 0, largest, 1.0)
    fixed = jnp.sin(np.float32(12.9898) * jnp.arange(1, n + 1, dtype=jnp.float32))

    def without(row: jax.Array, basis: jax.Array) -> jax.Array:
        along = jnp.sum(basis * row, axis=-1, keepdims=True)
        return row - jnp.sum(along * basis, axis=-2, keepdims=True)

    def norm(row: jax.Array) -> jax.Array:
        return jnp.sqrt(jnp.sum(row * row, axis=-1, keepdims=True))

    def add_row(i: jax.Array, basis: jax.Array) -> jax.Array:
        row = lax.dynamic_slice_in_dim(p, i, 1, -2)
        found = without(row, basis)
        is_new = norm(found) > np.float32(_DEPENDENT) * norm(row)
        found = jnp.where(is_new, found, jnp.roll(fixed, i))
        for _ in range(2):  # the first time for fixed numbers, the second against rounding errors
            found = without(found, basis)
        return lax.dynamic_update_slice_in_dim(basis, found / norm(found), i, -2)

    return lax.fori_loop(0, r, add_row, mark_varying(jnp.zeros_like(p), varying_axes(p)))


@dataclasses.dataclass(frozen=True, repr=False)
class PowerSgd(ShownAsCall):
    """See `power_sgd`."""

    rank: int

    is_reduced = True

    @staticmethod
    def reduced(leaves: Sequence[LeafInExchange], axis_name: Axes) -> list[LeafInExchange]:
        """Return leaves with direction P̂·Q̄, residual M − P̂·Q_w and state Q̄, by one all-reduce
        of all products for P̂ and one of all factors Q_w for their mean Q̄."""
        matrices = [leaf.residual for leaf in leaves]
        products = list(map(_products, matrices, [leaf.state for leaf in leaves]))
        bases = list(map(orthonormalize, pmean_leaves(products, axis_name)))
        local = list(map(_factor, bases, matrices))

        def rebuild(m: jax.Array, p: jax.Array, local: jax.Array, q: jax.Array) -> LeafInExchange:
            return LeafInExchange(_product(p, q), m - _product(p, local), q)

        return list(map(rebuild, matrices, bases, local, pmean_leaves(local, axis_name)))

    def accepts(self, shape: tuple[int, ...]) -> bool:
        """Tell whether leaves of this shape are compressed, which need two axes or more and no
        empty one, instead of exchanged densely."""
        return len(shape) >= 2 and 0 not in shape

    def _sizes(self, shape: tuple[int, ...]) -> tuple[int, int, int]:
        """Return (m, n, min(rank, m, n)) of the matrices of a leaf (…, m, n)."""
        m, n = shape[-2:]
        return m, n, min(self.rank, m, n)

    def init(self, shape: tuple[int, ...]) -> PyTree:
        """Return the first Q̄ (…, rank, n), the same fixed random numbers for each matrix and
        worker, or () for a leaf that is sent dense."""
        if not self.accepts(shape):
            return ()
        _, n, rank = self._sizes(shape)
        # Fixed, because all workers must begin with the same factor and none is sent at init.
        q = jax.random.normal(jax.random.key(0), (n, rank), jnp.float32).T
        return jnp.broadcast_to(q, (*shape[:-2], rank, n))

    def encode(self, x: jax.Array, state: PyTree) -> tuple[PyTree, PyTree]:
        """Return ((P̂ᵀ, Q), Q), the packet and next state of one worker, or the leaf itself and the
        state unchanged if the leaf has no matrices."""
        if not self.accepts(x.shape):
            return x, state
        p = orthonormalize(_products(x, state))
        q = _factor(p, x)
        return (p, q), q

    def decode(self, packet: PyTree, shape: tuple[int, ...]) -> jax.Array:
        """Return P̂·Q in the leaf's shape, or the packet unchanged if leaves of this shape are sent
        dense."""
        return _product(*packet) if self.accepts(shape) else packet

    def num_bytes(self, shape: tuple[int, ...]) -> int:
        """Return the bytes of the factors that one worker puts into the two all-reduces of a leaf,
        or the bytes of the whole float32 leaf if it has no matrices."""
        if not self.accepts(shape):
            return 4 * math.prod(shape)
        m, n, rank = self._sizes(shape)
        return 4 * math.prod(shape[:-2]) * rank * (m + n)


@show_call
def power_sgd(rank: int) -> PowerSgd:
    """Return a compressor for `exchange` that sends a matrix as the product of two thin ones of
    `rank`, while leaves with fewer than two axes are exchanged densely.

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
    `Stacked`, and the places of a kernel (h, w, in, out). A kernel (out, in, h, w) would count as
    matrices (h, w), whose factors are larger than the kernel; exchange it densely. A leaf with
    fewer than two axes is exchanged densely.

    Bytes of an (m, n) matrix: 4·r·(m + n), r = min(rank, m, n), through an all-reduce; of a leaf
    (…, m, n), so many for each matrix. That is less than the matrix itself if r < m·n/(m + n).
    State: Q̄, float32 (…, r, n), the same on all workers; the first one is the transpose of
    `jax.random.normal(jax.random.key(0), (n, r))`, and equal for all matrices of a leaf.

    Source: Vogels et al. 2019, arXiv 1905.13727, algorithms 1 and 2.

    >>> power_sgd(4).num_bytes((512, 256))
    12288
    >>> power_sgd(4).num_bytes((24, 512, 256))  # 24 stacked layers
    294912
    """
    return PowerSgd(checks.count("rank", rank))
