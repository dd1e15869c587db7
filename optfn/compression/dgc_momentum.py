"""The optimizer dgc_momentum: Deep Gradient Compression and a learning rate."""

from collections.abc import Sequence

import optax

from optfn import checks, core
from optfn.checks import Number, Schedule
from optfn.compression.dgc import deep_gradient_compression
from optfn.mesh import AxisName
from optfn.transforms.learning_rate import scale_by_learning_rate
from optfn.wrappers.attributes import (
    ParamAttrs,
    attributed,
    check_param_attrs,
    refuse_decay_factors,
    regularizing,
)

# The fraction of entries above which masking costs more than it gains.
_MAX_MASKED_DENSITY = 0.02


@core.named
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
    """Momentum on several workers that exchange few entries: Deep Gradient Compression.

        G = deep_gradient_compression(g)
        p −= lr·G

    It runs where `axis_name` is bound, on each worker's gradient; `make_train_step` with a mesh
    does that.

    Momentum factor masking (`momentum_masking=True`, as in the paper) zeroes the velocity wherever
    something is sent. At the densities it was made for, 0.1 % to 1 %, most of the velocity remains.
    Denser exchanges lose the momentum: with sparsity 0 the rule is plain SGD. On two small language
    models bits per byte were 2 % to 6 % above those of dense momentum at a density of 5 %, and 15 %
    above at 20 %, but at most 1 % above without masking. A final density above 2 % with masking
    is therefore warned about (UserWarning).

    Args:
      learning_rate: lr ≥ 0, a number, a 0-d array or a schedule step -> rate.
      momentum: μ, in [0, 1).
      rampup_begin_step: the number of dense momentum steps before compression, ≥ 0.
      rampup_step: the number of steps that the sparsity ramp takes, ≥ 1.
      sparsity: for each ramp step the fraction of entries that is not sent, in [0, 1).
      nesterov: whether to use Nesterov momentum.
      local_grad_clip_norm: a clip of each compressed leaf, > 0, times N^(−1/2) on each worker.
      regularization: a penalty added to g, on each worker.
      axis_name: the mesh axis, or a tuple of axes, whose workers exchange.
      reduce_axis_name: axes over which g is first averaged densely.
      min_size: the number of elements from which on a leaf is compressed, ≥ 1.
      momentum_masking: whether the velocity becomes 0 where entries were sent.
      wire: the dtype of values in a packet: "float32", 8 bytes per entry; or "bfloat16", about 4.
      selection: "exact"; "sampled" is another name for it.
      param_attrs: attributes of parameters, by patterns of paths. need_clip has no effect here:
        the local clip is per tensor, and for compressed tensors only.

    State: that of `deep_gradient_compression`, and the rate.

    `update` takes `row_updates=True`, which `make_train_step` passes: see
    `deep_gradient_compression`. Without a ramp and without dense steps, a step then makes no pass
    over the parameters. The state does not depend on the ramp: once it is over, an optimizer
    without one can continue from the same state.

    Source: Lin et al. 2018, arXiv 1712.01887; fluid's DGCMomentumOptimizer, whose num_trainers is
    the size of the axis.
    """
    _warn_of_dense_masking(momentum_masking, sparsity)
    attrs = check_param_attrs(param_attrs)
    refuse_decay_factors("dgc_momentum", attrs)
    if regularization is not None:
        core.check_transform("regularization", regularization)
    penalties = regularizing(regularization, attrs)
    chain = core.chain(
        deep_gradient_compression(
            momentum,
            rampup_begin_step=rampup_begin_step,
            rampup_step=rampup_step,
            sparsity=sparsity,
            nesterov=nesterov,
            local_grad_clip_norm=local_grad_clip_norm,
            regularization=core.chain(*penalties) if penalties else None,
            axis_name=axis_name,
            reduce_axis_name=reduce_axis_name,
            min_size=min_size,
            momentum_masking=momentum_masking,
            wire=wire,
            selection=selection,
        ),
        scale_by_learning_rate(learning_rate),
    )
    tx = core.behind_edge("dgc_momentum", core.rule_of(chain))
    return attributed("dgc_momentum", tx, attrs)


def _warn_of_dense_masking(momentum_masking: bool, sparsity: Sequence[float]) -> None:
    if momentum_masking is not True or not isinstance(sparsity, Sequence) or not sparsity:
        return
    last = sparsity[-1]
    if checks.is_host_number(last) and 0 <= last < 1 - _MAX_MASKED_DENSITY:
        checks.warn(
            f"dgc_momentum: momentum masking zeroes the velocity of the {1 - last:.2g} of all "
            "entries that each step sends after the ramp, and little momentum remains; pass "
            f"momentum_masking=False, or a final sparsity of {1 - _MAX_MASKED_DENSITY} or more"
        )
