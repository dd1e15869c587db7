"""What the tests need to know of an optimizer or a transform, in one row for each.

From the rows `registry.py` has what the contract tests run over, `test_references.py` the runs that
are compared with the references, `test_properties.py` the numbers to draw, and `test_project.py`
the promised signatures. `test_additions.py` says what an addition still lacks.
"""

import dataclasses
import operator
from collections.abc import Callable
from dataclasses import field
from typing import Any, NamedTuple

import optax

import optfn

Arguments = dict[str, Any]


class Entry(NamedTuple):
    """One way to build a public transform."""

    name: str  # of the factory in optfn
    make: Callable[..., optax.GradientTransformationExtraArgs]  # optimizers take more options
    complex_leaves: bool = True
    needs_params: bool = False
    wide_updates: bool = False  # updates of narrow parameters are float32
    hides_nan: bool = False  # a gradient that is not finite is skipped
    quantized: bool = False  # moments in fewer bits, of other shapes
    bfloat16_only: bool = False  # of the narrow dtypes
    of_any_params: bool = False  # nothing in the state has the shape of a parameter
    copies: bool = False  # an update is not in place: XLA copies or keeps arrays of a leaf's size
    extra: Any = ()  # keyword arguments of update, as pairs


def entry(name: str, *args: Any, **options: Any) -> Entry:
    """Return the entry of a call; options that are fields of Entry are not arguments of it."""
    fields = {k: options.pop(k) for k in Entry._fields if k in options}
    make = operator.attrgetter(name)(optfn)
    return Entry(name, lambda **more: make(*args, **options | more), **fields)


@dataclasses.dataclass(frozen=True)
class Optimizer:
    """The row of an optimizer.

    signature: its own arguments, as promised; the common ones follow.
    calls: for the contract tests, by test id, one call for each flag that changes the program, with
      a rate whose steps bfloat16 parameters can take. Fields of Entry hold for this call only.
    references: by test id, further calls that are compared with the reference, and another than the
      first one of `calls`.
    ranges: the least and the largest value that properties draw, where not those of all.
    makes_rows_dense: whether row-sparse gradients become dense, with a warning.
    """

    signature: str
    calls: dict[str, Arguments]
    references: dict[str, Arguments] = field(default_factory=dict)
    ranges: dict[str, tuple[float, float]] = field(default_factory=dict)
    needs_params: bool = False
    complex_leaves: bool = True
    makes_rows_dense: bool = False

    def entries(self, name: str) -> dict[str, Entry]:
        """Return what the contract tests run over."""
        common = {"needs_params": self.needs_params, "complex_leaves": self.complex_leaves}
        return {key: entry(name, **common | call) for key, call in self.calls.items()}

    def compared(self, name: str) -> dict[str, Arguments]:
        """Return the arguments that are compared with the reference."""
        plain = {k: v for k, v in self.calls[name].items() if k not in Entry._fields}
        return {name: plain} | self.references


def at(learning_rate: Any, **others: Any) -> Arguments:
    """Return keyword arguments."""
    return {"learning_rate": learning_rate, **others}


def spared(path: str) -> bool:
    """Tell whether a leaf has no weight decay, in the references."""
    return path == "b"


