"""How to build every public transform and optimizer, for the tests that run over all of them.

`clip_of` and `penalty_of` build what the references' vocabulary names.
"""

from typing import Any

import catalogue
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from catalogue import TRANSFORMS, Entry, entry

import optfn
from optfn import core
from optfn.distributed import exchange, quantize, top_k


def on_one_worker(tx: Any) -> Any:
    """Return a transform that exchanges, in a run of one worker: its axis is bound in `update`."""

    def update(updates: Any, state: Any, params: Any = None, **extra: Any) -> Any:
        found = []

        def of_worker(_: Any) -> list[Any]:
            found.append(jax.tree.flatten(tx.update(updates, state, params, **extra)))
            return [x for x in found[0][0] if not isinstance(x, np.ndarray)]

        mapped = jax.vmap(of_worker, axis_name="data")
        arrays = iter(jax.jit(mapped)(jnp.zeros(1)))  # as in the step of a mesh
        leaves, structure = found[0]
        # The zero of an integer leaf is a NumPy array, by which it is known.
        leaves = [x if isinstance(x, np.ndarray) else next(arrays)[0] for x in leaves]
        return structure.unflatten(leaves)

    made = core.Transform(tx.init, update)
    made.call = tx.call
    return made


LR = 0.1

OPTIMIZERS: dict[str, Entry] = {}
for name, row in catalogue.OPTIMIZERS.items():
    OPTIMIZERS |= row.entries(name)

# Each matches something in every tree of the contract tests.
ATTRS = {
    r".*w|0|z": optfn.ParamAttr(learning_rate=0.5, regularization=optfn.l2_decay(0.1)),
    r".*": optfn.ParamAttr(need_clip=False),
}

WRAPPERS: dict[str, Entry] = {
    "master_weights": entry("master_weights", optfn.adam(LR), needs_params=True, wide_updates=True),
    "multi_precision": entry(
        "ftrl",
        LR,
        lazy=False,
        multi_precision=True,
        needs_params=True,
        wide_updates=True,
        complex_leaves=False,
    ),
    "param_attrs": entry(
        "momentum", LR, 0.9, grad_clip=optfn.clip_by_norm(0.5), param_attrs=ATTRS, needs_params=True
    ),
    "master_weights_24": entry(
        "master_weights",
        optfn.adam(LR),
        bits=24,
        needs_params=True,
        wide_updates=True,
        bfloat16_only=True,
    ),
    "master_weights_accumulate_attributes": entry(
        "master_weights",
        optfn.accumulate(optfn.adam(LR, param_attrs=ATTRS), 2),
        needs_params=True,
        wide_updates=True,
    ),
    "accumulate": entry("accumulate", optfn.adam(LR), 2),
    "skip_nonfinite": entry("skip_nonfinite", optfn.rmsprop(LR), hides_nan=True),
    "skip_spikes": entry("skip_spikes", optfn.adam(LR), window=3),
    "dynamic_loss_scale": entry(
        "dynamic_loss_scale", optfn.adam(LR), initial_scale=2.0, hides_nan=True
    ),
    "record_metrics": entry(
        "record_metrics",
        optfn.sgd(LR, grad_clip=optfn.clip_by_global_norm(1.0)),
        needs_params=True,
        of_any_params=True,
    ),
    "exponential_moving_average": Entry(
        "exponential_moving_average",
        lambda: optfn.chain(optfn.sgd(LR), optfn.exponential_moving_average(thres_steps=True)),
        needs_params=True,
    ),
    "model_average": Entry(
        "model_average",
        lambda: optfn.chain(
            optfn.sgd(LR), optfn.model_average(0.5, min_average_window=1, max_average_window=2)
        ),
        needs_params=True,
    ),
    "stack": Entry(
        "master_weights",
        lambda: optfn.record_metrics(
            optfn.master_weights(
                optfn.skip_nonfinite(
                    optfn.accumulate(
                        optfn.chain(
                            optfn.adamw(LR, grad_clip=optfn.clip_by_global_norm(1.0)),
                            optfn.exponential_moving_average(0.9),
                            optfn.model_average(0.5),
                        ),
                        2,
                    )
                )
            )
        ),
        needs_params=True,
        wide_updates=True,
        hides_nan=True,
    ),
}

EVERYTHING = OPTIMIZERS | TRANSFORMS | WRAPPERS

