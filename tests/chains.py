"""Chains in right and in wrong orders, by name."""

import itertools
import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

import optfn
from optfn.distributed import deep_gradient_compression, exchange, quantize

PARAMS = {"w": jnp.array([1.0, -2.0, 3.0, 4.0]), "b": jnp.array([[2.0, -1.0], [0.5, 1.5]])}
NARROW = jax.tree.map(lambda p: p.astype(jnp.bfloat16), PARAMS)
RATE = 0.01

Make = Callable[..., optax.GradientTransformation]

# From a rate to an optimizer with moments, and to one without.
ADAPTIVE: dict[str, Make] = {
    "adam": optfn.adam,
    "adamw": lambda rate, **more: optfn.adamw(rate, weight_decay=0.01, **more),
    "adamax": optfn.adamax,
    "adagrad": optfn.adagrad,
    "decayed_adagrad": optfn.decayed_adagrad,
    "adadelta": optfn.adadelta,
    "rmsprop": optfn.rmsprop,
    "rmsprop with momentum": lambda rate, **more: optfn.rmsprop(rate, momentum=0.9, **more),
    "lamb": optfn.lamb,
    "adam in int8": lambda rate, **more: optfn.adam(rate, moment_dtype="int8", **more),
}
PLAIN: dict[str, Make] = {
    "sgd": optfn.sgd,
    "momentum": lambda rate, **more: optfn.momentum(rate, 0.9, **more),
    "nesterov": lambda rate, **more: optfn.momentum(rate, 0.9, nesterov=True, **more),
    "asgd": lambda rate, **more: optfn.asgd(rate, batch_num=2, **more),
    "lars": lambda rate, **more: optfn.lars(rate, 0.9, lars_coeff=0.1, **more),
}
OPTIMIZERS = ADAPTIVE | PLAIN | {"ftrl": optfn.ftrl}


def ema():
    return optfn.exponential_moving_average(0.0)


def mean():
    return optfn.model_average(0.5, min_average_window=1, max_average_window=1)


# Wrappers that keep the form of an update, and chains of either library.
AROUND: dict[str, Callable[[Any], Any]] = {
    "alone": lambda tx: tx,
    "in optax's chain": lambda tx: optax.chain(tx),
    "in a chain in a chain": lambda tx: optfn.chain(optax.chain(optfn.chain(tx))),
    "guarded": optfn.skip_nonfinite,
    "recorded": optfn.record_metrics,
    "watched for spikes": lambda tx: optfn.skip_spikes(tx, 100.0),
    "guarded and recorded": lambda tx: optfn.record_metrics(optfn.skip_nonfinite(tx)),
    "guarded by optax": lambda tx: optax.apply_if_finite(tx, 5),
}

CLIPS: dict[str, Callable[[], Any]] = {
    "clip_by_value": lambda: optfn.clip_by_value(0.001),
    "clip_by_norm": lambda: optfn.clip_by_norm(0.001),
    "clip_by_global_norm": lambda: optfn.clip_by_global_norm(0.001),
}
DECAYS: dict[str, Callable[[], Any]] = {
    "l1_decay": lambda: optfn.l1_decay(0.1),
    "l2_decay": lambda: optfn.l2_decay(0.1),
    "add_decayed_weights": lambda: optfn.add_decayed_weights(0.1),
    "add_decayed_weights by schedule": lambda: optfn.add_decayed_weights(lambda step: 0.1),
    "decay of optax": lambda: optax.add_decayed_weights(0.3),
}
MOMENTS: dict[str, Callable[[], Any]] = {
    "scale_by_adam": optfn.scale_by_adam,
    "scale_by_rms": optfn.scale_by_rms,
    "scale_by_adagrad": optfn.scale_by_adagrad,
    "scale_by_adadelta": optfn.scale_by_adadelta,
    "scale_by_adamax": optfn.scale_by_adamax,
    "optax's scale_by_adam": optax.scale_by_adam,
    "optax's scale_by_lion": optax.scale_by_lion,
    "scale_by_trust_ratio": optfn.scale_by_trust_ratio,
}


