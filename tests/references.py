"""Float64 references of the dense optimizers, in NumPy alone.

A rule is a function of one tensor for one step: `rule(p, g, s, t, lr, ...) -> (p, s)`. g is the
gradient after clipping and regularization, t counts from 1, and s maps the names of the tensor's
accumulators to arrays; one that is not there yet is 0. `trajectory` runs a rule over T steps.
"""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

Arrays = dict[str, np.ndarray]
State = dict[str, Any]
norm = np.linalg.norm


# Rules

RULES: dict[str, Callable[..., tuple[np.ndarray, State]]] = {}


def rule(function):
    """Decorate the reference of the optimizer of the same name."""
    RULES[function.__name__] = function
    return function


@rule
def sgd(p, g, s, t, lr):
    """p −= lr·g."""
    return p - lr * g, {}


@rule
def momentum(p, g, s, t, lr, *, momentum, nesterov=False):
    """v = μv + g; p −= lr·v, or lr·(g + μv) with nesterov."""
    v = momentum * s.get("velocity", 0.0) + g
    step = g + momentum * v if nesterov else v
    return p - lr * step, {"velocity": v}


@rule
def lars(p, g, s, t, lr, *, momentum, lars_coeff=1e-3, lars_weight_decay=5e-4, eps=0.0):
    """v = μv + L·(g + wd·p); p −= v, L = lr·coeff·‖p‖/(‖g‖ + wd·‖p‖ + eps) or lr if a norm is 0."""
    wd = lars_weight_decay
    local = lr
    if norm(p) > 0 and norm(g) > 0:
        local = lr * lars_coeff * norm(p) / (norm(g) + wd * norm(p) + eps)
    v = momentum * s.get("velocity", 0.0) + local * (g + wd * p)
    return p - v, {"velocity": v}


@rule
def adagrad(p, g, s, t, lr, *, eps=1e-6, initial_accumulator_value=0.0):
    """m += |g|²; p −= lr·g/(√m + eps)."""
    m = s.get("accumulator", initial_accumulator_value) + np.abs(g) ** 2
    return p - lr * g / (np.sqrt(m) + eps), {"accumulator": m}


@rule
def decayed_adagrad(p, g, s, t, lr, *, decay=0.95, eps=1e-6):
    """m = d·m + (1 − d)·|g|²; p −= lr·g/(√m + eps)."""
    m = decay * s.get("accumulator", 0.0) + (1 - decay) * np.abs(g) ** 2
    return p - lr * g / (np.sqrt(m) + eps), {"accumulator": m}


@rule
def adadelta(p, g, s, t, lr, *, rho=0.95, eps=1e-6):
    """a = ρa + (1 − ρ)|g|²; Δ = −√((u + eps)/(a + eps))·g; u = ρu + (1 − ρ)|Δ|²; p += lr·Δ."""
    u = s.get("squared_update", 0.0)
    a = rho * s.get("accumulator", 0.0) + (1 - rho) * np.abs(g) ** 2
    delta = -np.sqrt((u + eps) / (a + eps)) * g
    u = rho * u + (1 - rho) * np.abs(delta) ** 2
    return p + lr * delta, {"accumulator": a, "squared_update": u}


@rule
def rmsprop(p, g, s, t, lr, *, rho=0.95, eps=1e-6, momentum=0.0, centered=False):
    """r = ρr + (1 − ρ)|g|²; q = ρq + (1 − ρ)g; v = μv + lr·g/√(max(r [− |q|²], 0) + eps).

    p −= v.
    """
    r = rho * s.get("nu", 0.0) + (1 - rho) * np.abs(g) ** 2
    q = rho * s.get("mu", 0.0) + (1 - rho) * g
    variance = np.maximum(r - np.abs(q) ** 2 if centered else r, 0.0)
    v = momentum * s.get("velocity", 0.0) + lr * g / np.sqrt(variance + eps)
    return p - v, {"nu": r, "velocity": v} | ({"mu": q} if centered else {})


def _moments(g, s, b1, b2):
    """m = β₁m + (1 − β₁)g; v = β₂v + (1 − β₂)|g|²."""
    m = b1 * s.get("mu", 0.0) + (1 - b1) * g
    v = b2 * s.get("nu", 0.0) + (1 - b2) * np.abs(g) ** 2
    return m, v