# What they give is compressed: they have the contract of all transforms, but no derivative, and
# they treat rows, sharded and stacked leaves in ways of their own.
EXCHANGES: dict[str, Entry] = {
    "exchange": Entry(
        "distributed.exchange",
        lambda: on_one_worker(exchange(top_k(0.5, chunk=4), min_size=4)),
        hides_nan=True,
        complex_leaves=False,
    ),
    "exchange_quantized": Entry(
        "distributed.exchange",
        lambda: on_one_worker(exchange(quantize(8), min_size=1)),
        hides_nan=True,
        complex_leaves=False,
    ),
}
ALL = EVERYTHING | EXCHANGES

# What differs as a program, without the transforms that are a link of one of these optimizers.
_ALONE = (
    "clip_by_value", "clip_by_norm", "scale_by_learning_rate_schedule", "scale_by_trust_ratio",
    "reduce_on_plateau",
)  # fmt: skip
PROGRAMS = OPTIMIZERS | {name: TRANSFORMS[name] for name in _ALONE} | WRAPPERS | EXCHANGES

# What CI tries where all programs would take long: each kind of state, arithmetic and wrapper once,
# and once more by other names.
SUITE = (
    "sgd", "momentum_int8", "rmsprop_centered", "adam_lazy", "adamw_decay_schedule", "adamax",
    "lamb", "muon_int8", "clip_by_value", "param_attrs", "skip_nonfinite",
    "exponential_moving_average", "exchange_quantized",
)  # fmt: skip
OTHER_SUITE = (
    "sgd_clip_l1", "lars", "decayed_adagrad", "rmsprop_bfloat16", "adam_bfloat16",
    "adamw_exclude", "adamax_int8", "lamb_corrected", "ftrl", "reduce_on_plateau",
    "master_weights_24", "skip_spikes", "model_average",
)  # fmt: skip
SUITE_OF_OPTIMIZERS = tuple(name for name in SUITE if name in OPTIMIZERS)
# Transforms alone.
SUITE_OF_TRANSFORMS = (
    "l1_decay", "clip_by_norm", "scale_by_momentum", "scale_by_adam", "scale_by_learning_rate",
    "ftrl_proximal",
)  # fmt: skip


def in_turn(*kinds: Any, entries: dict[str, Entry] = EVERYTHING) -> list[Any]:
    """Return pytest parameters (entry, kind): each entry with the next kind, to go round once."""
    return [
        pytest.param(one, kinds[i % len(kinds)], id=name)
        for i, (name, one) in enumerate(entries.items())
    ]


# Public names that are not factories of transforms; each has its own tests.
OTHER_NAMES = {
    "Mean", "NORMS_AND_BIASES", "Packed", "ParamAttr", "Stacked", "TrainState", "TrainStep",
    "apply_updates", "assert_in_place", "averaged_params", "chain", "dgc_momentum", "distributed",
    "estimate_statistics",
    "get_learning_rate", "load_checkpoint", "load_params", "load_state_dict", "loss_scale",
    "make_train_step", "metrics", "minimize", "fit", "over_batches", "pack", "plot", "recompute",
    "restore_checkpoint", "save_checkpoint", "schedules", "set_learning_rate", "shuffled", "sparse",
    "state_dict", "summary", "unpack",
}  # fmt: skip


def clip_of(spec: tuple | None) -> Any:
    """Return optfn's clip for ("value", max) and so on."""
    if spec is None:
        return None
    kinds = {
        "value": optfn.clip_by_value,
        "norm": optfn.clip_by_norm,
        "global_norm": optfn.clip_by_global_norm,
    }
    return kinds[spec[0]](*spec[1:])


def penalty_of(spec: tuple | None) -> Any:
    """Return optfn's regularization for ("l1", c) and ("l2", c)."""
    return None if spec is None else {"l1": optfn.l1_decay, "l2": optfn.l2_decay}[spec[0]](spec[1])


def plateau_rates(tx: Any, metrics: np.ndarray) -> np.ndarray:
    """Return what multiplies the updates before each metric is seen."""

    @jax.jit
    def steps(metrics: Any) -> Any:
        def step(state: Any, metric: Any) -> Any:
            updates, state = tx.update(jnp.ones(()), state, jnp.zeros(()), value=metric)
            return state, updates

        return jax.lax.scan(step, tx.init(jnp.zeros(())), metrics)[1]

    return np.asarray(steps(jnp.asarray(metrics, jnp.float32)))
