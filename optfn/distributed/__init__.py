"""Training on several devices: the pipeline, and the compression of gradients."""

from optfn.distributed.pipeline import pipeline_value_and_grad
from optfn.distributed.plan import Plan, plan
from optfn.distributed.stacking import PipelineParams, stack_stages, unstack_stages
