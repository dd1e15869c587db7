"""Every optimizer against its float64 reference, with gradients from 1e-15 to 1e15.

How close float32 can be. A step p + u rounds the sum to half a unit in the last place of p, which
adds up to at most ε∑|p| over the steps (ε = 2⁻²³): no rule can do better, and the parameters that
start from 0 show the updates without it. The rest is an error of the updates, and is measured
against the path of the parameter, ∑|Δp|, not against its last move: where a sum of gradients of
1e15 cancels, what is left of it is rounding, in any float32 implementation. RTOL says which
fraction of the path a rule may be off, and why.
"""

import functools
import itertools
from typing import Any, NamedTuple

import catalogue
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import reference_schedules
import references
from grids import nightly, suite
from registry import clip_of, penalty_of, plateau_rates

import optfn

pytestmark = pytest.mark.optimized  # float32 as users compile it

STEPS = 50
EPSILON = float(np.finfo(np.float32).eps)
TINY = 1e-36  # below this float32 products lose digits, and XLA flushes them to 0


class Config(NamedTuple):
    """An optimizer and its arguments, which the reference shares."""

    optimizer: str
    hyper: dict[str, Any]


CONFIGS = {
    test_id: Config(name, hyper)
    for name, row in catalogue.OPTIMIZERS.items()
    for test_id, hyper in row.compared(name).items()
}
PLAIN = {name: config for name, config in CONFIGS.items() if name == config.optimizer}

# The fraction of its path by which a parameter may be off. A rule takes some ten float32 operations
# per element, 1e-6 of the update; taking 1 − 0.999 in float32 would alone cost 6e-6.
RTOL = {
    "default": 2e-6,
    # With a constant gradient r − q² is ρᵗ·r: after 50 steps of ρ = 0.9 it has lost 8 of 24 bits.
    "rmsprop-centered-momentum": 1e-4,
    # The other rules add an update to p; ftrl makes p anew, from σ·p and L, where a difference of
    # powers takes away digits as n grows.
    "ftrl": 1e-4,
    "ftrl-l1-l2": 1e-4,
    "ftrl-power": 1e-4,
    # Five steps multiply a small singular value, and what float32 adds to it, by 485.
    "muon": 1e-5,
    "muon-plain": 1e-5,
    "muon-moonlight": 1e-5,
}
# How many ε of p a step may cost: one for the sum p + u, and for ftrl's new p a power, a
# difference, two products, a quotient and the subtraction of the old p as well.
ROUNDING = {"ftrl": 8.0}
# Products of matrices mix elements: what an element of a matrix may be off is a fraction of the
# longest path in the matrix.
MIXING = {"muon"}
# Optimizers whose programs for a CPU make several passes over memory (`optfn.mesh.compilers.xla`).
IN_PASSES = {"lamb", "ftrl"}


# Data: leaves of the same names and shapes throughout, so that a configuration is compiled once

SHAPES = {"w": (4, 6), "b": (8,)}


def _rng(*key: str) -> np.random.Generator:
    return np.random.default_rng([len(key), *"/".join(key).encode()])


@functools.cache
def parameters(start: str) -> dict[str, np.ndarray]:
    """Return parameters: "mixed", of size 1 and 0; "zero", all 0; "nonzero", all but b[0]."""
    made = {k: _rng(k).normal(size=shape).astype(np.float32) for k, shape in SHAPES.items()}
    if start == "mixed":
        made["w"][1], made["b"][-3:] = 0, 0
    if start == "zero":
        made["w"][:], made["b"][:] = 0, 0
    made["b"][0] = 0
    return made


def _magnitudes(kind: str, shape: tuple[int, ...], rng: np.random.Generator) -> np.ndarray:
    """Return the decimal exponents of gradients, (STEPS, *shape)."""
    across = np.linspace(-15, 15, STEPS).reshape(-1, *[1] * len(shape))
    exponents = {
        "mixed": lambda: rng.uniform(-15, 15, shape),
        "constant": lambda: rng.uniform(-15, 15, shape),
        "rising": lambda: across,
        "falling": lambda: -across,
        "shuffled": lambda: rng.uniform(-15, 15, (STEPS, *shape)),
        "one": lambda: np.zeros(shape),
    }
    return np.broadcast_to(exponents[kind](), (STEPS, *shape))