OPTIMIZERS: dict[str, Optimizer] = {
    "sgd": Optimizer(
        "learning_rate, *",
        calls={
            "sgd": at(0.1, of_any_params=True),
            "sgd_clip_l1": at(
                0.1,
                grad_clip=optfn.clip_by_value(0.5),
                regularization=optfn.l1_decay(0.01),
                complex_leaves=False,
                needs_params=True,
                of_any_params=True,
            ),
        },
    ),
    "momentum": Optimizer(
        "learning_rate, momentum, *, nesterov=False, moment_dtype=None",
        calls={
            "momentum": at(0.1, momentum=0.9),
            "momentum_nesterov": at(0.1, momentum=0.9, nesterov=True),
            "momentum_int8": at(
                0.1,
                momentum=0.9,
                nesterov=True,
                moment_dtype="int8",
                quantized=True,
                complex_leaves=False,
            ),
        },
        references={"momentum-nesterov": at(0.1, momentum=0.8, nesterov=True)},
        ranges={"momentum": (0.0, 1.0)},
    ),
    "lars": Optimizer(
        "learning_rate, momentum, *, lars_coeff=1e-3, lars_weight_decay=5e-4, eps=0.0, "
        "exclude=None, moment_dtype=None",
        calls={"lars": at(0.1, momentum=0.9, lars_coeff=0.1)},
        references={
            "lars": at(1.0, momentum=0.9),
            "lars-decay-eps": at(
                0.5, momentum=0.5, lars_coeff=0.1, lars_weight_decay=0.05, eps=0.1
            ),
            "lars-no-decay": at(0.5, momentum=0.9, lars_coeff=0.02, lars_weight_decay=0.0),
            "lars-exclude": at(
                0.5, momentum=0.9, lars_coeff=0.02, lars_weight_decay=0.1, exclude=spared
            ),
        },
        needs_params=True,
        makes_rows_dense=True,
    ),
    "asgd": Optimizer(
        "learning_rate=1e-3, *, batch_num=1, weight_decay=0.0",
        calls={
            "asgd": at(0.1, of_any_params=True),
            "asgd_batches": at(0.1, batch_num=3, weight_decay=0.01),
        },
        references={"asgd-4": at(0.1, batch_num=4, weight_decay=0.1)},
        needs_params=True,
        makes_rows_dense=True,
    ),
    "adagrad": Optimizer(
        "learning_rate, *, eps=1e-6, initial_accumulator_value=0.0",
        calls={"adagrad": at(0.1)},
        references={"adagrad-initial": at(0.1, eps=1e-3, initial_accumulator_value=0.1)},
        ranges={"eps": (0.0, 1e-2)},
    ),
    "decayed_adagrad": Optimizer(
        "learning_rate, *, decay=0.95, eps=1e-6", calls={"decayed_adagrad": at(0.1)}
    ),
    "adadelta": Optimizer(
        "learning_rate, *, rho=0.95, eps=1e-6",
        calls={"adadelta": at(1.0, eps=1e-2)},
        references={"adadelta": at(1.0)},
        makes_rows_dense=True,
    ),
    "rmsprop": Optimizer(
        "learning_rate, *, rho=0.95, eps=1e-6, momentum=0.0, centered=False, moment_dtype=None",
        calls={
            "rmsprop": at(0.01, momentum=0.5),
            "rmsprop_centered": at(0.01, centered=True),
            "rmsprop_bfloat16": at(  # a direction between the two moments
                0.01,
                momentum=0.5,
                moment_dtype="bfloat16",
                quantized=True,
                complex_leaves=False,
                copies=True,
            ),
        },
        references={
            "rmsprop": at(0.01),
            "rmsprop-centered": at(0.01, centered=True),
            "rmsprop-centered-momentum": at(0.01, rho=0.9, eps=1e-3, momentum=0.5, centered=True),
        },
    ),
    "adam": Optimizer(
        "learning_rate=1e-3, b1=0.9, b2=0.999, eps=1e-8, *, lazy=False, eps_hat=True, "
        "moment_dtype=None",
        calls={
            "adam": at(0.1),
            "adam_algorithm_1": at(0.1, eps_hat=False),
            "adam_lazy": at(0.1, lazy=True),
            "adam_bfloat16": at(0.1, moment_dtype="bfloat16", quantized=True, complex_leaves=False),
            "adam_clip_l2": at(
                optfn.schedules.noam(64, 10),
                grad_clip=optfn.clip_by_global_norm(1.0),
                regularization=optfn.l2_decay(0.01),
                needs_params=True,
            ),
        },
        references={"adam-algorithm-1": at(0.1, eps=1e-3, eps_hat=False)},
    ),
    "adamw": Optimizer(
        "learning_rate=1e-3, b1=0.9, b2=0.999, eps=1e-8, *, weight_decay=0.01, exclude=None, "
        "lazy=False, eps_hat=False, moment_dtype=None",
        calls={
            "adamw": at(0.1, weight_decay=0.1),
            "adamw_decay_schedule": at(0.1, weight_decay=optfn.schedules.cosine(0.1, 2, 5)),
            "adamw_exclude": at(0.1, exclude=lambda path: True),
            "adamw_lazy_exact": at(  # the update for a dense gradient reads the old moments
                0.1, lazy="exact", weight_decay=0.1, complex_leaves=False, copies=True
            ),
            "adamw_int8": at(0.1, moment_dtype="int8", quantized=True, complex_leaves=False),
        },
        references={
            "adamw-eps-hat": at(0.1, weight_decay=0.1, eps=1e-3, eps_hat=True),
            "adamw-exclude": at(0.1, weight_decay=0.1, exclude=spared),
        },
        needs_params=True,
    ),
    "adamax": Optimizer(
        "learning_rate=1e-3, b1=0.9, b2=0.999, eps=1e-8, *, moment_dtype=None",
        calls={
            "adamax": at(0.1),
            "adamax_int8": at(0.1, moment_dtype="int8", quantized=True, complex_leaves=False),
        },
        makes_rows_dense=True,
    ),
    "ftrl": Optimizer(
        "learning_rate, *, l1=0.0, l2=0.0, lr_power=-0.5, lazy=True",
        calls={
            "ftrl": at(0.1, l1=0.01, l2=0.01),
            "ftrl_dense_rows": at(0.1, l1=0.01, l2=0.01, lazy=False),
        },
        references={
            "ftrl": at(0.1),
            "ftrl-l1-l2": at(0.1, l1=0.5, l2=0.1),
            "ftrl-power": at(0.1, l1=0.1, lr_power=-0.7),
        },
        ranges={"learning_rate": (1e-2, 0.1)},
        needs_params=True,
        complex_leaves=False,
    ),
    "lamb": Optimizer(
        "learning_rate=1e-3, *, weight_decay=0.01, b1=0.9, b2=0.999, eps=1e-6, "
        "bias_correction=False, exclude=None, moment_dtype=None",
        calls={
            "lamb": at(0.01),
            "lamb_corrected": at(0.01, bias_correction=True),
            "lamb_int8": at(0.01, moment_dtype="int8", quantized=True, complex_leaves=False),
        },
        references={
            "lamb-bias-correction": at(0.01, weight_decay=0.1, bias_correction=True),
            "lamb-exclude": at(0.01, weight_decay=0.3, exclude=spared),
        },
        needs_params=True,
        makes_rows_dense=True,
    ),
    "muon": Optimizer(
        "learning_rate, *, matrices=None, momentum=0.95, nesterov=True, weight_decay=0.0, "
        "exclude=None, others=None, coefficients='jordan', scale='jordan', eps=1e-7, "
        "compute_dtype=None, moment_dtype=None",
        calls={
            "muon": at(0.1, weight_decay=0.1, copies=True),  # the matrices of the iteration
            "muon_int8": at(
                0.1,
                scale="moonlight",
                moment_dtype="int8",
                quantized=True,
                complex_leaves=False,
                copies=True,
            ),
        },
        references={
            "muon-plain": at(0.1, nesterov=False, momentum=0.8),
            "muon-moonlight": at(0.1, scale="moonlight", weight_decay=0.1, exclude=spared),
        },
        needs_params=True,
        makes_rows_dense=True,
    ),
}

