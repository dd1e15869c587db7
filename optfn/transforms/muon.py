"""Muon's direction: the velocity of a matrix, orthogonalized."""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp

from optfn import core
from optfn.core import checks, leafwise, numerics, tree
from optfn.core.checks import Number, Scalar
from optfn.core.traits import traits
from optfn.core.types import DType, OptState, Params, PyTree, Stepped, Updates
from optfn.leaves import contents, patterns, selection, tensors
from optfn.leaves.patterns import Pattern
from optfn.mesh.collectives.mesh import apply_to_whole_matrices
from optfn.transforms.moment import velocity_rule

# (a, b, c) of one step of the iteration.
Triple: TypeAlias = tuple[float, float, float]
# (rows, columns) -> the factor of an orthogonalized matrix.
Scale: TypeAlias = Callable[[int, int], float]


def jordan_scale(rows: int, columns: int) -> float:
    """Return √max(1, columns/rows), for a weight w that is used as x @ w."""
    return math.sqrt(max(1.0, columns / rows))


def moonlight_scale(rows: int, columns: int) -> float:
    """Return 0.2·√max(rows, columns): an update of the size of Adam's."""
    return 0.2 * math.sqrt(max(rows, columns))


SCALES: dict[str, Scale] = {"jordan": jordan_scale, "moonlight": moonlight_scale}
COEFFICIENTS: dict[str, Sequence[Triple]] = {
    "jordan": ((3.4445, -4.7750, 2.0315),) * 5,
    "dion": (
        (4.0848, -6.8946, 2.9270),
        (3.9505, -6.3029, 2.6377),
        (3.7418, -5.5913, 2.3037),
        (2.8769, -3.1427, 1.2046),
        (2.8366, -3.0525, 1.2012),
    ),
}


def orthogonalize(
    x: jax.Array, *, coefficients: Sequence[Triple], eps: Scalar, dtype: DType | None = None
) -> jax.Array:
    """Return about U·Vᴴ of each matrix x = U·S·Vᴴ, by an iteration of products that brings singular
    values near 1, except far smaller ones.

    This is the Newton–Schulz iteration, which has only products of matrices:

        x = x/(‖x‖ + eps)
        x = a·x + (b·A + c·A²)·x,  A = x·xᴴ      for each (a, b, c)

    Args:
      x: matrices, (…, rows, columns).
      coefficients: a, b and c of each step.
      eps: > 0.
      dtype: the dtype of the iteration; None is the dtype of x.

    With fewer columns than rows it is x = a·x + x·(b·A + c·A²), A = xᴴ·x, the same without a
    transposed copy. Singular values of x/‖x‖ that are far below 1/∏a stay small.
    """
    norms = numerics.sqrt(jnp.sum(numerics.abs_squared(x), axis=(-2, -1), keepdims=True))
    y = x / (norms + numerics.scalar(eps, norms))
    y = y if dtype is None else y.astype(dtype)
    is_tall = y.shape[-2] > y.shape[-1]
    for a, b, c in coefficients:
        # The smaller of the two products: min(rows, columns) squared.
        gram = y.mT.conj() @ y if is_tall else y @ y.mT.conj()
        factor = b * gram + c * (gram @ gram)
        y = a * y + (y @ factor if is_tall else factor @ y)
    return y.astype(x.dtype)


@traits(link="moments", whole_matrices="orthogonalized")
class ScaleByMuonState(NamedTuple):
    """State of `scale_by_muon`: the state of `scale_by_momentum`, for the matrices."""

    momentum: OptState


def matrix_paths(matrices: Pattern | None, values: PyTree) -> frozenset[str]:
    """Return the paths of the leaves that `matrices` selects, or for None of all unmasked leaves
    with two axes beside stacked axes. Raise a ValueError if a selected leaf is no matrix.

    Raises:
      ValueError: a leaf that the pattern selects has another number of axes than two beside the
        stacked ones.
    """
    runs = contents.runs_by_name(values)
    for name, leaf in contents.leaves_with_names(values):
        if tree.is_masked(leaf):
            runs.pop(name, None)
    if matrices is None:
        return frozenset(k for k, run in runs.items() if len(run.shape) - run.stacked == 2)
    chosen = patterns.match_names(matrices, values, "matrices")
    for path in sorted(chosen & runs.keys()):
        run = runs[path]
        axes = len(run.shape) - run.stacked
        if axes != 2:
            beside = f" besides the {run.stacked} stacked" if run.stacked else ""
            raise ValueError(
                f"matrices: the pattern selects leaf {path!r} of shape {run.shape}, which has "
                f"{axes} {'axis' if axes == 1 else 'axes'}{beside}; a matrix has two. Layers along "
                "a leading axis are marked by optfn.Stacked or ParamAttr(stacked=1)"
            )
    return chosen


