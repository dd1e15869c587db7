"""The links of a chain and the wrappers, each as its documentation says, in plain Python.

`update(g, p, w, value)` takes the gradients of a call, the params, the weight of the call and its
loss, all over the whole batch, and returns what is added to the params, by leaf. SKIPPED says that
the update does not count: nothing has changed but what guards count. WAITING says that an
accumulation has taken the call, and there is no update yet.
"""

import copy
import dataclasses
import re

import jax
import numpy as np
import optax
from reference_exchange import power_sgd, quantize, top_k
from reference_schedules import linear_warmup, polynomial, warmup_cosine
from references import RULES, clip, penalty

from reference_run.program import SHAPES, STACKED, TABLES

SKIPPED, WAITING = "skipped", "waiting"
SCHEDULES = {  # the i-th update that counts
    None: lambda rate, i: rate,
    "inverse_time": lambda rate, i: rate / (1 + 0.5 * i / 2),
    "linear_warmup": lambda rate, i: rate * i / 3 if i < 3 else rate,
    "piecewise": lambda rate, i: rate if i < 2 else rate / 2,
    "rises": lambda rate, i: rate / 5 if i < 3 else rate,
    "cycle": lambda rate, i: polynomial(rate, 2, rate / 10, 2.0, cycle=True)(i),
    "warmup to cosine": lambda rate, i: warmup_cosine(rate, 2, 5, end=rate / 4)(i),
    "warmup to steps": lambda rate, i: linear_warmup(
        lambda n: rate * 0.5 ** (n // 2), 2, 0.0, rate
    )(i),
}
SQUARES = ("adam", "adamw", "rmsprop", "adagrad", "decayed_adagrad", "adadelta", "lamb", "ftrl")


def is_update(u):
    return isinstance(u, dict)


def sum_of_squares(tree):
    return sum(float(np.sum(np.square(x))) for x in tree.values())


class Rule:
    """An optimizer: clip, regularization, and its rule for each leaf."""

    def __init__(self, program, names):
        self.p, self.names, self.count, self.states = program, names, 0, {}
        self.begun: dict[str, int] = {}  # the updates before that of a leaf which was frozen
        self.rate = self.rate_of(0)

    def rate_of(self, i):
        has_plateau = bool(self.p.names("plateau"))
        return 1.0 if has_plateau else SCHEDULES[self.p.schedule](self.p.rate, i)

    def update(self, g, p, w, value):
        if w == 0:
            return SKIPPED
        self.rate, self.count = self.rate_of(self.count), self.count + 1
        attrs = {k: self.p.attrs.get(k, {}) for k in self.names}
        trained = [k for k in self.names if attrs[k].get("trainable", True)]
        g = {k: g[k] for k in trained}
        if self.p.clip:
            g |= self.clip({k: g[k] for k in trained if attrs[k].get("need_clip", True)})
        u = {k: 0 * p[k] for k in self.names}
        for k in trained:
            own = attrs[k].get("regularization", self.p.regularization)
            total = g[k] if own is None else g[k] + decay(p[k], *own)
            lr = self.rate * attrs[k].get("learning_rate", 1.0)
            state = self.states.get(k, {})
            new, self.states[k] = self.step_leaf(k, p[k], total, state, lr)
            u[k] = np.asarray(new - p[k])
        return u

    def clip(self, g):
        """Return gradients clipped; each stage has a norm of its own, but for the global one."""
        stacked = [k for k in g if self.p.stages and k in STACKED]
        if self.p.clip[0] == "global_norm" or not stacked:
            return clip(g, *self.p.clip)
        rows = [clip({k: g[k][i] for k in stacked}, *self.p.clip) for i in range(self.p.stages)]
        rest = clip({k: x for k, x in g.items() if k not in stacked}, *self.p.clip)
        return rest | {k: np.stack([row[k] for row in rows]) for k in stacked}

    def step_leaf(self, k, p, g, state, lr):
        """Return a leaf after a step of the rule, and its state."""
        name, options = self.p.rule
        options = own_decays(name, options, self.p.attrs.get(k, {}), k)
        if self.p.stages and k in STACKED and p.ndim > len(SHAPES[k]):  # each stage is a tensor
            states = [{i: x[n] for i, x in state.items()} for n in range(self.p.stages)]
            rows = [self.step_leaf(k, *row, lr) for row in zip(p, g, states, strict=True)]
            after = {i: np.stack([row[1][i] for row in rows]) for i in rows[0][1]}
            return np.stack([row[0] for row in rows]), after
        if not p.size:
            return p, state
        t = self.count - self.begun.get(k, 0)
        if k in TABLES and "tables" in self.p.way:
            return self.step_table(p, g, state, t, lr, options)
        return RULES[name](p, g, state, t, lr, **exact(options))

    def step_table(self, p, g, state, t, lr, options):
        """Return a table after step t of the rule, and its state."""
        name = self.p.rule[0]
        late, before, more = 0.0, state, {}
        if options.get("lazy") == "exact":
            late, before = catch_up(state, t, p, eps_hat=options.get("eps_hat", name == "adam"))
            more = {"last": t + 0 * p}
        new, after = RULES[name](p, g, before, t, lr, **exact(options))
        if not options.get("lazy"):
            return new, after
        # Rows that no example looks up stay.
        is_seen = np.any(g != 0, 1, keepdims=True)
        after = {i: np.where(is_seen, x, state.get(i, 0.0)) for i, x in (after | more).items()}
        return np.where(is_seen, new - lr * late, p), after


def exact(options):
    """Return the arguments of a rule without those for rows and the dtype of moments."""
    others = "lazy", "moment_dtype", "multi_precision"
    return {k: x for k, x in options.items() if k not in others}


DECAYS = ("weight_decay", "lars_weight_decay")


def own_decays(name, options, attr, leaf):
    """Return the arguments of a rule for a leaf: `exclude` takes the decay from some, and its
    attributes multiply the decay."""
    options, factor = dict(options), attr.get("weight_decay", 1.0)
    if re.fullmatch(options.pop("exclude", "none"), leaf):
        factor = 0.0
    usual = RULES[name].__kwdefaults__ or {}
    names = [k for k in usual if k in DECAYS or (name == "ftrl" and k in ("l1", "l2"))]
    return options | {k: factor * options.get(k, usual[k]) for k in names}


def catch_up(state, t, p, eps_hat):
    """Return the sum of Adam's directions in the steps that rows have missed, with one correction
    of the bias, and the state after these steps."""
    m, v, last = (state.get(k, 0 * p) for k in ("mu", "nu", "last"))
    n, r = t - 1 - last, 0.9 / 0.999**0.5
    total = r * (1 - r**n) / (1 - r)  # of rⁱ for i = 1 … n
    middle = np.maximum(last + 1 / (1 - r) - n * r**n / np.maximum(1 - r**n, 1e-30), 1)
    scale = np.sqrt(1 - 0.999**middle)
    late = m * scale / (1 - 0.9**middle) / (np.sqrt(v) + 1e-8 * (1 if eps_hat else scale))
    return total * late, {"mu": 0.9**n * m, "nu": 0.999**n * v}


def decay(p, kind, coeff):
    """Return the penalty of a leaf; "matrices" is optax's decay of matrices alone."""
    if kind == "matrices":
        return coeff * p if p.ndim > 1 else 0 * p
    return penalty(p, kind, coeff)


class OptaxRule(Rule):
    """An optimizer of optax, which is its own reference, in float64 and on one device."""

    def __init__(self, program, names):
        super().__init__(program, names)
        self.state, self.rate = None, None

    def update(self, g, p, w, value):
        if w == 0:
            return SKIPPED
        name, options = self.p.rule
        rate = self.rate_of(self.count)
        tx = getattr(optax, name.removeprefix("optax."))(rate, **options)
        self.count += 1
        own = {k: np.asarray(p[k]) for k in self.names}
        g = self.clip({k: g[k] for k in self.names}) if self.p.clip else g
        decays = self.p.regularization
        own_grads = {k: np.asarray(g[k] + (decay(p[k], *decays) if decays else 0)) for k in own}
        state = tx.init(own) if self.state is None else self.state
        u, self.state = tx.update(own_grads, state, own)
        return {k: np.asarray(x) for k, x in u.items()}


class Exchange:
    """Workers send their own gradients, along the leading axis, by a compressor, and keep the rest.

    Scalars, and leaves wider than float32, are sent whole, and in the first steps of a warm-up all
    leaves. If a gradient is not finite, all get 0.
    By parts each worker owns a slice of a leaf: it sends the mean of this slice to all, compressed
    once more, and keeps the rest.
    """

    def __init__(self, program, inner, compressor):
        self.inner, self.has_kept = inner, False
        self.residual, self.factors, self.published = {}, {}, {}
        self.is_wide = program.dtype == "float64"
        self.frozen, self.step = frozen_of(program), 0
        self.compressor, *options = compressor.split(", ")
        self.compress = COMPRESSORS.get(self.compressor)
        options = dict(x.split("=") for x in options)
        self.by_parts = "route" in options
        self.feedback = float(options.get("error_feedback", 1))
        self.warmup_steps = int(options.get("warmup_steps", 0))
        self.is_dense = bool(program.names("accumulate")) or program.local_steps > 1
        self.go_on(program.way)

    def go_on(self, way):
        """Take the gradients of a way, of which rows are sent as they are, unless an accumulation
        or local steps have made them dense."""
        self.passed = TABLES if "tables" in way and not self.is_dense else {}

    def update(self, g, p, w, value):
        if w == 0:
            return self.inner.update(mean_of_workers(g), p, w, value)
        if not all(np.all(np.isfinite(x)) for k, x in g.items() if k not in self.frozen):
            return self.inner.update({k: 0 * p[k] for k in g}, p, w, value)
        before = self.residual, self.factors, self.published, self.step
        means, is_warm = mean_of_workers(g), self.step < self.warmup_steps
        self.step += 1
        for k in g:
            is_passed = k in self.passed or k in self.frozen or self.is_wide or is_warm
            if p[k].ndim and p[k].size and not is_passed:
                total = (g[k] + self.feedback * self.residual.get(k, 0)).astype(np.float32)
                sent = self.send(k, total).astype(np.float64)
                self.residual = self.residual | {k: total - sent}
                self.has_kept |= bool(np.any(self.residual[k]))
                mean = sent.mean(0)
                means[k] = self.publish(k, mean, len(sent)) if self.by_parts else mean
        u = self.inner.update(means, p, w, value)
        if u == SKIPPED:
            self.residual, self.factors, self.published, self.step = before
        return u

    def send(self, k, total):
        """Return what the workers send of a leaf, along the leading axis."""
        if self.by_parts:
            slices = [slices_of(x, len(total)) for x in total]
            sent = [np.stack(list(map(self.compress, x))).ravel() for x in slices]
            return np.stack(sent)[:, : total[0].size].reshape(total.shape)
        if self.compress:
            return np.stack(list(map(self.compress, total)))
        if total.ndim < 3:  # power_sgd sends vectors whole
            return total
        rank, first = int(self.compressor[-2]), jax.random.key(0)
        q = self.factors.get(k, jax.random.normal(first, (total.shape[2], rank), np.float32).T)
        sent, q, _ = power_sgd(total.astype(np.float64), np.asarray(q, np.float64))
        self.factors = self.factors | {k: q}
        return sent

    def publish(self, k, mean, num_workers):
        """Return what the owners of slices send of the mean of a leaf."""
        owned = slices_of(mean, num_workers) + self.feedback * self.published.get(k, 0)
        sent = np.stack([self.compress(x.astype(np.float32)) for x in owned]).astype(np.float64)
        self.published = self.published | {k: owned - sent}
        return sent.ravel()[: mean.size].reshape(mean.shape)


def slices_of(x, num_workers):
    """Return equal slices of an array, one for each worker, the last ones with zeros at the end."""
    return np.pad(x.ravel(), (0, -x.size % num_workers)).reshape(num_workers, -1)


BY_PARTS = ', route="parts"'
COMPRESSORS = {
    "top_k(1.0)": lambda x: x,
    "top_k(0.3)": lambda x: top_k(x, 0.3),
    "top_k(1 / 512)": lambda x: top_k(x, 1 / 512),
    "quantize(4)": lambda x: quantize(x, 4),
    "quantize(1)": lambda x: quantize(x, 1),
}


class DeepGradientCompression:
    """dgc_momentum: momentum on what each worker has summed, of which it sends the largest.

    Of packed params these are the largest of all leaves together.
    """

    def __init__(self, program, names):
        self.rate, self.options = program.rate, program.rule[1]
        self.names = [k for k in names if k not in frozen_of(program)]
        self.is_packed, self.decay = "packed" in program.way, program.regularization
        self.step, self.u, self.v, self.has_kept = 0, {}, {}, False

    def update(self, g, p, w, value):
        if w == 0:
            return SKIPPED
        self.num_workers = len(g[self.names[0]])
        updates = {k: 0 * x for k, x in p.items() if k in g}
        if self.is_packed:
            shape = len(g[self.names[0]]), -1
            buffers = {"all": join(g, self.names, shape)}, {"all": join(p, self.names, -1)}
            directions = split(self.directions(*buffers)["all"], p, self.names)
        else:
            directions = self.directions(g, {k: p[k] for k in self.names})
        self.step += 1
        return updates | {k: np.asarray(-self.rate * directions[k]) for k in self.names}

    def directions(self, g, p):
        """Return the direction of each leaf, and keep what is not sent."""
        directions = {}
        begin, mu = self.options["rampup_begin_step"], self.options["momentum"]
        for k in p:
            u, v = self.u.get(k, 0 * g[k]), self.v.get(k, 0 * g[k])
            penalty = decay(p[k], *self.decay) if self.decay else 0 * p[k]
            if self.step < begin or p[k].ndim == 0 or p[k].size == 0:
                mean = 0 * g[k] + g[k].mean(0) + penalty
                self.u[k] = mu * u + mean
                nesterov = self.options.get("nesterov", False)
                direction = (mean + mu * self.u[k] if nesterov else self.u[k])[0]
            else:
                own = np.stack([self.clip(x) for x in g[k]]) + penalty
                direction, self.u[k], self.v[k] = self.send(own, u, v, mu)
            directions[k] = direction
        return directions

    def clip(self, g):
        """Return a worker's gradient, clipped."""
        most = self.options.get("local_grad_clip_norm")
        return g if most is None else clip({0: g}, "norm", most / self.num_workers**0.5)[0]

    def send(self, g, u, v, mu):
        """Return the mean of what workers send, and what each keeps."""
        nesterov = self.options.get("nesterov", False)
        u = mu * (u + g) if nesterov else mu * u + g
        v = v + (u + g if nesterov else u)
        sparsity = self.options["sparsity"]
        place = (self.step - self.options["rampup_begin_step"]) * len(sparsity)
        place //= self.options.get("rampup_step", 1)
        density = 1 - sparsity[min(place, len(sparsity) - 1)]
        sent = np.stack([top_k(x.astype(np.float32), density, None) for x in v]).astype(np.float64)
        self.has_kept |= bool(np.any(v[sent == 0]))
        is_masked = (sent != 0) & self.options.get("momentum_masking", True)
        return sent.mean(0), np.where(is_masked, 0, u), np.where(sent != 0, 0, v)


def join(tree, names, shape):
    """Return leaves in one array, of this shape but for its last axis."""
    return np.concatenate([np.reshape(tree[k], shape) for k in names], -1)


def split(buffer, like, names):
    """Return the leaves that `join` has put together."""
    ends = np.cumsum([like[k].size for k in names])
    parts = np.split(buffer, ends[:-1])
    return {k: np.reshape(x, like[k].shape) for k, x in zip(names, parts, strict=True)}


def mean_of_workers(g):
    """Return the mean gradient of the workers."""
    return {k: np.asarray(x.mean(0)) for k, x in g.items()}


def frozen_of(program):
    """Return the leaves that are not trained."""
    return [k for k, x in program.attrs.items() if not x.get("trainable", True)]


class LocalSteps:
    """The optimizers of workers that take steps alone, and the outer one of their rounds."""

    def __init__(self, program):
        names = [k for k in program.leaves if k != "count"]
        inner = dataclasses.replace(program, outer=None)
        self.workers = [wrap(inner, make_rule(inner, names), program.links) for _ in range(WORKERS)]
        options = {"rule": ("momentum", {"momentum": 0.5}), "rate": 0.7}
        if program.outer is None:
            options = {"rule": ("sgd", {}), "rate": 1.0}
        plain = {"schedule": None, "clip": None, "regularization": None, "attrs": {}, "links": ()}
        rule = Rule(dataclasses.replace(program, **options, **plain), names)
        if program.compressor:
            rule = Exchange(program, rule, program.compressor)
        self.outer = wrap(program, rule, program.outer or ())


WORKERS = 4


class Partition:
    """Two labels: some leaves have a rule of their own, and links around it."""

    def __init__(self, program, names):
        own = program.partition["leaves"]
        rest = [k for k in names if k not in own]
        rule = SetToZero() if program.partition.get("frozen") else make_rule(program, own)
        self.labels = [
            (rest, make_rule(program, rest)),
            (own, wrap(program, rule, program.partition["links"])),
        ]

    def update(self, g, p, w, value):
        found = []
        for names, link in self.labels:
            of_label = [{k: x[k] for k in names} for x in (g, p)]
            found.append(link.update(*of_label, w, value))
        if not any(map(is_update, found)):
            return WAITING if WAITING in found else SKIPPED
        results = {}
        for (names, _), u in zip(self.labels, found, strict=True):
            results |= u if is_update(u) else {k: 0 * p[k] for k in names}
        return results


class SetToZero:
    """The rule of optax that changes nothing."""

    def update(self, g, p, w, value):
        return SKIPPED if w == 0 else {k: 0 * x for k, x in p.items()}


class Trace:
    """Momentum before the rest of the chain: m = 0.5·m + g."""

    def __init__(self, program, inner):
        self.inner, self.m = inner, None

    def update(self, g, p, w, value):
        if w == 0:
            return self.inner.update(g, p, w, value)
        before = self.m
        self.m = {k: g[k] + (0 if before is None else 0.5 * before[k]) for k in g}
        u = self.inner.update(self.m, p, w, value)
        if u == SKIPPED:
            self.m = before
        return u


class Plateau:
    """The rate falls by half when more than `patience` values in a row are no better."""

    def __init__(self, program, inner, patience, monitor="value", **options):
        self.inner, self.patience, self.monitor = inner, patience, monitor
        self.cooldown, self.least = options.get("cooldown", 0), options.get("min_lr", 0.0)
        self.threshold, self.ignored = options.get("threshold", 1e-4), 0
        self.is_relative = options.get("threshold_mode", "rel") == "rel"
        by_evaluation = monitor == "evaluation" and program.evaluate
        mode = program.evaluate["mode"] if by_evaluation else options.get("mode", "min")
        self.sign = -1 if mode == "max" else 1
        self.rate, self.best, self.bad, self.told = program.rate, None, 0, None

    def update(self, g, p, w, value):
        u = self.inner.update(g, p, w, value)
        if not is_update(u):
            return u
        if self.told is not None:  # the metric of the update before
            self.judge(self.told)
        self.told = value if self.monitor == "value" else None
        return {k: self.rate * u[k] for k in u}

    def judge(self, v):
        if self.ignored:
            self.ignored -= 1
            return
        if v == v and (self.best is None or self.sign * v < self.sign * self.best - self.gap()):
            self.best, self.bad = v, 0
        else:
            self.bad += 1
        if self.bad > self.patience:
            lower = max(self.rate / 2, self.least)
            self.rate, self.bad, self.ignored = min(self.rate, lower), 0, self.cooldown

    def gap(self):
        return self.threshold * (self.best if self.is_relative else 1.0)


class Scaled:
    """A schedule of optax behind the rule, as a fraction of its rate."""

    def __init__(self, program, inner):
        self.inner, self.n = inner, 0

    def update(self, g, p, w, value):
        u = self.inner.update(g, p, w, value)
        if not is_update(u):
            return u
        self.n += 1
        return {k: x / self.n for k, x in u.items()}


class Average:
    """A mean by weight of what stood after each update, oldest first: params, and model states."""

    def __init__(self, program, inner):
        self.inner, self.params, self.model_states, self.weights = inner, [], [], []

    def update(self, g, p, w, value):
        u = self.inner.update(g, p, w, value)
        if is_update(u):
            self.params.append({k: p[k] + u[k] for k in u})
            self.weigh()
        return u

    def note(self, model_state):
        """Take the model state after a call, if it was an update."""
        if len(self.model_states) < len(self.params):
            self.model_states.append(model_state)

    def read(self, p, model_state):
        """Return the averages; integers of a model state are the last ones."""
        if not self.params:
            return p, model_state
        p = p | {
            k: np.average([x[k] for x in self.params], 0, self.weights) for k in self.params[0]
        }
        if model_state and self.model_states:
            means = [x["mean"] for x in self.model_states]
            model_state = model_state | {"mean": np.average(means, 0, self.weights)}
        return p, model_state


class MovingAverage(Average):
    """Each update weighs d times as much as the next one."""

    def __init__(self, program, inner, decay, thres_steps=False):
        super().__init__(program, inner)
        self.decay, self.thres_steps, self.n = decay, thres_steps, 0

    def weigh(self):
        grown = (1 + self.n) / (10 + self.n) if self.thres_steps else 1.0
        d, self.n = min(self.decay, grown), self.n + 1
        self.weights = [d * x for x in self.weights] + [1 - d]


class ModelAverage(Average):
    """Updates of this window and of the last one, which was full, count alike."""

    def __init__(self, program, inner, window):
        super().__init__(program, inner)
        self.window, self.count = window, 0

    def weigh(self):
        self.weights, self.count = [1.0] * len(self.params), self.count + 1
        if self.count == self.window:
            old = len(self.params) - self.window
            for x in self.params, self.model_states, self.weights:
                del x[:old]
            self.count = 0


class Masters:
    """The rule moves masters in a wider dtype; params are these, rounded to their own."""

    def __init__(self, program, inner, form):
        self.inner, self.dtype_of, self.masters = inner, program.dtype_of, {}

    def update(self, g, p, w, value):
        before = p | self.masters
        u = self.inner.update(g, before, w, value)
        if not is_update(u):
            return u
        self.masters = {k: before[k] + x for k, x in u.items()}
        rounded = {k: x.astype(self.dtype_of(k)) for k, x in self.masters.items()}
        return {k: x.astype(np.float64) - p[k] for k, x in rounded.items()}


class Accumulate:
    """One update for k calls, with the mean of their gradients, and of their losses, by weight."""

    def __init__(self, program, inner, k):
        self.inner, self.k, self.usual = inner, k, k
        self.calls, self.weight, self.total, self.value = 0, 0.0, None, 0.0

    def update(self, g, p, w, value):
        self.calls += 1
        if w != 0:
            old = self.total
            self.weight, self.value = self.weight + w, self.value + w * value
            self.total = {k: w * g[k] + (old[k] if old else 0) for k in g}
        if self.calls < self.k:
            return WAITING
        total, weight, value = self.total, self.weight, self.value
        self.calls, self.weight, self.total, self.value = 0, 0.0, None, 0.0
        if weight == 0:  # an accumulation inside counts the call
            return self.inner.update({k: 0 * g[k] for k in g}, p, 0, np.nan)
        return self.inner.update({k: total[k] / weight for k in g}, p, weight, value / weight)


class SkipNonfinite:
    """A gradient that is not finite changes nothing, up to ten times in a row. Those of frozen
    leaves do not count."""

    def __init__(self, program, inner, max_consecutive=10):
        self.inner, self.skipped, self.in_a_row, self.gave_up = inner, 0, 0, False
        self.most_in_a_row, self.frozen = max_consecutive, frozen_of(program)
        limit = float(jax.numpy.finfo(program.dtype).max)
        has_rule = any(isinstance(x, Rule) for x in links_of(inner))
        has_squares = has_rule and program.rule[0] in SQUARES
        self.most = np.sqrt(limit) if has_squares else limit

    def is_bad(self, g):
        trained = [x for k, x in g.items() if k not in self.frozen]
        return not all(np.all(np.abs(x) <= self.most) for x in trained)

    def update(self, g, p, w, value):
        if w == 0:
            return self.inner.update(g, p, w, value)
        is_bad = self.is_bad(g)
        self.in_a_row = self.in_a_row + 1 if is_bad else 0
        self.gave_up = is_bad and self.in_a_row > self.most_in_a_row
        if is_bad and not self.gave_up:
            self.skipped += 1
            return SKIPPED
        return self.inner.update(g, p, w, value)


class LossScale(SkipNonfinite):
    """Skips as SkipNonfinite does; the scale then falls, and grows after good calls."""

    def __init__(self, program, inner, interval, **options):
        super().__init__(program, inner, options.get("max_consecutive", 50))
        self.interval, self.scale, self.good = interval, options.get("initial_scale", 4.0), 0
        self.growth = options.get("growth_factor", 2.0)
        self.least = min(options.get("min_scale", 1.0), self.scale)
        self.backoff = options.get("backoff_factor", 0.5)

    def update(self, g, p, w, value):
        u = super().update(g, p, w, value)
        if w != 0 and self.in_a_row:
            self.scale, self.good = max(self.scale * self.backoff, self.least), 0
        elif w != 0:
            self.good += 1
            if self.good >= self.interval:
                self.scale, self.good = self.scale * self.growth, 0
        return u


class ApplyIfFinite(SkipNonfinite):
    """The guard of optax, which knows no squares, and counts in no metrics."""

    def is_bad(self, g):
        return not all(np.all(np.isfinite(x)) for x in g.values())


class SkipSpikes:
    """An update that is much larger than the median of the last ones changes nothing."""

    def __init__(self, program, inner, factor, window, max_consecutive=10):
        self.inner, self.factor, self.skipped, self.in_a_row = inner, factor, 0, 0
        self.norms, self.most_in_a_row = [np.inf] * window, max_consecutive
        self.ratio = 0.0

    def update(self, g, p, w, value):
        before = copy.deepcopy(self.inner)
        u = self.inner.update(g, p, w, value)
        if w == 0 and not is_update(u):  # an accumulation inside may be due in an empty call
            return u
        rate = max([x for x in rates_of(self.inner) if x > 0], default=1.0)
        norm = np.sqrt(sum_of_squares(u)) / rate if is_update(u) else 0.0
        median = np.median(self.norms)
        is_spike, self.ratio = norm > self.factor * median, norm / median
        self.in_a_row = self.in_a_row + 1 if is_spike else 0
        if is_spike and self.in_a_row <= self.most_in_a_row:
            self.inner, self.skipped = before, self.skipped + 1
            return SKIPPED
        if np.isfinite(norm) and norm > 0:
            self.norms = [*self.norms[1:], norm]
        return u


class RecordMetrics:
    """The norms of gradient, update and params in the last update, and those of some leaves."""

    def __init__(self, program, inner, per=()):
        self.inner, self.patterns, self.path_of = inner, per, program.path_of
        self.norms = dict.fromkeys(NORMS, 0.0) | {f"{k}/{x}": 0.0 for k in NORMS for x in per}
        self.freeze(program)

    def freeze(self, program):
        """Leave out the frozen leaves of a program: a step has no gradients of them, and a wrapper
        leaves them out."""
        names = [x[0] for x in program.links]
        is_inside = is_wrapped(names, names.index("record_metrics"))
        self.left_out = frozen_of(program) if is_inside else []
        self.frozen = self.left_out if "by hand" in program.way else frozen_of(program)

    def update(self, g, p, w, value):
        u = self.inner.update(g, p, w, value)
        if is_update(u) and w != 0:
            inexact = {k: x for k, x in p.items() if k in g and k not in self.left_out}
            trees = {k: x for k, x in g.items() if k not in self.frozen}, u, inexact
            self.norms = {k: sum_of_squares(x) ** 0.5 for k, x in zip(NORMS, trees, strict=True)}
            for pattern in self.patterns:
                of_some = [self.norm_of(x, pattern) for x in trees]
                self.norms |= {f"{k}/{pattern}": x for k, x in zip(NORMS, of_some, strict=True)}
        return u

    def metrics(self):
        """Return the norms, and the ratio of the last two for each pattern."""
        pairs = {x: [self.norms[f"{k}/{x}"] for k in NORMS[1:]] for x in self.patterns}
        return self.norms | {f"update_ratio/{k}": np.divide(*x) for k, x in pairs.items()}

    def norm_of(self, tree, pattern):
        """Return the norm of the leaves whose path a pattern matches."""
        chosen = {k: x for k, x in tree.items() if re.fullmatch(pattern, self.path_of(k))}
        return sum_of_squares(chosen) ** 0.5


def is_wrapped(names, place):
    """Tell whether a wrapper stands outside of a link, or a chain that goes on, which leaves frozen
    leaves out too."""
    return not {*names[place + 1 :]}.isdisjoint((*WRAPPERS, "trace"))


NORMS = ("grad_norm", "update_norm", "param_norm")
WRAPPERS = ("accumulate", "skip_nonfinite", "loss_scale", "skip_spikes")
LINKS = {
    "trace": Trace,
    "plateau": Plateau,
    "scaled": Scaled,
    "ema": MovingAverage,
    "model_average": ModelAverage,
    "master_weights": Masters,
    "accumulate": Accumulate,
    "multi_steps": Accumulate,  # whose calls count alike
    "apply_if_finite": ApplyIfFinite,
    "skip_nonfinite": SkipNonfinite,
    "loss_scale": LossScale,
    "skip_spikes": SkipSpikes,
    "record_metrics": RecordMetrics,
}


def wrap(program, link, wrappers):
    """Return a link with others around it, from the inside outwards."""
    for name, *arguments in wrappers:
        options = arguments.pop() if arguments and isinstance(arguments[-1], dict) else {}
        link = LINKS[name](program, link, *arguments, **options)
    return link


def make_optimizer(program):
    """Return the outermost link of a program."""
    if program.local_steps > 1:
        return LocalSteps(program)
    names = [k for k in program.leaves if k != "count"]
    if program.rule[0] == "dgc_momentum":
        link = DeepGradientCompression(program, names)
    else:
        link = (Partition if program.partition else make_rule)(program, names)
    if program.compressor:
        link = Exchange(program, link, program.compressor)
    return wrap(program, link, program.links)


def make_rule(program, names):
    """Return the rule of some leaves."""
    kind = OptaxRule if program.rule[0].startswith("optax.") else Rule
    link = kind(program, names)
    return Masters(program, link, None) if "multi_precision" in program.rule[1] else link


def links_of(link):
    """Return a link and all inside it, from the outside inwards."""
    inside = [link.inner] if hasattr(link, "inner") else []
    if isinstance(link, Partition):
        inside = [x for _, x in link.labels]
    if isinstance(link, LocalSteps):
        inside = [*link.workers, link.outer]
    return [link, *(y for x in inside for y in links_of(x))]


def rates_of(link):
    """Return the learning rates of the last update, those of optax's optimizers left out."""
    links = links_of(link)
    plateaus = [x.rate for x in links if isinstance(x, Plateau)]
    rules = [x.rate for x in links if isinstance(x, Rule | DeepGradientCompression)]
    return [x for x in plateaus or rules if x is not None]


def set_rate(link, rate):
    """Set all rates in a link, which are numbers."""
    for x in links_of(link):
        if isinstance(x, Rule):
            x.p = dataclasses.replace(x.p, rate=rate)
        if isinstance(x, Rule | DeepGradientCompression):
            x.rate = rate


def go_on_among(link, way, num_workers):
    """Let as many workers go on in a way, whose private arrays are the mean of those before."""
    for x in links_of(link):
        if isinstance(x, Exchange):
            x.go_on(way)
        for name in ("residual", "u", "v") + ("total",) * isinstance(x, Accumulate):
            kept = getattr(x, name, None) or {}
            for k, a in kept.items():
                if len(a) != num_workers:
                    kept[k] = np.repeat(np.mean(a, 0, keepdims=True), num_workers, 0)


def train_others(link, program, params):
    """Give the links of an optimizer the attributes of a program: what they keep of a leaf that was
    frozen before begins anew, and the average of a frozen leaf is its value."""
    thawed = set()
    if isinstance(link, LocalSteps):  # the outer optimizer has no attributes
        for worker in link.workers:
            train_others(worker, program, params)
        return
    for x in links_of(link):
        if isinstance(x, SkipNonfinite):
            x.frozen = frozen_of(program)
        if isinstance(x, Rule):
            thawed |= {*frozen_of(x.p)} - {*frozen_of(program)}
            x.p = dataclasses.replace(x.p, attrs=program.attrs)
            x.begun |= dict.fromkeys(thawed, x.count)
            x.states = {k: s for k, s in x.states.items() if k not in frozen_of(program)}
    for x in links_of(link):
        for name in ("m", "total"):  # of Trace and Accumulate
            if kept := getattr(x, name, None):
                setattr(x, name, {k: (k not in thawed) * s for k, s in kept.items()})
        if isinstance(x, Average):
            now = {k: params[k] for k in frozen_of(program)}
            x.params = [{k: now.get(k, v) for k, v in one.items()} for one in x.params]
        if isinstance(x, RecordMetrics):
            x.freeze(program)


def guards_of(link):
    """Return the guards among the links."""
    return [x for x in links_of(link) if hasattr(x, "skipped")]
