"""The reference run: the loop over the calls of a program, its evaluations and checkpoints."""

import copy
import dataclasses

import numpy as np

import reference_run.links as links
from reference_run import model
from reference_run.program import Program, batches_of, first_params


def run(p: Program, ways: dict) -> dict:
    """Return what a user can read at the end of each call of the loop, the last one's alone.

    ways: by name, how a run is divided: its workers and microbatches.
    """
    begin = {
        "n": 0,
        "calls": [],
        "evaluations": [],
        "optimizer": links.make_optimizer(p),
        "params": {
            k: np.asarray(x, x.dtype if k == "count" else np.float64)
            for k, x in first_params(p).items()
        },
        "model_state": model.first_model_state(p),
        "is_finite": True,
    }
    disk, lines, best, given, reached, result = {}, {}, [], [0], set(), {}
    last = begin
    for part in p.parts:
        first = last if "carry" in part else begin
        if part.get("carry") in ANEW:  # the optimizer begins anew
            first = begin | {k: last[k] for k in ANEW[part["carry"]]}
        if "carry" in part:
            best.clear()
            reached.add("a state that goes on in another call")
        loop = Loop(p, part, copy.deepcopy(first), disk, lines, best, given, ways, reached)
        result = loop.run()
        last = loop.state | {"calls": [], "evaluations": []}
        if "raised" in result:
            reached.add("an end by an error")
            break
    return result | {"reached": reached}


ANEW = {"params": ("params", "model_state"), "only": ("params",)}


