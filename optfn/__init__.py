"""optfn trains JAX models: optax-compatible optimizers, sharded steps, and a crash-safe loop.

Every optimizer is an `(init, update)` pair of pure functions, as in optax, and a chain of
transforms. `minimize` runs the whole training:

>>> import jax.numpy as jnp
>>> import optfn
>>> tx = optfn.adam(1e-2, grad_clip=optfn.clip_by_global_norm(1.0))
>>> state, history = optfn.minimize(
...     lambda w, x: jnp.mean((x @ w - 1.0) ** 2),
...     tx,
...     jnp.zeros(3),
...     [jnp.eye(3)] * 200,
...     progress=False,
... )
>>> bool(history["loss"][-1] < 0.1 * history["loss"][0])
True

The package, from the ground up:

* `optfn.core` has the protocol of a transformation, and applies a rule to the leaves of a tree.
  `optfn.leaves` has arrays that hold several tensors (packed, stacked), and `optfn.interop` checks
  models of flax and equinox.
* `optfn.mesh` divides params, state and batch over the devices of a mesh, names the arrays of an
  optimizer's state, and has the collectives and the options of compilers.
* `optfn.transforms` are the links of a chain, `optfn.wrappers` enclose a chain, and
  `optfn.optimizers` are whole chains. `optfn.schedules` are learning rates as functions of the
  step.
* `optfn.loss` is the loss of a step: its one trace, and recomputation in the backward pass.
  `optfn.tables` differentiates embedding tables by rows; `optfn.sparse` has its public names.
* `optfn.compression` compresses exchanges, and `optfn.pipeline` divides a model by its depth.
  `optfn.distributed` has the public names of training on several devices, and `optfn.workers` the
  class `Workers`.
* `optfn.train` is the training step, `optfn.checkpoint` moves its state to files and back, and
  `optfn.plan` finds its memory and its seconds before it runs.
* `optfn.run` is the loop around the step, and `optfn.plot` draws.
"""

# No import needs an extra: `plot` imports matplotlib, and `run` orbax, when they use it.
from optfn import distributed, plot, schedules, sparse
from optfn._version import __version__
from optfn.checkpoint.checkpoint import (
    load_checkpoint,
    load_params,
    restore_checkpoint,
    save_checkpoint,
)
from optfn.checkpoint.loading import load_state_dict
from optfn.checkpoint.state_dict import averaged_params, state_dict, summary
from optfn.compression.dgc_momentum import dgc_momentum
from optfn.core.updates import apply_updates
from optfn.leaves.nodes import Packed, Stacked
from optfn.leaves.packed import pack, unpack
from optfn.leaves.patterns import NORMS_AND_BIASES
from optfn.loss.mean import Mean
from optfn.loss.recomputation.recompute import recompute
from optfn.optimizers.adagrad import adadelta, adagrad, decayed_adagrad, rmsprop
from optfn.optimizers.adam import adam
from optfn.optimizers.adam_family import adamax, adamw, lamb
from optfn.optimizers.ftrl import ftrl
from optfn.optimizers.muon import muon
from optfn.optimizers.sgd import asgd, lars, momentum, sgd
from optfn.plan.inspection import assert_in_place
from optfn.run.evaluation import over_batches
from optfn.run.loop import fit, minimize
from optfn.run.shuffled import shuffled
from optfn.run.statistics import estimate_statistics
from optfn.train.state import TrainState
from optfn.train.step import TrainStep, make_train_step
from optfn.transforms.adam import scale_by_adam
from optfn.transforms.adamax import scale_by_adamax
from optfn.transforms.asgd import scale_by_asgd
from optfn.transforms.catch_up_adam import scale_by_catch_up_adam
from optfn.transforms.clipping import clip_by_global_norm, clip_by_norm, clip_by_value
from optfn.transforms.ftrl import ftrl_proximal
from optfn.transforms.lamb import scale_by_lamb
from optfn.transforms.learning_rate import scale_by_learning_rate
from optfn.transforms.moment import (
    scale_by_adadelta,
    scale_by_adagrad,
    scale_by_decayed_adagrad,
    scale_by_momentum,
    scale_by_rms,
)
from optfn.transforms.muon import scale_by_muon
from optfn.transforms.quantized_adam import scale_by_quantized_adam
from optfn.transforms.rates import get_learning_rate, set_learning_rate
from optfn.transforms.regularization import add_decayed_weights, l1_decay, l2_decay
from optfn.transforms.scaling import scale_by_lars, scale_by_trust_ratio
from optfn.wrappers.accumulation import accumulate
from optfn.wrappers.attributes import ParamAttr, chain
from optfn.wrappers.averaging import exponential_moving_average, model_average
from optfn.wrappers.loss_scale import dynamic_loss_scale, loss_scale
from optfn.wrappers.master_weights import master_weights
from optfn.wrappers.metrics import metrics, record_metrics
from optfn.wrappers.nonfinite import skip_nonfinite
from optfn.wrappers.spikes import skip_spikes

# Type checkers take a name that is imported here, but not listed, as private.
__all__ = [
    "NORMS_AND_BIASES", "Mean", "Packed", "ParamAttr", "Stacked", "TrainState", "TrainStep",
    "accumulate", "adadelta", "adagrad", "adam", "adamax", "adamw", "add_decayed_weights",
    "apply_updates", "asgd", "assert_in_place", "averaged_params", "chain", "clip_by_global_norm",
    "clip_by_norm", "clip_by_value", "decayed_adagrad", "dgc_momentum", "distributed",
    "dynamic_loss_scale", "estimate_statistics", "exponential_moving_average", "fit", "ftrl",
    "ftrl_proximal", "get_learning_rate", "l1_decay", "l2_decay", "lamb", "lars", "load_checkpoint",
    "load_params", "load_state_dict", "loss_scale", "make_train_step", "master_weights", "metrics",
    "minimize", "model_average", "momentum", "muon", "over_batches", "pack", "plot", "recompute",
    "record_metrics", "restore_checkpoint", "rmsprop", "save_checkpoint", "scale_by_adadelta",
    "scale_by_adagrad", "scale_by_adam", "scale_by_adamax", "scale_by_asgd",
    "scale_by_catch_up_adam", "scale_by_decayed_adagrad", "scale_by_lamb", "scale_by_lars",
    "scale_by_learning_rate", "scale_by_momentum", "scale_by_muon", "scale_by_quantized_adam",
    "scale_by_rms", "scale_by_trust_ratio", "schedules", "set_learning_rate", "sgd", "shuffled",
    "skip_nonfinite", "skip_spikes", "sparse", "state_dict", "summary", "unpack",
]  # fmt: skip
