"""FLOPs of the loss and the gradients of a step."""

from optfn.core.types import Batch
from optfn.loss.jaxprs.flops import UncountableError, count_model_flops
from optfn.train.state import UPDATE_SCOPE, TrainState
from optfn.train.step import TrainStep


def count_step_flops(step: TrainStep, state: TrainState, batch: Batch) -> float | None:
    """Return the FLOPs of the products of a call's loss and gradients, on all devices, or None if
    the equations do not tell them.

    Products that run again in the backward pass, and the optimizer's, do not count: the same model
    has the same FLOPs however it is trained. They are counted from the equations, because XLA's
    `cost_analysis` counts the body of a loop once, on CPUs and TPUs. JAX has kept the equations
    from the call, so nothing is traced or compiled again.

    None if the equations do not tell them: with `value_and_grad`, since a pipeline computes in its
    bubbles too; and for kernels, and loops or branches that the data decides.
    """
    if step.options.value_and_grad is not None:
        return None
    arguments = step.list_arguments(state, step.place_batch(batch, state))
    try:
        return count_model_flops(step.compiled.trace(*arguments).jaxpr.jaxpr, UPDATE_SCOPE)
    except UncountableError:
        return None