KINDS = ("mixed", "constant", "rising", "falling", "shuffled", "one")


@functools.cache
def gradients(kind: str) -> dict[str, np.ndarray]:
    """Return gradients of either sign, of which one step and some elements are 0.

    mixed: each element has a size of its own; constant: and keeps its gradient; rising, falling:
    all grow or shrink from step to step; shuffled: each element at each step; one: around 1.
    1e-30 and 1e30: constant, that size or its negative, none 0.
    """
    made = {}
    for k, shape in SHAPES.items():
        rng = _rng(kind, k)
        if kind in ("1e-30", "1e30"):
            signs = rng.choice([-1, 1], shape)
            made[k] = np.broadcast_to((float(kind) * signs).astype(np.float32), (STEPS, *shape))
            continue
        mantissa = rng.uniform(0.5, 2, (STEPS, *shape)) * rng.choice([-1, 1], (STEPS, *shape))
        if kind == "constant":
            mantissa = np.broadcast_to(mantissa[0], mantissa.shape)
        g = (mantissa * 10.0 ** _magnitudes(kind, shape, rng)).astype(np.float32)
        g[7], g[..., 0] = 0, 0
        made[k] = g
    return made


# The two sides


def build(config: Config, **common: Any) -> Any:
    """Return optfn's optimizer."""
    return getattr(optfn, config.optimizer)(**config.hyper, **common)


def trajectory(tx: Any, params: Any, gradients: Any) -> Any:
    """Return the parameters after each step, by one scan."""

    def step(carry: Any, g: Any) -> Any:
        params, state = carry
        updates, state = tx.update(g, state, params)
        params = optax.apply_updates(params, updates)
        return (params, state), params

    return jax.lax.scan(step, (params, tx.init(params)), gradients)[1]


def together(transforms: dict[str, Any]) -> Any:
    """Return one program for the trajectories of several transforms: compiling it costs less."""

    def program(params: Any, gradients: Any) -> Any:
        return {k: trajectory(tx, params, gradients) for k, tx in transforms.items()}

    return jax.jit(program)


@functools.cache
def program_of(optimizer: str, expressions: str) -> Any:
    """Return the program of all the configurations of an optimizer."""
    return together({k: build(c) for k, c in CONFIGS.items() if c.optimizer == optimizer})


@functools.cache
def trajectories(optimizer: str, kind: str, start: str, expressions: str = "cpu") -> Any:
    """Return the trajectories of all the configurations of an optimizer."""
    return program_of(optimizer, expressions)(parameters(start), gradients(kind))


def assert_follows(
    found: dict[str, np.ndarray],
    expected: dict[str, np.ndarray],
    start: dict[str, np.ndarray],
    rtol: float,
    rounding: float,
    mixing: bool,
) -> None:
    """Compare the parameters after each step, as the docstring of this file says."""
    assert found.keys() == expected.keys()
    for k, reference in expected.items():
        every_step = np.concatenate([start[k][None].astype(reference.dtype), reference])
        path = np.cumsum(np.abs(np.diff(every_step, axis=0)), axis=0)
        if mixing and path[0].ndim == 2:
            path = np.max(path, axis=(1, 2), keepdims=True) + 0 * path
        rounded = rounding * EPSILON * np.cumsum(np.abs(reference), axis=0)
        error = np.abs(np.asarray(found[k], reference.dtype) - reference)
        assert np.isfinite(error).all(), k
        excess = error - (rtol * path + rounded + TINY)
        worst = tuple(map(int, np.unravel_index(np.argmax(excess), excess.shape)))
        assert excess[worst] <= 0, (
            f"{k}{list(worst)}: {found[k][worst]} instead of {reference[worst]}, "
            f"off by {error[worst]:.3g} after a path of {path[worst]:.3g}"
        )


def bounds(name: str) -> dict[str, float]:
    """Return the bounds of a configuration."""
    return {
        "rtol": RTOL.get(name, RTOL["default"]),
        "rounding": ROUNDING.get(CONFIGS[name].optimizer, 1.0),
        "mixing": CONFIGS[name].optimizer in MIXING,
    }


# The optimizers


