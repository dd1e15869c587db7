"""Muon: orthogonalized momentum for matrices, and another optimizer for the remaining leaves."""

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import optax

from optfn import core
from optfn.core.checks import Number, Schedule
from optfn.core.traits import traits
from optfn.core.types import OptState, Params, Stepped, Updates
from optfn.leaves import patterns, selection
from optfn.leaves.patterns import Pattern
from optfn.optimizers.adam import choose_adam
from optfn.optimizers.assembly import dense_rows, optimizer
from optfn.transforms.learning_rate import scale_by_learning_rate
from optfn.transforms.muon import Scale, matrix_paths, scale_by_muon
from optfn.transforms.regularization import add_decayed_weights
from optfn.wrappers.attributes import ParamAttrs


@optimizer
def muon(
    learning_rate: Number | Schedule,
    *,
    matrices: Pattern | None = None,
    momentum: Number = 0.95,
    nesterov: bool = True,
    weight_decay: Number | Schedule = 0.0,
    exclude: Pattern | None = None,
    others: optax.GradientTransformation | None = None,
    coefficients: str | Sequence[Any] = "jordan",
    scale: str | Scale = "jordan",
    eps: Number = 1e-7,
    compute_dtype: str | None = None,
    moment_dtype: str | None = None,
    grad_clip: optax.GradientTransformation | None = None,
    regularization: optax.GradientTransformation | None = None,
    param_attrs: ParamAttrs | None = None,
    multi_precision: bool | int = False,
) -> list[core.Unchecked]:
    """Return the Muon optimizer, which updates matrices by their orthogonalized momentum, and the
    rest by `others`, or by adamw if it is None.

        v = μv + g;  m = g + μv with nesterov, else v;  O = orthogonalized(m)
        p = (1 − lr·wd)·p − lr·scale(rows, columns)·O

    With m = U·S·Vᵀ, O is about U·Vᵀ: five steps of a Newton–Schulz iteration bring each singular
    value to 1, up to some 30 %. `scale_by_muon` has its equations. Embeddings and the output layer
    are matrices too, but are usually left to adamw, so name the hidden layers by `matrices`.
    `summary` tells you which leaves are orthogonalized.

    Args:
      learning_rate: lr ≥ 0, a number, a 0-d array or a schedule step -> rate; for the matrices and,
        with `others=None`, also for the rest.
      matrices: the leaves that are orthogonalized: a regular expression that matches their whole
        path, or a function path -> bool. None: all leaves with two axes, not counting stacked ones.
      momentum: μ, in [0, 1].
      nesterov: whether to use Nesterov's momentum.
      weight_decay: wd, a number ≥ 0 or a schedule of the 0-based step; for the matrices and, with
        `others=None`, also for the rest.
      exclude: the leaves without decay (wd = 0): a regular expression that matches their whole
        path, or a function path -> bool.
      others: the optimizer of the rest, with its rate; None is adamw with the same rate and
        decay.
      coefficients: the coefficients of the iteration, see `scale_by_muon`.
      scale: "jordan", "moonlight" or a function, see `scale_by_muon`. With "jordan" the right rate
        is some 20 times the rate of adamw (0.02), so pass `others` with its rate. With "moonlight"
        the rate of adamw fits both.
      eps: > 0, added to the norm of m.
      compute_dtype: "bfloat16" for the products of the iteration; None is float32, whose products a
        GPU makes in TF32 and a TPU in bfloat16, see `scale_by_muon`.
      moment_dtype: "bfloat16" or "int8" for v and, with `others=None`, for the moments of adamw.

    State: v, 4 bytes per parameter of a matrix; in bfloat16 2, in int8 1.00 to 1.02. For the rest,
    the state of `others`: for adamw 8, 4 and 2.00 to 2.03. Real and complex leaves; with
    `moment_dtype` only real ones.

    Raises:
      ValueError: `matrices` selects a leaf that is not a matrix, or is a regular expression that
        matches no leaf.

    Source: Jordan et al. 2024, https://kellerjordan.github.io/posts/muon; Liu et al. 2025, arXiv
    2502.16982.
    """
    pattern = patterns.check_pattern("matrices", matrices)
    direction = scale_by_muon.unchecked(
        momentum, nesterov=nesterov, coefficients=coefficients, scale=scale, eps=eps,
        compute_dtype=compute_dtype, moment_dtype=moment_dtype,
    )  # fmt: skip
    ends = [
        add_decayed_weights.unchecked(weight_decay, exclude=exclude),
        scale_by_learning_rate.unchecked(learning_rate),
    ]
    links = [dense_rows.unchecked("muon"), direction]
    if others is None:
        adam = choose_adam(0.9, 0.999, 1e-8, False, moment_dtype, False)
        # Decay and rate are the same for both, and come once, behind both.
        return [_matrices_and_others(pattern, links, adam), *ends]
    others = core.check_transform("others", others, "optfn.adamw")
    # The optimizer of the rest has a decay and a rate already.
    return [_matrices_and_others(pattern, [*links, *ends], core.strip_boundary(others))]


@traits(labels="*")
class MatricesAndOthers(NamedTuple):
    """The states of the two transforms, in fields that are their labels."""

    matrices: OptState
    others: OptState


def _matrices_and_others(
    matrices: Pattern | None, links: Sequence[core.Unchecked], others: core.Unchecked
) -> core.Unchecked:
    """Return the rule that applies `links` to the leaves that `matrices` selects, and `others` to
    the rest.

    The second gets the directions of the first, and returns them unchanged.
    """

    choose = partial(matrix_paths, matrices)
    chain = core.chain_unchecked(
        [
            selection.restrict(core.chain_unchecked(links), choose),
            selection.restrict(others, partial(selection.list_others, choose)),
        ]
    )

    def init(params: Params) -> OptState:
        return MatricesAndOthers(*chain.init(params))

    def update(updates: Updates, state: OptState, params: Params = None, **extra: Any) -> Stepped:
        updates, states = chain.update(updates, tuple(state), params, **extra)
        return updates, MatricesAndOthers(*states)

    return chain._replace(init=init, update=update)
