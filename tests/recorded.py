"""The recordings of Paddle, and their hyper-parameters in the words of optfn.

`translate` and `translate_schedule` turn a case's Paddle hyper-parameters into the vocabulary of
optfn, which is also that of the references.
"""

import functools
import json
import re
from pathlib import Path
from typing import Any, NamedTuple

import catalogue
import numpy as np
from registry import clip_of, penalty_of

import optfn

RECORDINGS = Path(__file__).parent / "recordings"
MANIFEST = json.loads((RECORDINGS / "manifest.json").read_text())
CASES = {case["case"]: case for case in MANIFEST["cases"]}

# What is not compared, and why

ALIAS = "1.8.5 moves p by the new u and without the rate; only its accumulators are compared"
_BEYOND = "beyond the fluid page: optfn.schedules does not have it"
SKIPPED: dict[str, str] = {
    "fluid18_adadelta": ALIAS,
    "fluid18_adadelta_rho": ALIAS,
    "fluid18_adadelta_eps": ALIAS,
    "p26_lars_nowd": "2.6.2 leaves the trust ratio out where the weight decay is 0, as it is here",
    "fluid18_lr_dygraph_LinearLrWarmup": "1.8.5's dygraph warm-up ignores start_lr and starts at 1",
    "p33_lr_MultiplicativeDecay": _BEYOND,
    "p33_lr_CyclicLR": _BEYOND,
    "p33_lr_LinearLR": _BEYOND,
    "p33_lr_CosineAnnealingWarmRestarts": _BEYOND,
}
# Parameters and steps that are left out of a case of which the rest is compared.
_NO_RATIO = "this version leaves the trust ratio out where the weight decay is 0, so for excluded b"
SKIPPED_PARAMS: dict[str, tuple[set[str], str]] = {
    "p26_lars_exclude": ({"b"}, _NO_RATIO),
    "p26_lamb_exclude": ({"b"}, _NO_RATIO),
    "p33_lamb_exclude": ({"b"}, _NO_RATIO),
}
SKIPPED_STEPS: dict[str, tuple[set[int], str]] = {
    "fluid18_lr_static_polynomial_decay__cycle": (
        {45},
        "1.8.5 rounds 45·(1/15) up to 4 cycles in float32",
    ),
}


def skipped() -> dict[str, str]:
    """Return what is not compared, by case, with the reasons."""
    partly = {**SKIPPED_PARAMS, **SKIPPED_STEPS}
    return SKIPPED | {k: f"only {sorted(what)}: {why}" for k, (what, why) in partly.items()}


# From Paddle's words to optfn's


class Setup(NamedTuple):
    """An optimizer and its arguments, in the words of `references.run`."""

    optimizer: str
    hyper: dict[str, Any]  # the optimizer's own arguments; learning_rate may be a Schedule
    grad_clip: tuple | None = None
    regularization: tuple | None = None
    exclude: tuple[str, ...] = ()  # parameters whose name contains one of these have no decay
    param_attrs: dict[str, dict[str, Any]] | None = None
    accumulator: float = 0.0  # what ftrl's squared accumulator starts from

    def excluded(self, path: str) -> bool:
        """Whether the parameter gets no weight decay."""
        return any(part in path for part in self.exclude)


class Schedule(NamedTuple):
    """A schedule and its arguments, in the words of `optfn.schedules`."""

    name: str
    args: dict[str, Any]
    first: int = 0  # the entry of the recording that is our step 0

    def build(self, module: Any) -> Any:
        """Return the schedule of `module`, optfn's or the references'; inner ones too."""
        args = {k: v.build(module) if isinstance(v, Schedule) else v for k, v in self.args.items()}
        return getattr(module, self.name)(**args)


def plain(name: str) -> str:
    """Return a name without case, underscores and the words at its end that Paddle adds."""
    return re.sub("(optimizer|decay)$", "", name.lower().replace("_", ""))


OPTIMIZERS = {plain(name): name for name in catalogue.OPTIMIZERS} | {"larsmomentum": "lars"}
ARGUMENTS = {  # Paddle's names of an optimizer's arguments, where they are not ours
    "epsilon": "eps",
    "beta1": "b1",
    "beta2": "b2",
    "use_nesterov": "nesterov",
    "lamb_weight_decay": "weight_decay",
}
SCHEDULES = {plain(name): name for name in optfn.schedules.__all__} | {
    "cosineannealing": "cosine",
    "linearlrwarmup": "linear_warmup",
    "reducelronplateau": "reduce_on_plateau",
    "onecyclelr": "one_cycle",
}