@pytest.mark.parametrize(
    ("kind", "start"),
    suite(
        itertools.product(KINDS, ["mixed", "zero"]),
        ("mixed", "zero"), ("falling", "mixed"), ("shuffled", "mixed"),
    ),
)  # fmt: skip
@pytest.mark.parametrize("name", CONFIGS)
def test_optimizer_follows_its_reference(name, kind, start):
    """50 steps are those of the float64 rule, whatever the size of the gradients."""
    config, params = CONFIGS[name], parameters(start)
    expected = references.trajectory(config.optimizer, params, gradients(kind), **config.hyper)
    found = trajectories(config.optimizer, kind, start)[name]
    assert_follows(found, expected, params, **bounds(name))


@pytest.mark.parametrize("kind", suite(KINDS, "mixed"))
@pytest.mark.parametrize("name", [k for k, c in CONFIGS.items() if c.optimizer in IN_PASSES])
def test_plain_expressions_follow_the_reference(name, kind, plain_expressions):
    """What TPUs and GPUs compile in place of the loops of a CPU is the same rule."""
    config, params = CONFIGS[name], parameters("mixed")
    expected = references.trajectory(config.optimizer, params, gradients(kind), **config.hyper)
    found = trajectories(config.optimizer, kind, "mixed", "plain")[name]
    assert_follows(found, expected, params, **bounds(name))


@pytest.mark.parametrize(
    ("kind", "start"),
    suite(
        itertools.product(["1e-30", "1e30"], ["mixed", "zero"]),
        ("1e-30", "zero"), ("1e30", "mixed"),
    ),
)  # fmt: skip
@pytest.mark.parametrize("name", CONFIGS)
def test_parameters_stay_finite(name, kind, start):
    """Constant gradients whose squares leave the range of float32 make no parameter NaN or inf."""
    for k, p in trajectories(CONFIGS[name].optimizer, kind, start)[name].items():
        bad = ~np.isfinite(p)
        assert not bad.any(), f"{k} in step {np.argwhere(bad)[0][0]}"


def test_complex_leaves_follow_their_references():
    """Second moments and maxima are those of |g|."""
    takes = {name for name, row in catalogue.OPTIMIZERS.items() if row.complex_leaves}
    assert catalogue.OPTIMIZERS.keys() - takes == {"ftrl"}
    names = [name for name, config in CONFIGS.items() if config.optimizer in takes]
    rng = _rng("complex")
    params = {"z": (rng.normal(size=6) + 1j * rng.normal(size=6)).astype(np.complex64)}
    g = rng.normal(size=(STEPS, 6)) + 1j * rng.normal(size=(STEPS, 6))
    grads = {"z": (g * 10.0 ** np.linspace(-6, 6, 6)).astype(np.complex64)}
    found = together({name: build(CONFIGS[name]) for name in names})(params, grads)
    for name in names:
        config = CONFIGS[name]
        expected = references.trajectory(config.optimizer, params, grads, **config.hyper)
        assert_follows(found[name], expected, params, **bounds(name))


# Clips and regularizations

CLIPS = {  # a clip, the regularization that comes after it, and the parameters to start from
    # With L1 only "nonzero": the sign of a parameter that is a difference of equal steps would be
    # that of a rounding error.
    "value": (("value", 1.0, -0.5), ("l1", 0.05), "nonzero"),
    # Norms so small that a constant added to them would show.
    "norm": (("norm", 1e-3), ("l2", 0.05), "mixed"),
    "global_norm": (("global_norm", 1e-3), ("l2", 0.05), "mixed"),
}
# While the rate rises from 0 the path does not show the gradients that cancel in a moment: a
# float32 computation in NumPy is off by up to 3e-5 of it.
CLIPPED_RTOL = 5e-5


def warmed_up(config: Config, schedules: Any) -> dict[str, Any]:
    """Return the configuration's arguments with a rate that rises from 0 in ten steps."""
    rate = config.hyper["learning_rate"]
    return config.hyper | {"learning_rate": schedules.linear_warmup(rate, 10, 0.0, rate)}


@functools.cache
def clipped_program(name: str) -> Any:
    """Return the program of an optimizer after each of CLIPS."""
    config = Config(PLAIN[name].optimizer, warmed_up(PLAIN[name], optfn.schedules))
    return together(
        {
            k: build(config, grad_clip=clip_of(clip), regularization=penalty_of(penalty))
            for k, (clip, penalty, _) in CLIPS.items()
        }
    )


