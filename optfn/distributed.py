"""Training on several devices: data parallelism, the compression of updates, and the pipeline."""

from optfn.collectives.mesh import data_mesh
from optfn.collectives.tensor_parallel import copy_to, sum_over
from optfn.compilers.options import overlap_options
from optfn.compression.dgc import deep_gradient_compression
from optfn.compression.exchange import exchange
from optfn.compression.k_largest import select_top_k
from optfn.compression.power_sgd import power_sgd
from optfn.compression.quantize import quantize
from optfn.compression.top_k import top_k
from optfn.estimate.chips import Chip
from optfn.estimate.step_estimate import StepEstimate, estimate_step
from optfn.parallel.fingerprint import compare_replicas
from optfn.parallel.scans import scan_layers
from optfn.parallel.sharding import init_state, sharded
from optfn.pipeline.plan import Plan, plan
from optfn.pipeline.stacking import PipelineParams, stack_stages, unstack_stages
from optfn.pipeline.value_and_grad import pipeline_value_and_grad
from optfn.state.placement import rescale_residuals, state_specs
from optfn.train.memory import plan_memory
from optfn.train.memory_plan import MemoryPlan

__all__ = [
    "Chip",
    "MemoryPlan",
    "PipelineParams",
    "Plan",
    "StepEstimate",
    "compare_replicas",
    "copy_to",
    "data_mesh",
    "deep_gradient_compression",
    "estimate_step",
    "exchange",
    "init_state",
    "overlap_options",
    "pipeline_value_and_grad",
    "plan",
    "plan_memory",
    "power_sgd",
    "quantize",
    "rescale_residuals",
    "scan_layers",
    "select_top_k",
    "sharded",
    "stack_stages",
    "state_specs",
    "sum_over",
    "top_k",
    "unstack_stages",
]