class Loop:
    """One call of the loop, which goes on from what is on the disk.

    disk: the checkpoints by step, each a state with the history until there.
    lines: of the log by step, each a dict of numbers.
    best: the states that were the best when they were evaluated: (step, state, is_due).
    first: the value of the state that the loop begins with, if it compares that one.
    given: how many values the evaluation has given so far.
    """

    def __init__(self, p, part, begin, disk, lines, best, given, ways, reached):
        if "drop_last" in part:
            p = dataclasses.replace(p, loader=[*p.loader[:3], part["drop_last"]])
        self.p, self.part, self.disk, self.best, self.given = p, part, disk, best, given
        self.evaluate, self.reached = p.evaluate, reached
        if "every" in part:
            self.evaluate = p.evaluate | {"every": part["every"]}
        self.way, self.alone = ways[part.get("way", p.way)], ways["one"]
        whole = [n for n in disk if disk[n]["is_finite"]] or [*disk]
        self.state = copy.deepcopy(disk[max(whole)]) if disk else begin
        self.per_epoch = len(batches_of(p, 0)) * p.local_steps
        self.lines = lines
        for n in [n for n in lines if n > self.n]:
            del lines[n]
        best[:] = [x for x in best if x[0] <= self.n]
        self.first: list[float] = []
        if "attrs" in part:
            self.p = p.of_part(part)
            links.train_others(self.state["optimizer"], self.p, self.state["params"])
        for x in links.links_of(self.state["optimizer"]):
            if isinstance(x, links.Accumulate) and not p.partition:
                x.k = part.get("accumulate", x.usual)
        if p.exchanges:
            name = part.get("way", p.way)
            links.go_on_among(self.state["optimizer"], name, self.way.exchanging)
        if "set_rate" in part:
            links.set_rate(self.state["optimizer"], part["set_rate"])
        if part.get("carry", "params") not in ANEW and self.evaluate and self.evaluate["keep_best"]:
            value = self.value_of_state()
            if value == value:
                self.first, self.best[:] = [value], [(self.n, copy.deepcopy(self.state), True)]

    @property
    def n(self):
        return self.state["n"]

    def run(self):
        p, part, begin = self.p, self.part, self.n
        last = min(p.num_steps, part.get("steps") or p.num_steps)
        is_stopped = False
        if begin:
            self.reached.add("a run that resumes")
        while self.n < last and not is_stopped and not self.gave_up():
            if self.n == part.get("kill"):
                return {"killed": self.n} | self.left_behind()
            if self.n == begin:  # an evaluation that only ended the run before counts for nothing
                for n in [n for n, _, is_due in self.state["evaluations"] if not is_due]:
                    for k in self.values_by_name(0.0):
                        self.lines[n].pop(k, None)
                self.state["evaluations"] = [x for x in self.state["evaluations"] if x[2]]
                self.best[:] = [x for x in self.best if x[2]]
            if self.has_given_up():
                return {"raised": "FloatingPointError"} | self.left_behind()
            if p.local_steps > 1:
                self.call_round()
            else:
                self.call()
            if self.is_due():
                self.note(True)
            if p.stops and not (np.isfinite(self.last_loss) or self.is_guarded):
                self.reached.add("a loss that stops the run")
                return {"raised": "FloatingPointError"} | self.left_behind()
            is_stopped = self.n in (part.get("callback"), part.get("signal"))
            if not is_stopped and not self.gave_up() and self.has_passed(p.save_every):
                if p.saves and self.has_given_up():
                    return {"raised": "FloatingPointError"} | self.left_behind()
                self.save()
        if self.has_given_up() and p.loop == "fit":  # a step raises in the next call
            return {"raised": "FloatingPointError"} | self.left_behind()
        if self.n > begin:
            self.end()
        return self.result(is_stopped)

    @property
    def last_loss(self):
        """The loss of the last call, 0 for one without weight."""
        call = self.state["calls"][-1]
        return call["loss"] if call.get("weight", 1) else 0.0

    @property
    def is_guarded(self):
        """Whether the optimizer leaves out gradients that are not finite."""
        guards = links.guards_of(self.state["optimizer"])
        return any(isinstance(x, links.SkipNonfinite) for x in guards)

    def has_given_up(self):
        """Whether a guard ends the run, which a step by hand or in a compiled loop cannot."""
        guards = links.guards_of(self.state["optimizer"])
        is_seen = not self.way.by_hand and self.p.loop in ("fit", "own")
        return is_seen and any(getattr(x, "gave_up", False) for x in guards)

    def call(self):
        """Make one call of the step."""
        p, state, n = self.p, self.state, self.n
        value, grads, weight, aux = model.differentiate(
            p, state["params"], (batch := self.batch()), state["model_state"], n, self.way
        )
        if not p.exchanges:
            grads = links.mean_of_workers(grads)
        optimizer = state["optimizer"]
        guards = links.guards_of(optimizer)
        before = [x.skipped for x in guards]
        u = optimizer.update(grads, state["params"], weight, value)
        is_skipped = before != [x.skipped for x in guards]
        if links.is_update(u):
            state["params"] = state["params"] | {k: state["params"][k] + x for k, x in u.items()}
        if p.model_state and weight and not is_skipped:
            _, state["model_state"] = model.pass_on(p, state["model_state"], batch, self.way)
        for x in links.links_of(optimizer):
            if isinstance(x, links.Average) and self.evaluate and self.evaluate["average"]:
                x.note(state["model_state"])
        metrics = self.metrics(value, weight, aux)
        is_finite = not weight or is_skipped or np.isfinite(value)
        state |= {"n": n + 1, "calls": [*state["calls"], metrics], "is_finite": is_finite}
        self.lines[self.n] = {**metrics}
        self.reached |= {"an update"} if links.is_update(u) else set()
        self.reached |= {"a guard that skips"} if is_skipped else set()
        if any(getattr(x, "has_kept", False) for x in links.links_of(optimizer)):
            self.reached.add("a residual that is not 0")
        self.reached |= {"a call without weight"} if not weight else set()

    def batch(self):
        """Return the batch of the next call."""
        place = self.n % self.per_epoch // self.p.local_steps
        return batches_of(self.p, self.n // self.per_epoch)[place]

    def call_round(self):
        """Let each worker take local steps on equal pieces of its examples; then the outer step."""
        p, state, optimizer = self.p, self.state, self.state["optimizer"]
        own = [np.split(x, len(optimizer.workers) * p.local_steps) for x in self.batch()]
        pieces, ends, total, weights = iter(zip(*own, strict=True)), [], 0.0, 0.0
        parts, kept = [], []
        for number, worker in enumerate(optimizer.workers):
            params, model_state = state["params"], state["model_state"]
            for i in range(p.local_steps):
                piece = next(pieces)
                value, grads, weight, aux = model.differentiate(
                    p, params, piece, model_state, self.n + i, self.way, number
                )
                before = [x.skipped for x in links.guards_of(worker)]
                u = worker.update(links.mean_of_workers(grads), params, weight, value)
                params = (
                    params | {k: params[k] + x for k, x in u.items()}
                    if links.is_update(u)
                    else params
                )
                total, weights = total + (weight * value if weight else 0), weights + weight
                parts.append((weight, aux))
                is_skipped = before != [x.skipped for x in links.guards_of(worker)]
                if p.model_state and weight and not is_skipped:
                    _, model_state = model.pass_on(p, model_state, piece, self.way, number)
            ends.append(params)
            kept.append(model_state)
        if weights and p.model_state:
            state["model_state"] = kept[0] | {"mean": np.mean([x["mean"] for x in kept], 0)}
        if weights:
            start = state["params"]
            drift = {k: np.stack([start[k] - x[k] for x in ends]) for k in start if k != "count"}
            drift = drift if p.compressor else links.mean_of_workers(drift)
            u = optimizer.outer.update(drift, start, 1.0, 0.0)
            state["params"] = start | {k: start[k] + x for k, x in u.items()}
        for x in links.links_of(optimizer.outer):
            if isinstance(x, links.Average) and self.evaluate and self.evaluate["average"]:
                x.note(state["model_state"])
        value = total / weights if weights else np.nan
        metrics = self.metrics(value, weights, model.join_aux(parts))
        is_finite = not weights or np.isfinite(value) or bool(links.guards_of(optimizer))
        state |= {
            "n": self.n + p.local_steps,
            "calls": [*state["calls"], metrics],
            "is_finite": is_finite,
        }
        self.lines[self.n] = {**metrics}
        self.reached |= {"an update", "a round of local steps"}

    def metrics(self, value, weight, aux):
        """Return the metrics of a call."""
        p, optimizer = self.p, self.state["optimizer"]
        metrics = {"loss": value}
        if p.is_weighted:
            metrics["weight"] = weight
        if p.aux:
            metrics |= {f"aux/{k}": x for k, x in aux.items()}
        # A round has the largest rate of its workers, of which a guard may have dropped a step.
        inner = optimizer.workers if p.local_steps > 1 else [optimizer]
        rates = [rate for x in inner for rate in links.rates_of(x)[:1]]
        if rates and not p.partition:
            metrics["learning_rate"] = max(rates)
        inside = links.links_of(optimizer)
        for x in inside:
            is_counted = not (self.way.by_hand or isinstance(x, links.ApplyIfFinite))
            if isinstance(x, links.SkipNonfinite) and is_counted:
                metrics["skipped"] = max(metrics.get("skipped", 0), x.skipped)
            if isinstance(x, links.RecordMetrics):
                metrics |= x.metrics()
            if isinstance(x, links.SkipSpikes) and not self.way.by_hand:
                metrics["spike_ratio"] = x.ratio
            if isinstance(x, links.LossScale):
                metrics["loss_scale"] = x.scale
        if p.epochs:
            metrics["epoch"] = self.n // self.per_epoch + 1
        return metrics

    def has_passed(self, every):
        """Tell whether the last call has passed a multiple of a number of steps."""
        return self.n // every > (self.n - self.p.local_steps) // every

    def is_due(self):
        """Tell whether an evaluation is due after the last call."""
        every = self.evaluate and self.evaluate["every"]
        return bool(every) and self.has_passed(self.per_epoch if every == "epoch" else every)

    def judge(self, values):
        """Return how many of the last values in a row were no better than the best before them."""
        best, bad = None, 0
        sign = -1 if self.evaluate["mode"] == "max" else 1
        for v in [*self.first, *values]:
            is_better = v == v and (best is None or sign * v < sign * best)
            best, bad = (v, 0) if is_better else (best, bad + 1)
        return bad

    def gave_up(self):
        patience = self.evaluate and self.evaluate["patience"]
        due = [v for _, v, is_due in self.state["evaluations"] if is_due]
        return bool(patience) and self.judge(due) >= patience

    def note(self, is_due):
        """Evaluate the state; one that is not due only ends the run, and no plateau hears of it."""
        state, value = self.state, self.value_of_state()
        self.lines[self.n] |= self.values_by_name(value)
        state["evaluations"] = [*state["evaluations"], (self.n, float(value), is_due)]
        for x in links.links_of(state["optimizer"]):
            if is_due and isinstance(x, links.Plateau) and x.monitor == "evaluation":
                x.told = float(value)
        if not self.judge([v for _, v, _ in state["evaluations"]]):
            before = [x for x in self.best if x[2]]
            self.best[:] = [*before, (self.n, copy.deepcopy(state), is_due)]

    def value_of_state(self):
        """Return the value that the evaluation gives for the state."""
        state, e = self.state, self.evaluate
        if e["values"]:
            self.given[0] += 1
            return e["values"][(self.given[0] - 1) % len(e["values"])]
        params, kept = state["params"], state["model_state"]
        params, kept = average_of(state) if e["average"] else (params, kept)
        if e.get("held"):
            return model.loss_of_held(self.p, params, kept, self.alone)
        judged = {**params, **(kept or {})}
        return sum(np.sum(x) for k, x in judged.items() if k not in ("count", "seen", "key"))

    def values_by_name(self, value):
        """Return the numbers of an evaluation by their names in history and log."""
        more = {} if self.p.judged == "evaluation" else {"evaluation/other": 1.0}
        return {self.p.judged: value} | more

    def save(self):
        """Write a checkpoint, and remove those that are broken, or older than those kept."""
        if not self.p.saves:
            return
        disk, state = self.disk, copy.deepcopy(self.state)
        state["is_finite"] &= all_finite(state["params"]) and all_finite(state["optimizer"])
        for n in [n for n in disk if not disk[n]["is_finite"]]:
            del disk[n]
        disk[self.n] = state
        for n in sorted(n for n in disk if disk[n]["is_finite"])[: -self.p.keep]:
            del disk[n]
        self.reached.add("a checkpoint")
        if not state["is_finite"]:
            self.reached.add("a broken checkpoint")

    def end(self):
        """Evaluate and save the last state, unless that is done."""
        seen = self.state["evaluations"]
        is_new = bool(self.evaluate) and not (seen and seen[-1][0] == self.n)
        if is_new:
            self.note(False)
        if self.n not in self.disk or is_new:
            self.save()

    def result(self, is_stopped):
        """Return what the loop returns, and what it leaves on the disk."""
        calls, e = self.state["calls"], self.evaluate
        history = {k: [c[k] for c in calls] for k in calls[0]} if calls else {}
        if e and self.state["evaluations"]:
            rows = [self.values_by_name(x[1]) for x in self.state["evaluations"]]
            history |= {k: [row[k] for row in rows] for k in rows[0]}
            history |= {"evaluation_step": [x[0] for x in self.state["evaluations"]]}
        end = "batches" if self.part.get("steps") is None else "steps"
        stopped = "patience" if self.gave_up() else "callback" if is_stopped else end
        stopped = "signal" if is_stopped and self.part.get("signal") else stopped
        if stopped == "patience":
            self.reached.add("an end by patience")
        best = self.best[-1][1] if e and e["keep_best"] and self.best else self.state
        if best["n"] != self.n:
            self.reached.add("a best state that is not the last")
        self.state = copy.deepcopy(best)
        return {
            "calls": len(calls),
            "step": self.n,
            "params": self.state["params"],
            "model_state": self.state["model_state"],
            "average": average_of(self.state)[0],
            "history": history,
            "stopped": stopped,
            "statistics": self.p.estimates_statistics
            and {"mean": model.statistics_of_held(self.p)},
        } | self.left_behind()

    def left_behind(self):
        """Return what a run leaves on the disk, however it ends."""
        return {"disk": {n: saved(x) for n, x in self.disk.items()}, "log": self.lines}


def average_of(state):
    """Return the averages of params and model state by the outermost average, None without one."""
    found = [x for x in links.links_of(state["optimizer"]) if isinstance(x, links.Average)]
    return found[0].read(state["params"], state["model_state"]) if found else (None, None)


def saved(state):
    """Return what a checkpoint has of a state, by name."""
    params, model_state = average_of(state)
    trees = {"": state["params"], "model_state/": state["model_state"]}
    trees |= {"average/": params, "average/model_state/": model_state}
    return {f"{name}{k}": x for name, tree in trees.items() for k, x in (tree or {}).items()}


def all_finite(x):
    """Tell whether all arrays in a link, a dict or a sequence are finite."""
    if isinstance(x, np.ndarray | np.floating):
        return bool(np.all(np.isfinite(x)))
    parts = x.values() if isinstance(x, dict) else x if isinstance(x, list | tuple) else []
    parts = vars(x).values() if hasattr(x, "__dict__") and not isinstance(x, Program) else parts
    return all(map(all_finite, parts))