TRANSFORMS: dict[str, Entry] = {
    "l1_decay": entry("l1_decay", 0.1, needs_params=True, of_any_params=True, complex_leaves=False),
    "l2_decay": entry("l2_decay", 0.1, needs_params=True, of_any_params=True),
    "add_decayed_weights": entry("add_decayed_weights", 0.1, needs_params=True, of_any_params=True),
    "clip_by_value": entry("clip_by_value", 0.5, -0.25, of_any_params=True, complex_leaves=False),
    "clip_by_norm": entry("clip_by_norm", 0.5, of_any_params=True),
    "clip_by_global_norm": entry("clip_by_global_norm", 0.5, of_any_params=True),
    "clip_by_global_norm_off": entry("clip_by_global_norm", float("inf"), of_any_params=True),
    "scale_by_momentum": entry("scale_by_momentum", 0.9),
    "scale_by_adagrad": entry("scale_by_adagrad"),
    "scale_by_decayed_adagrad": entry("scale_by_decayed_adagrad"),
    "scale_by_adadelta": entry("scale_by_adadelta"),
    "scale_by_rms": entry("scale_by_rms", centered=True),
    "scale_by_adam": entry("scale_by_adam"),
    "scale_by_catch_up_adam": entry("scale_by_catch_up_adam", complex_leaves=False),
    "scale_by_quantized_adam": entry(
        "scale_by_quantized_adam", quantized=True, complex_leaves=False
    ),
    "scale_by_adamax": entry("scale_by_adamax"),
    "scale_by_muon": entry("scale_by_muon"),
    "scale_by_asgd": entry("scale_by_asgd", 2),
    "scale_by_learning_rate": entry("scale_by_learning_rate", 0.1, of_any_params=True),
    "scale_by_learning_rate_schedule": entry(
        "scale_by_learning_rate", optfn.schedules.cosine(0.1, 2, 5), of_any_params=True
    ),
    "scale_by_trust_ratio": entry("scale_by_trust_ratio", needs_params=True, of_any_params=True),
    "scale_by_lamb": entry("scale_by_lamb", needs_params=True),
    "scale_by_lars": entry("scale_by_lars", needs_params=True, of_any_params=True),
    "ftrl_proximal": entry("ftrl_proximal", 0.1, needs_params=True, complex_leaves=False),
    "reduce_on_plateau": entry(
        "schedules.reduce_on_plateau", 0.1, patience=1, extra=(("value", 1.0),), of_any_params=True
    ),
}
