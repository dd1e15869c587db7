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
from grids import suite

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
    """Return parameters: "mixed", of size 1 and 0; "zero", all 0."""
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
    """
    made = {}
    for k, shape in SHAPES.items():
        rng = _rng(kind, k)
        mantissa = rng.uniform(0.5, 2, (STEPS, *shape)) * rng.choice([-1, 1], (STEPS, *shape))
        if kind == "constant":
            mantissa = np.broadcast_to(mantissa[0], mantissa.shape)
        g = (mantissa * 10.0 ** _magnitudes(kind, shape, rng)).astype(np.float32)
        g[7], g[..., 0] = 0, 0
        made[k] = g
    return made


def trajectory(tx: Any, params: Any, gradients: Any) -> Any:
    """Return the parameters after each step, by one scan."""

    def step(carry: Any, g: Any) -> Any:
        params, state = carry
        updates, state = tx.update(g, state, params)
        params = optax.apply_updates(params, updates)
        return (params, state), params

    return jax.lax.scan(step, (params, tx.init(params)), gradients)[1]


@functools.cache
def program_of(name: str, expressions: str) -> Any:
    """Return the program of a configuration with these expressions."""
    tx = getattr(optfn, CONFIGS[name].optimizer)(**CONFIGS[name].hyper)
    return jax.jit(functools.partial(trajectory, tx))


def check(name: str, params: Any, grads: Any, expressions: str = "of a CPU") -> None:
    """Compare the parameters after each step with the reference's, as the docstring of this file
    says."""
    config = CONFIGS[name]
    expected = references.trajectory(config.optimizer, params, grads, **config.hyper)
    found = program_of(name, expressions)(params, grads)
    rtol, rounding = RTOL.get(name, RTOL["default"]), ROUNDING.get(config.optimizer, 1.0)
    assert found.keys() == expected.keys()
    for k, reference in expected.items():
        every_step = np.concatenate([params[k][None].astype(reference.dtype), reference])
        path = np.cumsum(np.abs(np.diff(every_step, axis=0)), axis=0)
        if config.optimizer in MIXING and path[0].ndim == 2:
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
    check(name, parameters(start), gradients(kind))


@pytest.mark.parametrize("kind", suite(KINDS, "mixed"))
@pytest.mark.parametrize("name", [k for k, c in CONFIGS.items() if c.optimizer in IN_PASSES])
def test_plain_expressions_follow_the_reference(name, kind, plain_expressions):
    """What TPUs and GPUs compile in place of the loops of a CPU is the same rule."""
    check(name, parameters("mixed"), gradients(kind), "plain")


def test_complex_leaves_follow_their_references():
    """Second moments and maxima are those of |g|."""
    takes = {name for name, row in catalogue.OPTIMIZERS.items() if row.complex_leaves}
    assert catalogue.OPTIMIZERS.keys() - takes == {"ftrl"}
    names = [k for k, config in CONFIGS.items() if config.optimizer == k and k in takes]
    names += [k for k in CONFIGS if "centered" in k]
    rng = _rng("complex")
    params = {"z": (rng.normal(size=6) + 1j * rng.normal(size=6)).astype(np.complex64)}
    g = rng.normal(size=(STEPS, 6)) + 1j * rng.normal(size=(STEPS, 6))
    grads = {"z": (g * 10.0 ** np.linspace(-6, 6, 6)).astype(np.complex64)}
    for name in names:
        check(name, params, grads)


def both(name: str, calls: list[tuple[Any, ...]], steps: np.ndarray) -> Any:
    """Yield calls of a schedule, the rates that they give in one program, and the references'."""
    made = [getattr(optfn.schedules, name)(*given) for given in calls]
    found = jax.jit(lambda steps: [jax.vmap(schedule)(steps) for schedule in made])(steps)
    for given, rates in zip(calls, found, strict=True):
        reference = getattr(reference_schedules, name)(*given)
        yield given, rates, np.array([reference(int(i)) for i in steps])


@pytest.mark.parametrize("name", reference_schedules.CASES)
def test_schedule_follows_its_reference(name):
    """The rates of 3000 steps, in float32: a period ends where the integers say."""
    steps = np.arange(3000, dtype=np.int32)
    for given, found, rates in both(name, reference_schedules.CASES[name], steps):
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
    for given, found, rates in both(name, FAR[name], np.int32(far_steps(300))):
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
        {"pct_start": 0.29, "anneal": "linear"},
        {"pct_start": 0.25, "three_phase": True, "div_factor": 10, "final_div_factor": 3},
        {"pct_start": 0.01},  # the peak is at step 0
        {"pct_start": 0.0},
        {"pct_start": 1.0},
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


# How far a rule is off in float64, relative to the parameter's path; 1 − 0.999 alone costs 1e-13.
FLOAT64_RTOL = 1e-12


@pytest.mark.parametrize("name", ["adam", "ftrl-power"])
def test_float64_leaves_follow_their_reference(name):
    """The scheduled rate and the corrections of the bias are as wide as the leaf."""
    config, rng = CONFIGS[name], _rng("float64")
    params = {k: rng.normal(size=shape) for k, shape in SHAPES.items()}
    grads = {k: rng.normal(size=(STEPS, *shape)) for k, shape in SHAPES.items()}
    start = config.hyper["learning_rate"]
    own = config.hyper | {"learning_rate": optfn.schedules.inverse_time(start, 10, 0.3)}
    hyper = config.hyper | {"learning_rate": lambda i: start / (1 + 0.3 * i / 10)}
    expected = references.trajectory(config.optimizer, params, grads, **hyper)
    with jax.enable_x64(True):
        tx = getattr(optfn, config.optimizer)(**own)
        found = jax.jit(functools.partial(trajectory, tx))(params, grads)
        found = jax.device_get(found)
    for k, reference in expected.items():
        path = np.abs(reference - params[k]).max() + np.abs(params[k]).max()
        assert found[k].dtype == np.float64
        np.testing.assert_allclose(found[k], reference, rtol=FLOAT64_RTOL, atol=FLOAT64_RTOL * path)


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