def translate(case: dict[str, Any]) -> Setup:
    """Return the setup of a case that has a trajectory."""
    api = case["api"].removeprefix("raw op ").split("(")[0].split(".")[-1]
    optimizer = OPTIMIZERS[plain(api)]
    paddle = {k: v for k, v in case["hyper"].items() if k != "lazy_mode"}
    setup: dict[str, Any] = {"grad_clip": _tuple(paddle.pop("grad_clip", None))}

    # A weight decay of 2.x and 3.x is L2 regularization, or what it says; AdamW's is its own.
    penalty = paddle.pop("regularization", None)
    if optimizer != "adamw" and "weight_decay" in paddle:
        penalty = _penalty(paddle.pop("weight_decay"))
    setup["regularization"] = _tuple(penalty)

    exclude = paddle.pop("exclude_contains", None) or paddle.pop("exclude_from_weight_decay", ())
    setup["exclude"] = (exclude,) if isinstance(exclude, str) else tuple(exclude)

    if "param_attr" in case:
        setup["param_attrs"] = {k: _attributes(v) for k, v in case["param_attr"].items()}
    if "groups" in paddle:
        setup["param_attrs"] = _groups(paddle.pop("groups"))

    if "boundaries" in paddle:
        args = {k: paddle.pop(k) for k in ("boundaries", "values")}
        paddle["learning_rate"] = Schedule("piecewise", args)
    if paddle.pop("sched", None) == "StepDecay":
        args = {"decay_rate": paddle.pop("gamma"), "step_size": paddle.pop("step_size")}
        args["learning_rate"] = paddle["learning_rate"]
        paddle["learning_rate"] = Schedule("step_decay", args)

    hyper = {ARGUMENTS.get(k, k): v for k, v in paddle.items()}
    quirks = " ".join(case["quirks"])
    if optimizer == "adam":
        flags = "adam_eps_unscaled" in quirks, "adam_eps_scaled" in quirks
        assert case["family"] == "sparse" or flags[0] != flags[1]
        hyper["eps_hat"] = "adam_eps_unscaled" in quirks
    if optimizer == "lamb":
        hyper["bias_correction"] = "lamb_bias_corrected" in quirks
    if "ftrl_python_passes_l1_as_l2" in quirks:
        hyper["l2"] = hyper["l1"]  # what the operator, which is right, was given
    if "('SquaredAccumulator', 0.1)" in case["notes"]:
        setup["accumulator"] = 0.1
    return Setup(optimizer, hyper, **setup)


def _tuple(value: Any) -> tuple | None:
    return None if value is None else tuple(value)


def _penalty(value: Any) -> Any:
    return ["l2", value] if isinstance(value, float) else value


def _attributes(paddle: dict[str, Any]) -> dict[str, Any]:
    """Return a ParamAttr's arguments; only `regularizer` has another name here."""
    words = {"regularizer": "regularization"}
    return {words.get(k, k): _tuple(v) if k in words else v for k, v in paddle.items()}


def _groups(groups: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return the attributes that say what parameter groups say: a group's rate is a factor."""
    attrs: dict[str, dict[str, Any]] = {}
    for group in groups:
        own = {"learning_rate": group["learning_rate"]} if "learning_rate" in group else {}
        if "weight_decay" in group:
            own["regularization"] = ("l2", group["weight_decay"])
        attrs |= dict.fromkeys(group["params"], own)
    return attrs


def translate_schedule(case: dict[str, Any]) -> Schedule:
    """Return the schedule of a case that is a series of rates."""
    api = case["api"].split(".")[-1]
    name, paddle, recent = SCHEDULES[plain(api)], dict(case["hyper"]), case["paddle"] != "1.8.5"
    words = {"end_lr": "end_learning_rate"} if name == "polynomial" else {}
    words |= {"gamma": "decay_rate", "factor": "decay_rate"}
    args = {words.get(k, k): v for k, v in paddle.items()}
    args.pop("begin", None)  # 1.8.5: always 0, as here
    if name in ("exponential", "natural_exp", "inverse_time") and recent:
        args["decay_steps"] = 1
    if api == "CosineAnnealingDecay":
        args = {"learning_rate": args["learning_rate"], "epochs": args["T_max"]}
        args["step_each_epoch"] = 1
    if name == "one_cycle":  # divide_factor=25 and end_learning_rate=1e-4 are Paddle's defaults
        peak = args.pop("max_learning_rate")
        args |= {"peak": peak, "final_div_factor": peak / 25 / 1e-4}
    if name == "lambda_decay":
        assert args["lr_lambda"] == "0.95**x"
        args["lr_lambda"] = lambda i: 0.95**i
    if name == "linear_warmup" and "boundaries" in args:
        # The inner schedule of 2.x and 3.x counts from the end of the warm-up.
        shift = args["warmup_steps"] if recent else 0
        inner = {"boundaries": [b + shift for b in args.pop("boundaries")]}
        inner["values"] = args.pop("values")
        args["learning_rate"] = Schedule("piecewise", inner)
    # 2.x and 3.x have a rate of 0 before the first step of noam.
    return Schedule(name, args, first=1 if name == "noam" and recent else 0)


# The arrays, and the optimizer


@functools.cache
def arrays(name: str) -> dict[str, np.ndarray]:
    """Return the arrays of a case."""
    with np.load(RECORDINGS / CASES[name]["file"]) as file:
        return {k: file[k] for k in file}


def leaves(name: str, kind: str) -> dict[str, np.ndarray]:
    """Return the arrays `kind/<param>` of a case by parameter."""
    return {k.split("/")[1]: v for k, v in arrays(name).items() if k.startswith(kind + "/")}


def attributes_of(attrs: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Return the ParamAttrs by path."""
    made = {}
    for path, own in attrs.items():
        if "regularization" in own:
            own = own | {"regularization": penalty_of(own["regularization"])}
        made[path] = optfn.ParamAttr(**own)
    return made


def build(setup: Setup, **options: Any) -> Any:
    """Return the optimizer, with `options` that the references do not know."""
    hyper = dict(setup.hyper) | options
    if isinstance(hyper["learning_rate"], Schedule):
        hyper["learning_rate"] = hyper["learning_rate"].build(optfn.schedules)
    if setup.exclude:
        hyper["exclude"] = setup.excluded
    if setup.param_attrs:
        hyper["param_attrs"] = attributes_of(setup.param_attrs)
    return getattr(optfn, setup.optimizer)(
        grad_clip=clip_of(setup.grad_clip),
        regularization=penalty_of(setup.regularization),
        **hyper,
    )
