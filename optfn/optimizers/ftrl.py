"""Follow the regularized leader."""

import optax

from optfn import core
from optfn.core.checks import Number, Schedule
from optfn.optimizers.assembly import optimizer
from optfn.transforms.ftrl import ftrl_proximal
from optfn.wrappers.attributes import ParamAttrs


@optimizer
def ftrl(
    learning_rate: Number | Schedule,
    *,
    l1: Number = 0.0,
    l2: Number = 0.0,
    lr_power: Number = -0.5,
    lazy: bool = True,
    grad_clip: optax.GradientTransformation | None = None,
    regularization: optax.GradientTransformation | None = None,
    param_attrs: ParamAttrs | None = None,
    multi_precision: bool | int = False,
) -> list[core.Unchecked]:
    """Return the FTRL-proximal optimizer for linear models, whose l1 makes parameters exactly 0,
    and which if `lazy` changes only the rows in a row-sparse gradient.

        n' = n + g²;  σ = (n'^(−k) − n^(−k))/lr;  z += g − σ·p;  n = n'
        p = (l1·sign(z) − z)/(n^(−k)/lr + 2·l2)  where |z| > l1, else 0

    Args:
      learning_rate: lr ≥ 0, a number, a 0-d array or a schedule step -> rate. It is part of the
        recursion of z, and p is proportional to it: a warm-up enlarges the parameters.
      l1: the weight of the penalty on |p|, ≥ 0, beside the sum of all gradients. With a loss that
        is a mean, sensible values are far below 1. `ParamAttr(weight_decay=c)` multiplies l1 and l2
        by c for a leaf; c = 0 suits an intercept.
      l2: the weight of the penalty on p², ≥ 0.
      lr_power: k, ≤ 0.
      lazy: how the row-sparse gradient of an embedding table is applied. True: only the rows in the
        gradient change, as in Paddle's sparse operator. False: like the dense gradient, at the cost
        of the whole table; all rows that have never had a gradient become 0. For dense gradients
        both are the same.

    State: n and z, 8 bytes per parameter. Real leaves.

    Source: McMahan et al. 2013; fluid's FtrlOptimizer.
    """
    return [ftrl_proximal.unchecked(learning_rate, l1=l1, l2=l2, lr_power=lr_power, lazy=lazy)]