@rule
def adam(p, g, s, t, lr, *, b1=0.9, b2=0.999, eps=1e-8, eps_hat=True):
    """p −= lr·√(1 − β₂ᵗ)/(1 − β₁ᵗ)·m/(√v + eps); with eps_hat False lr·m̂/(√v̂ + eps)."""
    m, v = _moments(g, s, b1, b2)
    if eps_hat:
        step = np.sqrt(1 - b2**t) / (1 - b1**t) * m / (np.sqrt(v) + eps)
    else:
        step = m / (1 - b1**t) / (np.sqrt(v / (1 - b2**t)) + eps)
    return p - lr * step, {"mu": m, "nu": v}


@rule
def adamw(p, g, s, t, lr, *, weight_decay=0.01, b1=0.9, b2=0.999, eps=1e-8, eps_hat=False):
    """p *= 1 − lr·wd, then adam."""
    p = p * (1 - lr * weight_decay)
    return adam(p, g, s, t, lr, b1=b1, b2=b2, eps=eps, eps_hat=eps_hat)


@rule
def adamax(p, g, s, t, lr, *, b1=0.9, b2=0.999, eps=1e-8):
    """m = β₁m + (1 − β₁)g; u = max(|g|, β₂u + eps); p −= lr/(1 − β₁ᵗ)·m/u."""
    m = b1 * s.get("mu", 0.0) + (1 - b1) * g
    u = np.maximum(np.abs(g), b2 * s.get("nu", 0.0) + eps)
    return p - lr / (1 - b1**t) * m / u, {"mu": m, "nu": u}


@rule
def ftrl(p, g, s, t, lr, *, l1=0.0, l2=0.0, lr_power=-0.5):
    """n' = n + g²; σ = (n'^(−k) − n^(−k))/lr; L += g − σ·p; n = n'; p = where(|L| > l1, X/Y, 0).

    X = l1·sign(L) − L and Y = n'^(−k)/lr + 2·l2, with 1e-10 added to l1 and l2. A rate of 0 leaves
    everything as it is.
    """
    l1, l2 = l1 + 1e-10, l2 + 1e-10
    n, linear = (s.get(name, 0.0) + np.zeros_like(p) for name in ("accumulator", "linear"))
    if lr != 0:
        new = n + g**2
        sigma = (new**-lr_power - n**-lr_power) / lr
        linear = linear + g - sigma * p
        x = l1 * np.sign(linear) - linear
        y = new**-lr_power / lr + 2 * l2
        p, n = np.where(np.abs(linear) > l1, x / y, 0.0), new
    return p, {"accumulator": n, "linear": linear}


@rule
def lamb(p, g, s, t, lr, *, weight_decay=0.01, b1=0.9, b2=0.999, eps=1e-6, bias_correction=False):
    """r = m/(√v + eps) + wd·p; q = ‖p‖/‖r‖ where both > 0, else 1; p −= lr·q·r.

    With bias_correction m and v are divided by 1 − βᵗ first.
    """
    m, v = _moments(g, s, b1, b2)
    c1, c2 = (1 - b1**t, 1 - b2**t) if bias_correction else (1.0, 1.0)
    r = m / c1 / (np.sqrt(v / c2) + eps) + weight_decay * p
    q = norm(p) / norm(r) if norm(p) > 0 and norm(r) > 0 else 1.0
    return p - lr * q * r, {"mu": m, "nu": v}


JORDAN = ((3.4445, -4.7750, 2.0315),) * 5


def orthogonalized(m, *, coefficients=JORDAN, eps=1e-7):
    """x = m/(‖m‖ + eps); x = a·x + b·(x·xᴴ)·x + c·(x·xᴴ)²·x for each (a, b, c)."""
    x = m / (norm(m) + eps)
    for a, b, c in coefficients:
        gram = x @ x.conj().T
        x = a * x + b * gram @ x + c * gram @ gram @ x
    return x


@rule
def muon(p, g, s, t, lr, *, weight_decay=0.0, momentum=0.95, nesterov=True, scale="jordan"):
    """v = μv + g; p *= 1 − lr·wd; p −= lr·s·orthogonalized(g + μv, or v); adamw if no matrix.

    s = √max(1, columns/rows), in moonlight 0.2·√max(rows, columns).
    """
    if p.ndim != 2:
        return adamw(p, g, s, t, lr, weight_decay=weight_decay)
    v = momentum * s.get("velocity", 0.0) + g
    rows, columns = p.shape
    scales = {"jordan": max(1, columns / rows) ** 0.5, "moonlight": 0.2 * max(rows, columns) ** 0.5}
    step = scales[scale] * orthogonalized(g + momentum * v if nesterov else v)
    return p * (1 - lr * weight_decay) - lr * step, {"velocity": v}