@pytest.mark.parametrize("clip", CLIPS)
@pytest.mark.parametrize("name", suite(PLAIN, "asgd", "adadelta", "lamb"))
def test_clip_and_regularization_come_before_the_rule(name, clip):
    """Gradients are clipped, if large, then regularized, then used at the rate of the step."""
    grad_clip, regularization, start = CLIPS[clip]
    # Muon multiplies the rounding of the smallest singular values of these gradients by 10⁷.
    dtype = np.float64 if name in MIXING else np.float32
    params = {k: p.astype(dtype) for k, p in parameters(start).items()}
    for kind in KINDS:
        grads = {k: g.astype(dtype) for k, g in gradients(kind).items()}
        with jax.enable_x64(dtype == np.float64):
            found = clipped_program(name)(params, grads)[clip]
        expected = references.trajectory(
            name,
            params,
            grads,
            grad_clip=grad_clip,
            regularization=regularization,
            **warmed_up(PLAIN[name], reference_schedules),
        )
        bound = bounds(name)
        bound["rtol"] = max(bound["rtol"], CLIPPED_RTOL)
        assert_follows(found, expected, params, **bound)


@pytest.mark.parametrize("name", [nightly("momentum"), "adam", nightly("lamb")])
def test_attributes_of_parameters(name):
    """Each attribute does to its leaf what it does in the reference; a held leaf stays as it is."""
    attrs = {
        "rate": {"learning_rate": 0.5},
        "penalty": {"regularization": ("l1", 0.1)},
        "free": {"regularization": None, "need_clip": False},
        "held": {"trainable": False},
    }
    params = {k: _rng(k).normal(size=5).astype(np.float32) for k in (*attrs, "plain")}
    grads = {k: _rng(k, "g").normal(size=(STEPS, 5)).astype(np.float32) for k in params}
    config = PLAIN[name]
    made = {k: dict(own) for k, own in attrs.items()}
    made["penalty"]["regularization"] = optfn.l1_decay(0.1)
    tx = build(
        config,
        grad_clip=optfn.clip_by_global_norm(1.0),
        regularization=optfn.l2_decay(0.05),
        param_attrs={k: optfn.ParamAttr(**own) for k, own in made.items()},
    )
    found = jax.jit(functools.partial(trajectory, tx))(params, grads)
    expected = references.trajectory(
        config.optimizer,
        params,
        grads,
        grad_clip=("global_norm", 1.0),
        regularization=("l2", 0.05),
        param_attrs=attrs,
        **config.hyper,
    )
    assert_follows(found, expected, params, **bounds(name))
    np.testing.assert_array_equal(found["held"], np.broadcast_to(params["held"], (STEPS, 5)))


# Schedules


@pytest.mark.parametrize("name", reference_schedules.CASES)
def test_schedule_follows_its_reference(name):
    """The rates of 3000 steps, in float32: a period ends where the integers say."""
    steps = jnp.arange(3000, dtype=jnp.int32)
    for given in reference_schedules.CASES[name]:
        found = jax.jit(jax.vmap(getattr(optfn.schedules, name)(*given)))(steps)
        rates = reference_schedules.series(getattr(reference_schedules, name)(*given), len(steps))
        # exp and pow multiply the rounding of their argument, at most 300 here; that of the cosine
        # goes to 100, and its error is one of the whole rate.
        atol = 5e-6 if name == "cosine" else 1e-9
        np.testing.assert_allclose(found, rates, rtol=5e-5, atol=atol, err_msg=str(given))


