"""Gradient descent, with momentum or averages of the gradient: sgd, momentum, lars, asgd.

In the equations of all optimizers, g is the gradient after clip and regularization, t the 1-based
step, and p the parameter. `assembly.py` has the arguments that all optimizers share.
"""

import optax

from optfn import core
from optfn.core.checks import Number, Schedule
from optfn.leaves.patterns import Pattern
from optfn.optimizers.assembly import dense_rows, optimizer
from optfn.transforms import moment, scaling
from optfn.transforms.asgd import scale_by_asgd
from optfn.transforms.learning_rate import scale_by_learning_rate
from optfn.transforms.regularization import add_decayed_weights
from optfn.wrappers.attributes import ParamAttrs


@optimizer
def sgd(
    learning_rate: Number | Schedule,
    *,
    grad_clip: optax.GradientTransformation | None = None,
    regularization: optax.GradientTransformation | None = None,
    param_attrs: ParamAttrs | None = None,
    multi_precision: bool | int = False,
) -> list[core.Unchecked]:
    """Return the optimizer of stochastic gradient descent, which steps by −lr·g and keeps no
    moments.

        p −= lr·g

    Args:
      learning_rate: lr ≥ 0, a number, a 0-d array or a schedule step -> rate.

    State: the step and the rate, 8 bytes. Real and complex leaves.

    Source: fluid's SGDOptimizer.

    >>> import optfn, jax.numpy as jnp
    >>> tx = optfn.sgd(0.5)
    >>> params = {"w": jnp.array([1.0, 2.0])}
    >>> updates, state = tx.update({"w": jnp.array([2.0, 0.0])}, tx.init(params), params)
    >>> optfn.apply_updates(params, updates)["w"].tolist()
    [0.0, 2.0]
    """
    return [scale_by_learning_rate.unchecked(learning_rate)]


@optimizer
def momentum(
    learning_rate: Number | Schedule,
    momentum: Number,
    *,
    nesterov: bool = False,
    moment_dtype: str | None = None,
    grad_clip: optax.GradientTransformation | None = None,
    regularization: optax.GradientTransformation | None = None,
    param_attrs: ParamAttrs | None = None,
    multi_precision: bool | int = False,
) -> list[core.Unchecked]:
    """Return the optimizer of gradient descent by a velocity that accumulates the gradients, or
    with `nesterov` by g + μv.

        v = μv + g
        p −= lr·v,  or lr·(g + μv) with nesterov

    Args:
      learning_rate: lr ≥ 0, a number, a 0-d array or a schedule step -> rate. It is not part of v,
        so a new rate acts at once.
      momentum: μ, in [0, 1].
      nesterov: whether to use Nesterov's momentum.
      moment_dtype: "bfloat16" or "int8" stores v in 16 or 8 bits, stochastically rounded; None is
        float32.

    State: v, 4 bytes per parameter; in bfloat16 2, in int8 1.00 to 1.02. Real leaves, and without
    `moment_dtype` complex ones.

    Source: Sutskever et al. 2013; fluid's MomentumOptimizer.
    """
    return [
        moment.scale_by_momentum.unchecked(momentum, nesterov=nesterov, moment_dtype=moment_dtype),
        scale_by_learning_rate.unchecked(learning_rate),
    ]


@optimizer
def lars(
    learning_rate: Number | Schedule,
    momentum: Number,
    *,
    lars_coeff: Number = 1e-3,
    lars_weight_decay: Number | Schedule = 5e-4,
    eps: Number = 0.0,
    exclude: Pattern | None = None,
    moment_dtype: str | None = None,
    grad_clip: optax.GradientTransformation | None = None,
    regularization: optax.GradientTransformation | None = None,
    param_attrs: ParamAttrs | None = None,
    multi_precision: bool | int = False,
) -> list[core.Unchecked]:
    """Return the LARS optimizer for large batches, which scales the gradient plus weight decay by
    the norms of each tensor, or by 1 if one is 0, before momentum.

        L = lr·coeff·‖p‖/(‖g‖ + wd·‖p‖ + eps)    where ‖p‖ > 0 and ‖g‖ > 0, else lr
        v = μv + L·(g + wd·p)
        p −= v

    Args:
      learning_rate: lr ≥ 0, a number, a 0-d array or a schedule step -> rate. It is part of v, so a
        new rate acts on new gradients only.
      momentum: μ, in [0, 1].
      lars_coeff: coeff, the trust coefficient, > 0.
      lars_weight_decay: wd, a number ≥ 0 or a schedule of the 0-based step.
      eps: ≥ 0.
      exclude: the leaves without decay (wd = 0): a regular expression that matches their whole
        path, or a function path -> bool. The scaling L still applies to them.
      moment_dtype: "bfloat16" or "int8" for v, as in `momentum`.

    State: v, 4 bytes per parameter; in bfloat16 2, in int8 1.00 to 1.02. Real leaves, and without
    `moment_dtype` complex ones.

    Source: You et al. 2017, arXiv 1708.03888; fluid's LarsMomentumOptimizer.
    """
    return [
        dense_rows.unchecked("lars"),
        scaling.scale_by_lars.unchecked(lars_coeff, lars_weight_decay, eps, exclude=exclude),
        # Before the momentum, as in fluid: the rate is part of the velocity.
        scale_by_learning_rate.unchecked(learning_rate),
        moment.scale_by_momentum.unchecked(momentum, moment_dtype=moment_dtype),
    ]


@optimizer
def asgd(
    learning_rate: Number | Schedule = 1e-3,
    *,
    batch_num: int = 1,
    weight_decay: Number | Schedule = 0.0,
    grad_clip: optax.GradientTransformation | None = None,
    regularization: optax.GradientTransformation | None = None,
    param_attrs: ParamAttrs | None = None,
    multi_precision: bool | int = False,
) -> list[core.Unchecked]:
    """Return the optimizer that steps by the mean of the last gradients of all batches seen so far,
    plus weight decay, which is SGD if `batch_num` is 1.

        i = (t − 1) mod n;  y_i = g;  d = ∑_j y_j
        p −= lr·(d/min(t, n) + λ·p)

    Args:
      learning_rate: lr ≥ 0, a number, a 0-d array or a schedule step -> rate.
      batch_num: n, the number of batches in an epoch, which must come in the same order in every
        epoch; ≥ 1, static.
      weight_decay: λ, a number ≥ 0 or a schedule of the 0-based step. It is not averaged, whereas
        `regularization` changes g and so the average.

    State: y, 4·n bytes per parameter; none for n = 1. Real and complex leaves.

    Source: Schmidt et al. 2017, arXiv 1309.2388; Paddle's ASGD.
    """
    return [
        dense_rows.unchecked("asgd"),
        scale_by_asgd.unchecked(batch_num),
        # Behind the average, so that the decay is not averaged.
        add_decayed_weights.unchecked(weight_decay),
        scale_by_learning_rate.unchecked(learning_rate),
    ]
