"""Training on several devices: the pipeline, and the compression of gradients."""

from optfn.distributed.compression import deep_gradient_compression
from optfn.distributed.local import on_each_device
from optfn.distributed.mesh import data_mesh
from optfn.distributed.pipeline import pipeline_value_and_grad
from optfn.distributed.placement import init_state, rescale_residuals, state_specs
from optfn.distributed.plan import Plan, plan
from optfn.distributed.residual import accumulate, take
from optfn.distributed.selection import select_top_k
from optfn.distributed.stacking import PipelineParams, stack_stages, unstack_stages
from optfn.distributed.wire import Wire, mean_of_sent