LAST = 2**31 - 1
FAR = {
    "noam": [(512, 4000)],
    "exponential": [(0.1, 1000, 0.9), (0.1, 10**6, 0.5, True)],
    "natural_exp": [(0.1, 1000, 0.5), (0.1, 10**7, 0.3)],
    "inverse_time": [(0.1, 1000, 0.5), (0.1, 10, 0.5, True)],
    "polynomial": [
        *[(0.1, steps, 1e-4, 1.0, cycle) for steps in (7, 10**9, LAST) for cycle in (False, True)],
        (0.1, 1000, 1e-4, 2.0, True),
    ],
    "piecewise": [([10**9, 2 * 10**9], [1.0, 0.1, 0.01])],
    "cosine": [(0.1, 10, 120), (0.1, 1, 7), (0.1, 1000, 90), (0.1, 1, 2**30), (0.1, 1, LAST)],
    "linear_warmup": [(0.1, steps, 0.0, 0.1) for steps in (10, 10**9, LAST)],
    "step_decay": [(0.1, 30), (0.1, 10**7, 0.9)],
    "multi_step": [(0.1, [10**6, 10**9])],
    "warmup_cosine": [(0.1, 1000, 10**6), (0.1, 10**6, 2 * 10**9), (0.1, 10, LAST)],
    "warmup_stable_decay": [(0.1, 100, 10**9, 10**9), (0.1, 10, 10, LAST - 20)],
    "one_cycle": [(0.1, 10**6), (0.1, LAST)],
}


def far_steps(count):
    """Return steps up to the last int32, at the ends of periods and drawn ones."""
    rng = np.random.default_rng(0)
    drawn = [*rng.integers(0, LAST, count), *np.exp(rng.uniform(0, np.log(LAST), count))]
    ends = [10**k + d for k in range(10) for d in (-1, 0, 1)]
    return np.unique(np.asarray([0, LAST - 1, LAST, *ends, *drawn], np.int64))


@pytest.mark.parametrize("name", suite(FAR, "cosine", "polynomial", "one_cycle"))
def test_schedules_are_right_up_to_the_last_step(name):
    """To 1e-6 of the largest rate, in float32."""
    steps = far_steps(300)
    for given in FAR[name]:
        found = jax.jit(jax.vmap(getattr(optfn.schedules, name)(*given)))(np.int32(steps))
        reference = getattr(reference_schedules, name)(*given)
        rates = np.array([reference(int(i)) for i in steps])
        np.testing.assert_allclose(found, rates, 0, 1e-6 * rates.max(), err_msg=str(given))


def test_schedules_of_a_run_reach_their_peak_and_their_end_exactly():
    cosine = optfn.schedules.warmup_cosine(0.3, 41, 1000, start=0.1, end=0.02)
    stable = optfn.schedules.warmup_stable_decay(0.3, 41, 100, 49, start=0.1, end=0.07)
    for schedule, constant, last, end in [(cosine, 41, 1000, 0.02), (stable, 141, 190, 0.07)]:
        rates = np.asarray(jax.jit(jax.vmap(schedule))(jnp.arange(2000)))
        name, given, options = schedule.call
        reference = getattr(reference_schedules, name)(*given, **options)
        np.testing.assert_allclose(rates, reference_schedules.series(reference, 2000), rtol=1e-5)
        assert np.all(rates[41:constant] == np.float32(0.3))
        assert np.all(rates[last:] == np.float32(end))
        assert rates.max() == rates[41] == np.float32(0.3)
        assert np.all(np.diff(rates[constant : last + 1]) < 0)


@pytest.mark.parametrize(
    "options",
    [
        nightly({}),
        {"pct_start": 0.29, "anneal": "linear"},
        {"pct_start": 0.25, "three_phase": True, "div_factor": 10, "final_div_factor": 3},
        nightly({"pct_start": 0.5, "three_phase": True, "anneal": "linear"}),
        {"pct_start": 0.01},  # the peak is at step 0
        {"pct_start": 0.0},
        nightly({"pct_start": 1.0}),
    ],
    ids=str,
)
def test_one_cycle_has_the_rates_of_torch_at_every_step(options):
    """The peak is at step p·T − 1, where the rate is the peak itself."""
    schedule = optfn.schedules.one_cycle(0.3, 100, **options)
    rates = np.asarray(jax.jit(jax.vmap(schedule))(jnp.arange(120)))
    reference = reference_schedules.one_cycle(0.3, 100, **options)
    np.testing.assert_allclose(rates, reference_schedules.series(reference, 120), rtol=2e-5)
    peak = options.get("pct_start", 0.3) * 100 - 1
    if peak >= 0:
        assert rates.max() == rates[round(peak)] == np.float32(0.3)