def chains(*links: Any) -> dict[str, Any]:
    """Return a chain of optfn and one of optax with these links."""
    return {"": optfn.chain(*links), ", in optax's chain": optax.chain(*links)}


def wrong_orders() -> dict[str, optax.GradientTransformation]:
    """Return chains in wrong orders."""
    found: dict[str, Any] = {}

    def add(name: str, made: dict[str, Any]) -> None:
        found.update({name + how: tx for how, tx in made.items()})

    for name, make in OPTIMIZERS.items():
        for decay, link in DECAYS.items():
            add(f"{decay} behind {name}", chains(make(RATE), link()))
        for second in ("sgd", "adam"):
            add(f"{second} behind {name}", chains(make(RATE), OPTIMIZERS[second](1.0)))
        bare = optfn.scale_by_learning_rate(1.0)
        add(f"a rate behind {name}", chains(make(RATE), bare))
        for average, link in {"an ema": ema, "a mean": mean}.items():
            add(f"{average} before {name}", chains(link(), make(RATE)))
    for name, rule in itertools.product(("adam", "sgd", "momentum", "rmsprop", "lars"), MOMENTS):
        add(f"{rule} behind {name}", chains(OPTIMIZERS[name](RATE), MOMENTS[rule]()))
    for name, make in ADAPTIVE.items():
        link = optfn.scale_by_momentum(0.9)
        add(f"momentum behind {name}", chains(make(RATE), link))
        plateau = optfn.schedules.reduce_on_plateau(0.1)
        add(f"a plateau behind {name} of its own rate", chains(make(RATE), plateau))
    for (where, around), (clip, link) in itertools.product(AROUND.items(), CLIPS.items()):
        inner = around(optfn.chain(optfn.sgd(RATE), ema()))
        add(f"{clip} behind an ema {where}", chains(inner, link()))
        if clip == "clip_by_norm":
            inner = around(OPTIMIZERS["adam"](RATE))
            add(f"a decay behind adam {where}", chains(inner, optfn.l2_decay(0.1)))
            add(f"sgd behind adam {where}", chains(inner, optfn.sgd(1.0)))
            add(f"moments behind adam {where}", chains(inner, optfn.scale_by_rms()))
    paused = optfn.accumulate(optfn.chain(optfn.sgd(RATE), ema()), 2)
    add("a clip behind an accumulation of an ema", chains(paused, optfn.clip_by_norm(0.001)))
    for rule in ("scale_by_adam", "scale_by_rms", "scale_by_adagrad"):
        before = optfn.accumulate(optfn.clip_by_global_norm(1.0), 2)
        links = before, MOMENTS[rule](), optfn.scale_by_learning_rate(RATE)
        add(f"{rule} behind an accumulation", chains(*links))
    for name in ("adam", "rmsprop", "momentum"):
        scaled = optfn.dynamic_loss_scale(OPTIMIZERS[name](RATE))
        for clip, link in CLIPS.items():
            add(f"{clip} before a scale of the loss of {name}", chains(link(), scaled))
        add(f"norms around a scale of {name}", {"": optfn.record_metrics(scaled)})
        add(f"a guard around a scale of {name}", {"": optfn.skip_nonfinite(scaled)})
    two = exchange(quantize(8)), exchange(quantize(4))
    add("two exchanges", chains(*two, optfn.sgd(RATE)))
    compressed = deep_gradient_compression(0.9, rampup_begin_step=0)
    add("an exchange behind DGC", chains(compressed, two[0], optfn.sgd(RATE)))
    add("momentum behind DGC", chains(
        compressed, optfn.scale_by_momentum(0.9), optfn.scale_by_learning_rate(RATE)
    ))  # fmt: skip
    dgc = optfn.dgc_momentum(RATE, 0.9, rampup_begin_step=0)
    add("momentum behind dgc_momentum", chains(dgc, optfn.scale_by_momentum(0.9)))
    for rule in MOMENTS:
        add(f"{rule} without a rate", chains(MOMENTS[rule]()))
    for clip, link in CLIPS.items():
        add(f"{clip} alone", chains(link()))
    add("an average without a rate", chains(optfn.scale_by_adam(), ema()))
    return found