def check_coefficients(coefficients: str | Sequence[Any]) -> tuple[Triple, ...]:
    """Return the triple of each step from a name, from three numbers for five steps, or from a
    triple for each step, and raise a ValueError for anything else."""
    if isinstance(coefficients, str):
        checks.choice("coefficients", coefficients, tuple(COEFFICIENTS))
        return tuple(COEFFICIENTS[coefficients])
    rows = list(coefficients) if isinstance(coefficients, Sequence) else []
    rows = rows if all(isinstance(row, Sequence) for row in rows) else [rows] * 5
    if not rows or not all(len(row) == 3 and all(map(checks.is_host_number, row)) for row in rows):
        raise ValueError(
            f"coefficients must be one of {', '.join(map(repr, COEFFICIENTS))}, three numbers, or "
            f"three numbers for each step; got {coefficients!r}"
        )
    return tuple((float(a), float(b), float(c)) for a, b, c in rows)


@core.transform(complex_leaves=True)
def scale_by_muon(
    momentum: Number = 0.95,
    *,
    matrices: Pattern | None = None,
    nesterov: bool = True,
    coefficients: str | Sequence[Any] = "jordan",
    scale: str | Scale = "jordan",
    eps: Number = 1e-7,
    compute_dtype: str | None = None,
    moment_dtype: str | None = None,
) -> core.Unchecked:
    """Replace the update of each matrix by its orthogonalized and scaled velocity, and return the
    remaining updates unchanged.

        v = μv + g;  m = g + μv with nesterov, else v
        x = m/(‖m‖ + eps);  x = a·x + (b·A + c·A²)·x,  A = x·xᵀ, five times: near U·Vᵀ of m = U·S·Vᵀ
        u = scale(rows, columns)·x

    Each index of stacked axes is a separate matrix, and so is each leaf in a Packed.

    Args:
      momentum: μ, in [0, 1].
      matrices: the leaves that are orthogonalized: a regular expression that matches their whole
        path, or a function path -> bool. None: all leaves with two axes, not counting stacked ones.
      nesterov: whether to use Nesterov's momentum.
      coefficients: a, b, c: "jordan", which is (3.4445, −4.7750, 2.0315) five times; "dion", five
        different triples; three numbers, for five steps; or three numbers for each step.
      scale: "jordan", √max(1, columns/rows) for a weight that is used as x @ w; "moonlight",
        0.2·√max(rows, columns), so that the rates and decays of adamw fit; or a function
        (rows, columns) -> factor.
      eps: > 0, added to the norm of m.
      compute_dtype: "bfloat16" for the products of the iteration; None is float32, or the dtype of
        a wider leaf. Products of float32 have the precision that is the device's default: a CPU
        makes them in float32, a GPU in TF32 and a TPU in one pass of bfloat16, which is enough for
        the iteration. `jax.default_matmul_precision("float32")` around the step asks for more.
      moment_dtype: "bfloat16" or "int8" for v, see `scale_by_momentum`.

    State: the state of `scale_by_momentum` for the matrices: v, 4 bytes per parameter; in bfloat16
    2, in int8 1.00 to 1.02. Real and complex leaves; with `moment_dtype` real ones.

    Raises:
      ValueError: `matrices` selects a leaf that is not a matrix, or is a regular expression that
        matches no leaf.

    Source: Jordan et al. 2024, https://kellerjordan.github.io/posts/muon (its moving average is v
    up to a factor, which the norm takes away); Liu et al. 2025, arXiv 2502.16982 ("moonlight", with
    the coefficients of "jordan"); Ahn et al. 2025, arXiv 2504.05295 ("dion", as in optax).
    """
    mu = checks.number("momentum", momentum, checks.UNIT)
    matrices = patterns.check_pattern("matrices", matrices)
    factor = scale if callable(scale) else SCALES[checks.choice("scale", scale, tuple(SCALES))]
    direction = partial(
        orthogonalize,
        coefficients=check_coefficients(coefficients),
        eps=checks.positive("eps", eps),
        dtype=checks.choice("compute_dtype", compute_dtype, (None, "bfloat16")),
    )
    velocity = velocity_rule(mu, checks.flag("nesterov", nesterov), moment_dtype)

    def orthogonalize_tensors(x: jax.Array) -> jax.Array:
        # Drop the batch axis of a single matrix: with it, XLA for TPUs copies the operands of each
        # product.
        matrices = jnp.squeeze(x, 0) if len(x) == 1 else x
        scaled = factor(*x.shape[-2:]) * apply_to_whole_matrices(direction, matrices)
        return scaled.reshape(x.shape)

    def update(updates: Updates, state: OptState, params: Params = None, **_: Any) -> Stepped:
        updates, state = velocity.update(leafwise.densify_rows(updates), state)
        return tensors.map_tensors(orthogonalize_tensors, updates), state

    return selection.restrict(
        velocity._replace(update=update), partial(matrix_paths, matrices), ScaleByMuonState
    )