@pytest.mark.parametrize(
    "options",
    [
        {"patience": 2, "cooldown": 3, "threshold": 0.05},
        {"patience": 0, "min_lr": 0.2},
        {"mode": "max", "threshold_mode": "abs", "threshold": 0.1, "patience": 1, "cooldown": 1},
        {"mode": "max", "patience": 1},
    ],
    ids=["cooldown", "min_lr", "max-abs", "max-rel"],
)
def test_plateau_follows_its_reference(options):
    """The rates of 200 metrics, improvements during a cooldown among them, are the reference's."""
    metrics = _rng("plateau").uniform(1, 2, 200) * np.linspace(1.5, 1, 200)
    metrics[::17] = 3.0 - 0.01 * np.arange(len(metrics[::17]))
    metrics = metrics.astype(np.float32)
    tx = optfn.schedules.reduce_on_plateau(1.0, decay_rate=0.8, **options)
    expected = reference_schedules.reduce_on_plateau(metrics, 1.0, decay_rate=0.8, **options)
    assert len(set(expected)) > 2, "the rate has to fall for this to say anything"
    np.testing.assert_allclose(plateau_rates(tx, metrics), expected, rtol=1e-5)


# Float64

# How far a rule is off in float64, relative to the parameter's path; 1 − 0.999 alone costs 1e-13.
FLOAT64_RTOL = 1e-12


@pytest.mark.parametrize(
    ("name", "rate"),
    suite(
        itertools.product(CONFIGS, ["number", "schedule"]),
        ("adam", "schedule"),
        ("ftrl-power", "number"),
    ),
)
def test_float64_leaves_follow_their_reference(name, rate):
    """The rate and the corrections of the bias are as wide as the leaf."""
    config, rng = CONFIGS[name], _rng("float64")
    params = {k: rng.normal(size=shape) for k, shape in SHAPES.items()}
    grads = {k: rng.normal(size=(STEPS, *shape)) for k, shape in SHAPES.items()}
    hyper, own = dict(config.hyper), dict(config.hyper)
    if rate == "schedule":
        start = hyper["learning_rate"]
        own["learning_rate"] = optfn.schedules.inverse_time(start, 10, 0.3)
        hyper["learning_rate"] = lambda i: start / (1 + 0.3 * i / 10)
    expected = references.trajectory(config.optimizer, params, grads, **hyper)
    with jax.enable_x64(True):
        tx = getattr(optfn, config.optimizer)(**own)
        found = jax.jit(functools.partial(trajectory, tx))(params, grads)
        found = jax.device_get(found)
    for k, reference in expected.items():
        path = np.abs(reference - params[k]).max() + np.abs(params[k]).max()
        assert found[k].dtype == np.float64
        np.testing.assert_allclose(found[k], reference, rtol=FLOAT64_RTOL, atol=FLOAT64_RTOL * path)


def test_float64_adam_is_that_of_optax():
    rng = _rng("float64 optax")
    params = {"w": rng.normal(size=(4, 6))}
    grads = {"w": rng.normal(size=(STEPS, 4, 6))}
    with jax.enable_x64(True):
        found, want = (
            jax.device_get(jax.jit(functools.partial(trajectory, tx))(params, grads))["w"]
            for tx in (optfn.adam(0.1, eps_hat=False), optax.adam(0.1))
        )
    np.testing.assert_allclose(found, want, rtol=1e-14, atol=1e-14)


def test_float64_averages_follow_their_formula():
    """The weight and a decay that grows are as wide as the average."""
    rng = _rng("float64 average")
    moved = rng.normal(size=(5, 3))
    with jax.enable_x64(True):
        tx = optfn.exponential_moving_average(0.9, thres_steps=True)
        p = {"w": jnp.zeros(3, jnp.float64)}
        state = tx.init(p)
        for u in moved:
            updates, state = jax.jit(tx.update)({"w": jnp.asarray(u)}, state, p)
            p = optfn.apply_updates(p, updates)
        found = jax.device_get(optfn.averaged_params(state, p))["w"]
    e, weight = np.zeros(3), 0.0
    for s, reached in enumerate(np.cumsum(moved, 0)):
        d = min(0.9, (1 + s) / (10 + s))
        e, weight = d * e + (1 - d) * reached, d * weight + (1 - d)
    np.testing.assert_allclose(found, e / weight, rtol=1e-13)