@rule
def asgd(p, g, s, t, lr, *, batch_num=1, weight_decay=0.0):
    """i = (t − 1) mod n; d += g − y_i; y_i = g; p −= lr·(d/min(t, n) + λ·p)."""
    y = np.array(s.get("gradients", np.zeros((batch_num, *p.shape), p.dtype)))
    i = (t - 1) % batch_num
    d = s.get("total", 0.0) + g - y[i]
    y[i] = g
    return p - lr * (d / min(t, batch_num) + weight_decay * p), {"total": d, "gradients": y}


# What comes before the rule


def clip(gradients: Arrays, kind: str, *limits: float) -> Arrays:
    """Clip by ("value", max[, min]), ("norm", c) or ("global_norm", c).

    norm: g·c/‖g‖ where ‖g‖ > c. global_norm: g·c/max(N, c), N over all the tensors given.
    """
    if kind == "value":
        high, low = limits if len(limits) == 2 else (limits[0], -limits[0])
        return {k: np.minimum(np.maximum(g, low), high) for k, g in gradients.items()}
    (c,) = limits
    if kind == "norm":
        return {k: g * c / norm(g) if norm(g) > c else g for k, g in gradients.items()}
    if kind == "global_norm":
        total = np.sqrt(sum(norm(g) ** 2 for g in gradients.values()))
        return {k: g * c / max(total, c) for k, g in gradients.items()}
    raise ValueError(f"no such clip: {kind}")


def penalty(p: np.ndarray, kind: str, coeff: float) -> np.ndarray:
    """c·p for ("l2", c), c·sign(p) for ("l1", c)."""
    return coeff * {"l1": np.sign, "l2": np.asarray}[kind](p)


# The driver


def run(
    name: str,
    params: Mapping[str, np.ndarray],
    gradients: Mapping[str, np.ndarray],
    *,
    learning_rate: float | Callable[[int], float],
    grad_clip: tuple | None = None,
    regularization: tuple[str, float] | None = None,
    exclude: Callable[[str], bool] | None = None,
    param_attrs: Mapping[str, Mapping[str, Any]] | None = None,
    initial: Mapping[str, State] | None = None,
    **hyper: Any,
) -> tuple[Arrays, dict[str, State]]:
    """Return the parameters after each step, (T, *shape) each, and the last accumulators.

    The order is clip, regularize, rule. Gradients are (T, *shape). `learning_rate` is a number or
    a function of the 0-based step. `exclude`: the paths that get no weight decay. `param_attrs`
    gives some of learning_rate (a factor), regularization (instead of the global one), need_clip
    and trainable for a path. `initial`: accumulators to start from.
    """
    attrs = {k: (param_attrs or {}).get(k, {}) for k in params}
    trained = [k for k in params if attrs[k].get("trainable", True)]
    clipped = [k for k in trained if attrs[k].get("need_clip", True)]
    hypers = {k: dict(hyper) for k in trained}
    for k in trained:
        if exclude is not None and exclude(k):
            (decay,) = (x for x in RULES[name].__kwdefaults__ if x.endswith("weight_decay"))
            hypers[k][decay] = 0.0
    p = {k: np.array(v, np.result_type(v, np.float64)) for k, v in params.items()}
    gradients = {k: np.asarray(gradients[k], p[k].dtype) for k in trained}
    states: dict[str, State] = {k: dict((initial or {}).get(k, {})) for k in trained}
    steps = len(next(iter(gradients.values())))
    history: dict[str, list[np.ndarray]] = {k: [] for k in params}

    for t in range(1, steps + 1):
        g = {k: gradients[k][t - 1] for k in trained}
        if grad_clip is not None:
            g |= clip({k: g[k] for k in clipped}, *grad_clip)
        rate = learning_rate(t - 1) if callable(learning_rate) else learning_rate
        for k in trained:
            own = attrs[k].get("regularization", regularization)
            total = g[k] if own is None else g[k] + penalty(p[k], *own)
            lr = rate * attrs[k].get("learning_rate", 1.0)
            p[k], states[k] = RULES[name](p[k], total, states[k], t, lr, **hypers[k])
        for k in params:
            history[k].append(p[k])
    return {k: np.stack(v) for k, v in history.items()}, states


def trajectory(name: str, params: Any, gradients: Any, **options: Any) -> Arrays:
    """Return the parameters after each step; arguments as `run`."""
    return run(name, params, gradients, **options)[0]
