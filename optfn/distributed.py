"""Training on several devices: data parallelism, the compression of updates, and the pipeline."""

from optfn.compression.dgc import deep_gradient_compression
from optfn.compression.exchange import exchange
from optfn.compression.k_largest import select_top_k
from optfn.compression.power_sgd import power_sgd
from optfn.compression.quantize import quantize
from optfn.compression.top_k import top_k
from optfn.loss.scans import scan_layers
from optfn.mesh.collectives.mesh import data_mesh
from optfn.mesh.collectives.tensor_parallel import copy_to, sum_over
from optfn.mesh.compilers.chips import Chip
from optfn.mesh.compilers.options import overlap_options
from optfn.mesh.layout.fingerprint import compare_replicas
from optfn.mesh.layout.sharding import init_state, sharded
from optfn.mesh.state.placement import rescale_residuals, state_specs
from optfn.pipeline.plan import Plan, plan
from optfn.pipeline.stacking import PipelineParams, stack_stages, unstack_stages
from optfn.pipeline.value_and_grad import pipeline_value_and_grad
from optfn.plan.memory import plan_memory
from optfn.plan.memory_plan import MemoryPlan
from optfn.plan.step_estimate import StepEstimate, estimate_step
from optfn.plan.trial import Trial
from optfn.plan.tuning import Tuning, tune

__all__ = [
    "Chip", "MemoryPlan", "PipelineParams", "Plan", "StepEstimate", "Trial", "Tuning",
    "compare_replicas", "copy_to", "data_mesh", "deep_gradient_compression", "estimate_step",
    "exchange", "init_state", "overlap_options", "pipeline_value_and_grad", "plan", "plan_memory",
    "power_sgd", "quantize", "rescale_residuals", "scan_layers", "select_top_k", "sharded",
    "stack_stages", "state_specs", "sum_over", "top_k", "tune", "unstack_stages",
]  # fmt: skip
