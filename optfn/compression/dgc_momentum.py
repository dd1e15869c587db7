"""The optimizer `dgc_momentum`: Deep Gradient Compression followed by a learning rate."""

from collections.abc import Sequence

import optax

from optfn import core
from optfn.compression.dgc import deep_gradient_compression
from optfn.core import checks
from optfn.core.checks import Number, Schedule
from optfn.mesh.collectives.axes import AxisName
from optfn.transforms.learning_rate import scale_by_learning_rate
from optfn.wrappers import attributes

# If a larger fraction of the entries is sent, masking costs more than it gains.
_MAX_MASKED_DENSITY = 0.02


@core.record_call
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
    param_attrs: attributes.ParamAttrs | None = None,
) -> optax.GradientTransformationExtraArgs:
    """Return an optimizer with momentum whose workers exchange only the largest entries of their
    accumulated gradients (Deep Gradient Compression) and keep the rest.

        G = deep_gradient_compression(g)
        p −= lr·G

    Each worker sends only the largest entries of its accumulated gradients, and keeps the rest to
    send it later. It is for workers with a slow link between them. Pass it to `make_train_step`
    with a mesh. In a step that you write, call it where `axis_name` is bound, with the gradient of
    each worker.

    Momentum factor masking (`momentum_masking=True`, as in the paper) zeroes the velocity wherever
    something is sent. At the densities it was made for, 0.1 % to 1 %, most of the velocity remains.
    If more is sent, the momentum is lost: with sparsity 0 the rule is plain SGD. On two small
    language models, bits per byte were 2 % to 6 % above dense momentum at a density of
    5 %, and 15 % above at 20 %, but at most 1 % above without masking. With masking and a final
    density above 2 % you therefore get a UserWarning.

    Args:
      learning_rate: lr ≥ 0, a number, a 0-d array or a schedule step -> rate.
      momentum: μ, in [0, 1).
      rampup_begin_step: the number of dense momentum steps before compression, ≥ 0.
      rampup_step: the number of steps of the whole sparsity ramp, ≥ 1.
      sparsity: the fraction of entries that is not sent in each ramp step, in [0, 1).
      nesterov: whether to use Nesterov momentum.
      local_grad_clip_norm: c > 0. In each compressed step each of the N workers clips its mean
        gradient of a compressed leaf to the norm c/√N, and adds the penalty after it. In fluid the
        limit of this gradient is c·√N, because the loss is divided by N before the clip: pass c·N
        for fluid's trajectory. None does not clip.
      regularization: a penalty added to g on each worker, such as `l2_decay(1e-4)`.
      axis_name: the mesh axis, or a tuple of axes, of the workers that exchange.
      reduce_axis_name: axes to average g over densely first.
      min_size: leaves with fewer elements are not compressed; ≥ 1.
      momentum_masking: whether the velocity becomes 0 where entries were sent.
      wire: the dtype of values in a packet: "float32", 8 bytes per entry; or "bfloat16", about 4.
      param_attrs: attributes of parameters, by patterns of paths. need_clip has no effect here,
        because the local clip is per tensor, and only for compressed tensors.

    State: the state of `deep_gradient_compression`, and the rate.

    `make_train_step` passes `row_updates=True` to `update`; see `deep_gradient_compression`. If
    there are no dense steps and no ramp, a step then makes no pass over the parameters. The state
    does not depend on the ramp, so once it is over you can continue from the same state with an
    optimizer that has none.

    Source: Lin et al. 2018, arXiv 1712.01887; fluid's DGCMomentumOptimizer, whose num_trainers is
    the size of the axis.
    """
    _warn_of_dense_masking(momentum_masking, sparsity)
    attrs = attributes.check_param_attrs(param_attrs)
    attributes.refuse_decay_factors("dgc_momentum", attrs)
    if regularization is not None:
        core.check_transform("regularization", regularization)
    penalties = attributes.penalties_of_leaves(regularization, attrs)
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
        ),
        scale_by_learning_rate(learning_rate),
    )
    # One boundary around both links, so that errors name dgc_momentum and gradients are checked
    # once.
    tx = core.with_boundary("dgc_momentum", core.strip_boundary(chain))
    return attributes.apply_to_trained("dgc_momentum", tx, attrs)


def _warn_of_dense_masking(momentum_masking: bool, sparsity: Sequence[float]) -> None:
    """Warn if `momentum_masking` is True and the last sparsity sends over 2 % of the entries, but
    not of invalid arguments, which are refused later."""
    if momentum_masking is not True or not isinstance(sparsity, Sequence) or not sparsity:
        return
    last = sparsity[-1]
    if checks.is_host_number(last) and 0 <= last < 1 - _MAX_MASKED_DENSITY:
        checks.warn(
            f"dgc_momentum: after the ramp, each step sends a fraction of {1 - last:.2g} of all "
            "entries, and momentum masking zeroes their velocity, so that little momentum remains. "
            "Pass momentum_masking=False, or a final sparsity of at least "
            f"{1 - _MAX_MASKED_DENSITY}"
        )
