"""How to build every public transform and optimizer, for the tests that run over all of them.

`clip_of` and `penalty_of` build what the references' vocabulary names.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optfn
from optfn import core
from optfn.distributed import exchange, quantize, top_k


class Entry(NamedTuple):
    """One way to build a public transform."""

    name: str  # of the factory in optfn
    make: Callable[..., optax.GradientTransformationExtraArgs]  # optimizers take more options
    complex_leaves: bool = False
    needs_params: bool = False
    wide_updates: bool = False  # updates of narrow parameters are float32
    hides_nan: bool = False  # a gradient that is not finite is skipped
    quantized: bool = False  # moments in fewer bits, of other shapes
    extra: Any = ()  # keyword arguments of update, as pairs


def _optimizer(name: str, *args: Any, **options: Any) -> Entry:
    fields = {k: options.pop(k) for k in Entry._fields if k in options}
    return Entry(name, lambda **more: getattr(optfn, name)(*args, **options | more), **fields)


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

# One entry per optimizer and flag that changes its program; the names are test ids.
OPTIMIZERS: dict[str, Entry] = {
    "sgd": _optimizer("sgd", LR, complex_leaves=True),
    "momentum": _optimizer("momentum", LR, 0.9, complex_leaves=True),
    "momentum_nesterov": _optimizer("momentum", LR, 0.9, nesterov=True, complex_leaves=True),
    "lars": _optimizer("lars", LR, 0.9, lars_coeff=0.1, needs_params=True, complex_leaves=True),
    "asgd": _optimizer("asgd", LR, needs_params=True, complex_leaves=True),
    "asgd_batches": _optimizer(
        "asgd", LR, batch_num=3, weight_decay=0.01, needs_params=True, complex_leaves=True
    ),
    "adagrad": _optimizer("adagrad", LR, complex_leaves=True),
    "decayed_adagrad": _optimizer("decayed_adagrad", LR, complex_leaves=True),
    "adadelta": _optimizer("adadelta", 1.0, eps=1e-2, complex_leaves=True),
    "rmsprop": _optimizer("rmsprop", 0.01, momentum=0.5, complex_leaves=True),
    "rmsprop_centered": _optimizer("rmsprop", 0.01, centered=True, complex_leaves=True),
    "adam": _optimizer("adam", LR, complex_leaves=True),
    "adam_algorithm_1": _optimizer("adam", LR, eps_hat=False, complex_leaves=True),
    "adamw": _optimizer("adamw", LR, weight_decay=0.1, needs_params=True, complex_leaves=True),
    "adamw_decay_schedule": _optimizer(
        "adamw",
        LR,
        weight_decay=optfn.schedules.cosine(0.1, 2, 5),
        needs_params=True,
        complex_leaves=True,
    ),
    "adamw_exclude": _optimizer(
        "adamw", LR, exclude=lambda path: True, needs_params=True, complex_leaves=True
    ),
    "adam_lazy": _optimizer("adam", LR, lazy=True, complex_leaves=True),
    "adamw_lazy_exact": _optimizer("adamw", LR, lazy="exact", weight_decay=0.1, needs_params=True),
    "adam_bfloat16": _optimizer("adam", LR, moment_dtype="bfloat16", quantized=True),
    "adamw_int8": _optimizer("adamw", LR, moment_dtype="int8", needs_params=True, quantized=True),
    "adamax": _optimizer("adamax", LR, complex_leaves=True),
    "ftrl": _optimizer("ftrl", LR, l1=0.01, l2=0.01, needs_params=True),
    "ftrl_dense_rows": _optimizer("ftrl", LR, l1=0.01, l2=0.01, lazy=False, needs_params=True),
    "lamb": _optimizer("lamb", 0.01, needs_params=True, complex_leaves=True),
    "lamb_corrected": _optimizer(
        "lamb", 0.01, bias_correction=True, needs_params=True, complex_leaves=True
    ),
    "adam_clip_l2": _optimizer(
        "adam",
        optfn.schedules.noam(64, 10),
        grad_clip=optfn.clip_by_global_norm(1.0),
        regularization=optfn.l2_decay(0.01),
        complex_leaves=True,
        needs_params=True,
    ),
    "sgd_clip_l1": _optimizer(
        "sgd",
        LR,
        grad_clip=optfn.clip_by_value(0.5),
        regularization=optfn.l1_decay(0.01),
        needs_params=True,
    ),
}

TRANSFORMS: dict[str, Entry] = {
    "l1_decay": Entry("l1_decay", lambda: optfn.l1_decay(0.1), needs_params=True),
    "l2_decay": Entry(
        "l2_decay", lambda: optfn.l2_decay(0.1), complex_leaves=True, needs_params=True
    ),
    "add_decayed_weights": Entry(
        "add_decayed_weights",
        lambda: optfn.add_decayed_weights(0.1),
        complex_leaves=True,
        needs_params=True,
    ),
    "clip_by_value": Entry("clip_by_value", lambda: optfn.clip_by_value(0.5, -0.25)),
    "clip_by_norm": Entry("clip_by_norm", lambda: optfn.clip_by_norm(0.5), complex_leaves=True),
    "clip_by_global_norm": Entry(
        "clip_by_global_norm", lambda: optfn.clip_by_global_norm(0.5), complex_leaves=True
    ),
    "clip_by_global_norm_off": Entry(
        "clip_by_global_norm",
        lambda: optfn.clip_by_global_norm(float("inf")),
        complex_leaves=True,
    ),
    "scale_by_momentum": Entry(
        "scale_by_momentum", lambda: optfn.scale_by_momentum(0.9), complex_leaves=True
    ),
    "scale_by_adagrad": Entry(
        "scale_by_adagrad", lambda: optfn.scale_by_adagrad(), complex_leaves=True
    ),
    "scale_by_decayed_adagrad": Entry(
        "scale_by_decayed_adagrad", lambda: optfn.scale_by_decayed_adagrad(), complex_leaves=True
    ),
    "scale_by_adadelta": Entry(
        "scale_by_adadelta", lambda: optfn.scale_by_adadelta(), complex_leaves=True
    ),
    "scale_by_rms": Entry(
        "scale_by_rms", lambda: optfn.scale_by_rms(centered=True), complex_leaves=True
    ),
    "scale_by_adam": Entry("scale_by_adam", lambda: optfn.scale_by_adam(), complex_leaves=True),
    "scale_by_catch_up_adam": Entry(
        "scale_by_catch_up_adam", lambda: optfn.scale_by_catch_up_adam()
    ),
    "scale_by_quantized_adam": Entry(
        "scale_by_quantized_adam", lambda: optfn.scale_by_quantized_adam(), quantized=True
    ),
    "scale_by_adamax": Entry(
        "scale_by_adamax", lambda: optfn.scale_by_adamax(), complex_leaves=True
    ),
    "scale_by_asgd": Entry("scale_by_asgd", lambda: optfn.scale_by_asgd(2), complex_leaves=True),
    "scale_by_learning_rate": Entry(
        "scale_by_learning_rate", lambda: optfn.scale_by_learning_rate(LR), complex_leaves=True
    ),
    "scale_by_learning_rate_schedule": Entry(
        "scale_by_learning_rate",
        lambda: optfn.scale_by_learning_rate(optfn.schedules.cosine(LR, 2, 5)),
        complex_leaves=True,
    ),
    "scale_by_trust_ratio": Entry(
        "scale_by_trust_ratio",
        lambda: optfn.scale_by_trust_ratio(),
        complex_leaves=True,
        needs_params=True,
    ),
    "scale_by_lamb": Entry(
        "scale_by_lamb", lambda: optfn.scale_by_lamb(), needs_params=True, complex_leaves=True
    ),
    "scale_by_lars": Entry(
        "scale_by_lars", lambda: optfn.scale_by_lars(), needs_params=True, complex_leaves=True
    ),
    "ftrl_proximal": Entry("ftrl_proximal", lambda: optfn.ftrl_proximal(LR), needs_params=True),
    "reduce_on_plateau": Entry(
        "schedules.reduce_on_plateau",
        lambda: optfn.schedules.reduce_on_plateau(LR, patience=1),
        complex_leaves=True,
        extra=(("value", 1.0),),
    ),
}

# Each matches something in every tree of the contract tests.
ATTRS = {
    r".*w|0|z": optfn.ParamAttr(learning_rate=0.5, regularization=optfn.l2_decay(0.1)),
    r".*": optfn.ParamAttr(need_clip=False),
}

WRAPPERS: dict[str, Entry] = {
    "master_weights": Entry(
        "master_weights",
        lambda: optfn.master_weights(optfn.adam(LR)),
        complex_leaves=True,
        needs_params=True,
        wide_updates=True,
    ),
    "multi_precision": Entry(
        "ftrl",
        lambda: optfn.ftrl(LR, lazy=False, multi_precision=True),
        needs_params=True,
        wide_updates=True,
    ),
    "param_attrs": Entry(
        "momentum",
        lambda: optfn.momentum(LR, 0.9, grad_clip=optfn.clip_by_norm(0.5), param_attrs=ATTRS),
        complex_leaves=True,
        needs_params=True,
    ),
    "master_weights_accumulate_attributes": Entry(
        "master_weights",
        lambda: optfn.master_weights(optfn.accumulate(optfn.adam(LR, param_attrs=ATTRS), 2)),
        complex_leaves=True,
        needs_params=True,
        wide_updates=True,
    ),
    "accumulate": Entry(
        "accumulate", lambda: optfn.accumulate(optfn.adam(LR), 2), complex_leaves=True
    ),
    "skip_nonfinite": Entry(
        "skip_nonfinite",
        lambda: optfn.skip_nonfinite(optfn.rmsprop(LR)),
        complex_leaves=True,
        hides_nan=True,
    ),
    "record_metrics": Entry(
        "record_metrics",
        lambda: optfn.record_metrics(
            optfn.sgd(LR, grad_clip=optfn.clip_by_global_norm(1.0)),
        ),
        complex_leaves=True,
        needs_params=True,
    ),
    "exponential_moving_average": Entry(
        "exponential_moving_average",
        lambda: optfn.chain(optfn.sgd(LR), optfn.exponential_moving_average(thres_steps=True)),
        complex_leaves=True,
        needs_params=True,
    ),
    "model_average": Entry(
        "model_average",
        lambda: optfn.chain(
            optfn.sgd(LR), optfn.model_average(0.5, min_average_window=1, max_average_window=2)
        ),
        complex_leaves=True,
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
        complex_leaves=True,
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
    ),
    "exchange_quantized": Entry(
        "distributed.exchange",
        lambda: on_one_worker(exchange(quantize(8), min_size=1)),
        hides_nan=True,
    ),
}
ALL = EVERYTHING | EXCHANGES

# What differs as a program, without the transforms that are a link of one of these optimizers.
_ALONE = (
    "clip_by_value", "clip_by_norm", "scale_by_learning_rate_schedule", "scale_by_trust_ratio",
    "reduce_on_plateau",
)  # fmt: skip
PROGRAMS = OPTIMIZERS | {name: TRANSFORMS[name] for name in _ALONE} | WRAPPERS | EXCHANGES


def in_turn(*kinds: Any, entries: dict[str, Entry] = EVERYTHING) -> list[Any]:
    """Return pytest parameters (entry, kind): each entry with the next kind, to go round once."""
    return [
        pytest.param(entry, kinds[i % len(kinds)], id=f"{name}-{i % len(kinds)}")
        for i, (name, entry) in enumerate(entries.items())
    ]


# Public names that are not factories of transforms; each has its own tests.
OTHER_NAMES = {
    "Packed",
    "ParamAttr",
    "Stacked",
    "TrainState",
    "TrainStep",
    "apply_updates",
    "assert_in_place",
    "averaged_params",
    "chain",
    "dgc_momentum",
    "distributed",
    "get_learning_rate",
    "load_checkpoint",
    "load_params",
    "load_state_dict",
    "make_train_step",
    "metrics",
    "minimize",
    "fit",
    "pack",
    "plot",
    "recompute",
    "restore_checkpoint",
    "save_checkpoint",
    "schedules",
    "set_learning_rate",
    "sparse",
    "state_dict",
    "summary",
    "unpack",
}


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
