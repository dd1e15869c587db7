"""The optimizer of several workers: dgc_momentum."""

from collections.abc import Sequence
from typing import Any

import optax

from optfn import core
from optfn.checks import Number, Schedule
from optfn.compression.dgc import deep_gradient_compression
from optfn.parallel.mesh import AxisName
from optfn.transforms.learning_rate import scale_by_learning_rate
from optfn.wrappers.attributes import ParamAttrs, attributed, check_param_attrs, regularizing


def dgc_momentum(
    learning_rate: Number | Schedule,
    momentum: Number,
    *,
    rampup_begin_step: int,
    rampup_step: int = 1,
    sparsity: Sequence[float] = (0.999,),
    nesterov: bool = False,
    local_grad_clip_norm: Number | None = None,
    regularization: optax.GradientTransformation | None = None,
    axis_name: AxisName = "data",
    reduce_axis_name: AxisName = None,
    min_size: int = 16384,
    momentum_masking: bool = True,
    wire: str = "float32",
    selection: str = "exact",
    param_attrs: ParamAttrs | None = None,
) -> optax.GradientTransformationExtraArgs:
    """Momentum whose workers exchange few entries of the gradient: Deep Gradient Compression.

        G = deep_gradient_compression(g)
        p −= lr·G

    It runs where `axis_name` is bound, on each worker's own gradient; `make_train_step` with a mesh
    does that.

    Args:
      learning_rate: lr.
      momentum: μ, in [0, 1).
      rampup_begin_step: steps of dense momentum before compression, ≥ 0.
      rampup_step: steps over which the stages of `sparsity` are passed through, ≥ 1.
      sparsity: the part that is not sent in each stage, in [0, 1).
      nesterov: whether to look ahead.
      local_grad_clip_norm: a clip of each compressed leaf, > 0, times N^(−1/2) on each worker.
      regularization: a penalty added to g, on each worker.
      axis_name: the mesh axis, or a tuple of axes, whose workers exchange.
      reduce_axis_name: axes over which g is first averaged densely.
      min_size: the elements from which a leaf is compressed, ≥ 1.
      momentum_masking: whether the velocity is 0 where entries were sent.
      wire: "float32", 8 bytes per entry; or "bfloat16", about 4.
      selection: "exact", or "sampled", a little cheaper.
      param_attrs: attributes of parameters, by patterns of paths. need_clip has no meaning here:
        the local clip is per tensor, and of compressed ones only.

    State: that of `deep_gradient_compression`, and the rate.

    `update` takes `sparse_updates=True`, as `make_train_step` gives it: see
    `deep_gradient_compression`. Of one stage and without dense steps before, it costs no pass over
    the parameters. The state does not depend on the ramp: once that is over, an optimizer without
    it can go on with the same state.

    Source: Lin et al. 2018, arXiv 1712.01887; fluid's DGCMomentumOptimizer, whose num_trainers is
    the size of the axis.
    """
    attrs = check_param_attrs(param_attrs)
    if regularization is not None:
        core.check_transform("regularization", regularization)
    penalties = regularizing(regularization, attrs)
    chain = optax.chain(
        deep_gradient_compression(
            momentum,
            rampup_begin_step=rampup_begin_step,
            rampup_step=rampup_step,
            sparsity=sparsity,
            nesterov=nesterov,
            local_grad_clip_norm=local_grad_clip_norm,
            regularization=optax.chain(*penalties) if penalties else None,
            axis_name=axis_name,
            reduce_axis_name=reduce_axis_name,
            min_size=min_size,
            momentum_masking=momentum_masking,
            wire=wire,
            selection=selection,
        ),
        scale_by_learning_rate(learning_rate),
    )
    tx = attributed("dgc_momentum", core.behind_edge("dgc_momentum", core.rule(*chain)), attrs)

    def update(
        updates: Any,
        state: Any,
        params: Any = None,
        *,
        sparse_updates: bool = False,
        **extra: Any,
    ) -> tuple[Any, Any]:
        return tx.update(updates, state, params, sparse_updates=sparse_updates, **extra)

    return optax.GradientTransformationExtraArgs(tx.init, update)