def behind_masters() -> dict[str, optax.GradientTransformation]:
    """Return links that change an update behind masters, by name."""
    links: dict[str, Callable[[], Any]] = {
        "a plateau": lambda: optfn.schedules.reduce_on_plateau(1e-2),
        "a rate": lambda: optfn.scale_by_learning_rate(1e-2),
        "moments": optfn.scale_by_rms,
        "momentum": lambda: optfn.scale_by_momentum(0.9),
        "an optimizer": lambda: optfn.adam(1e-2),
    } | CLIPS | DECAYS  # fmt: skip
    found = {}
    for (what, link), form in itertools.product(links.items(), (True, 32, 24)):
        for how, tx in chains(optfn.adam(1.0, multi_precision=form), link()).items():
            found[f"{what} behind masters {form}{how}"] = tx
    for where, around in AROUND.items():
        if where == "guarded by optax":  # it takes no masters
            continue
        inner = around(optfn.adam(1e-2, multi_precision=True))
        found[f"a clip behind masters {where}"] = optfn.chain(inner, optfn.clip_by_norm(1.0))
    bare = optfn.chain(optfn.master_weights(optfn.scale_by_adam()), optfn.sgd(1e-2))
    return found | {"a rate behind the masters of a rule": bare}


def right_orders() -> dict[str, optax.GradientTransformation]:
    """Return chains in right orders, the unusual ones too."""
    found: dict[str, Any] = {}
    before = CLIPS | DECAYS | {"momentum": lambda: optfn.scale_by_momentum(0.5)}
    for name, make in OPTIMIZERS.items():
        found |= {f"{name} {where}": around(make(RATE)) for where, around in AROUND.items()}
        found |= {f"{first} before {name}": optfn.chain(link(), make(RATE))
                  for first, link in before.items()}  # fmt: skip
        found[f"clips behind {name}"] = optfn.chain(make(RATE), optfn.clip_by_value(1.0))
        found[f"{name} and averages"] = optax.chain(make(RATE), ema(), mean())
        found[f"{name} accumulated"] = optfn.accumulate(optfn.chain(make(RATE), ema()), 2)
        found[f"{name} of a scaled loss"] = optfn.dynamic_loss_scale(make(RATE))
        plateau = optfn.schedules.reduce_on_plateau(RATE)
        found[f"{name} with a plateau"] = optfn.chain(make(1.0), plateau, ema())
        found[f"{name} in masters"] = optfn.chain(make(RATE, multi_precision=True), ema())
        found[f"{name} in masters, scaled"] = optfn.dynamic_loss_scale(
            make(RATE, multi_precision=True, grad_clip=optfn.clip_by_global_norm(1.0))
        )
        found[f"{name} with a schedule and a plateau"] = optfn.chain(
            make(lambda step: 1 / (1 + step)), optfn.schedules.reduce_on_plateau(RATE)
        )
    for rule, link in MOMENTS.items():
        links = link(), optfn.scale_by_learning_rate(RATE)
        found |= {f"{rule} and a rate{how}": tx for how, tx in chains(*links).items()}
        found[f"{rule} and a rate of optax"] = optfn.chain(link(), optax.scale(-RATE))
        found[f"{rule}, a decay and a rate"] = optfn.chain(
            links[0], optfn.add_decayed_weights(0.1), links[1]
        )
        found[f"{rule}, a penalty and a rate"] = optfn.chain(
            links[0], optfn.l2_decay(0.1), links[1]
        )
        found[f"{rule}, momentum and a rate"] = optfn.chain(
            links[0], optfn.scale_by_momentum(0.5), links[1]
        )
        found[f"{rule}, a rate and momentum"] = optfn.chain(*links, optfn.scale_by_momentum(0.5))
        found[f"{rule} and a schedule of optax"] = optax.chain(
            link(), optax.scale_by_schedule(lambda step: -RATE)
        )
    some = {"w": True, "b": False}, {"w": False, "b": True}
    masked = [optax.masked(make(RATE), mask)
              for make, mask in zip((optfn.adam, optfn.sgd), some, strict=True)]  # fmt: skip
    labels = {"w": "a", "b": "b"}
    parts = {"a": optfn.adam(RATE), "b": optfn.chain(optfn.sgd(RATE), ema())}
    return found | {
        "a rate for each of two leaves": optfn.chain(*masked),
        "a partition": optax.partition(parts, labels),
        "a partition with masters": optax.partition(
            parts | {"b": optfn.sgd(RATE, multi_precision=True)}, labels
        ),
        "a warm-up in front of an optimizer": optax.chain(
            optax.scale_by_schedule(lambda step: 0.5), optfn.adam(RATE)
        ),
        "maximization": optax.chain(optax.scale(-1.0), optfn.adam(RATE), optax.scale(-1.0)),
        "a zero decay behind": optfn.chain(optfn.adam(RATE), optfn.l2_decay(0.0)),
        "zero momentum behind": optfn.chain(optfn.adam(RATE), optfn.scale_by_momentum(0)),
        "momentum behind a bare rate": optfn.chain(optfn.sgd(RATE), optfn.scale_by_momentum(0.9)),
        "the chain of lars": optfn.chain(
            optfn.scale_by_lars(),
            optfn.scale_by_learning_rate(RATE),
            optfn.scale_by_momentum(0.9),
        ),
        "the chain of lamb": optfn.chain(
            optfn.scale_by_adam(),
            optfn.add_decayed_weights(0.01),
            optfn.scale_by_trust_ratio(),
            optfn.scale_by_learning_rate(RATE),
        ),
        "an average of steps": optax.chain(optfn.sgd(RATE), optax.ema(0.5)),
        "hyper-parameters injected": optax.inject_hyperparams(optfn.adam)(learning_rate=RATE),
        "injected, with a clip": optax.chain(
            optfn.clip_by_norm(1.0), optax.inject_hyperparams(optfn.sgd)(learning_rate=RATE)
        ),
        "steps accumulated by optax": optax.chain(
            optax.MultiSteps(optfn.adam(RATE), 2).gradient_transformation()
        ),
        "an exchange": optfn.chain(exchange(quantize(8)), optfn.adam(RATE)),
        "an exchange of steps": optfn.chain(optfn.sgd(RATE), exchange(quantize(8)), ema()),
        "DGC": optfn.chain(
            deep_gradient_compression(0.9, rampup_begin_step=0),
            optfn.scale_by_learning_rate(RATE),
        ),
        "dgc_momentum, averaged": optfn.chain(
            optfn.dgc_momentum(RATE, 0.9, rampup_begin_step=0), ema()
        ),
        "muon": optfn.muon(RATE),
        "muon with others": optfn.muon(RATE, others=optfn.adamw(RATE)),
        "noise of optax": optax.chain(optax.add_noise(0.01, 0.5, 0), optfn.adam(RATE)),
    }  # fmt: skip


OPTAX_OPTIMIZERS = (
    "adabelief", "adadelta", "adan", "adafactor", "adagrad", "adam", "adamax", "adamaxw", "adamw",
    "amsgrad", "fromage", "lamb", "lars", "lion", "nadam", "nadamw", "noisy_sgd", "novograd",
    "optimistic_gradient_descent", "radam", "rmsprop", "rprop", "sgd", "sign_sgd", "sm3", "yogi",
)  # fmt: skip


def quietly(fn: Callable[..., Any], *arguments: Any, **more: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return fn(*arguments, **more)
