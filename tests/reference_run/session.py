"""A run over many drawn programs: what failed, shrunk and shown, and what was reached."""

import collections
import contextlib
import json
import random
import sys
import time
from pathlib import Path

import optfn
from reference_run import draws, known, limits, product, shrink, source
from reference_run.program import Program, to_json

KEPT = Path(__file__).with_name("failures.json")
GOALS = (
    "an update",
    "a guard that skips",
    "a call without weight",
    "a run that resumes",
    "a checkpoint",
    "a broken checkpoint",
    "an end by patience",
    "a best state that is not the last",
)


class Enough(Exception):
    """So many programs have been drawn, or the time is over."""


class Session:
    """Draws programs until there are enough, and prints what it finds."""

    def __init__(self, options):
        self.options, self.begin = options, time.monotonic()
        self.count, self.structures = 0, 0
        self.failures, self.reached = [], collections.Counter()
        self.refusals = collections.Counter()
        self.left_out, self.kinds, self.shown = collections.Counter(), {}, {}

    def run(self):
        print(f"optfn in {Path(optfn.__file__).parents[1]}", flush=True)
        if self.options.kept:
            for p in read_kept():
                if not (self.options.avoid and known.is_open(p)):
                    self.try_program(p)
        else:
            self.draw()
        return self.report()

    def draw(self):
        """Draw structures, and for each some runs, whose step is compiled once."""
        rng = random.Random(self.options.seed)
        with contextlib.suppress(Enough):
            while True:
                self.structures += 1
                self.try_runs(rng, draws.structures(rng))

    def try_runs(self, rng, structure):
        """Draw runs of a structure, and try those that the limits leave."""
        tried = set()
        for _ in range(3 * self.options.each):
            p = draws.runs(rng, structure)
            line = json.dumps(to_json(p))
            reason = limits.unsaid(p)
            self.left_out[reason] += bool(reason)
            is_avoided = self.options.avoid and known.is_open(p)
            if not reason and not is_avoided and line not in tried:
                self.try_program(p)
                tried.add(line)
            if len(tried) == self.options.each:
                break

    def try_program(self, p: Program):
        """Compare the two runs of a program."""
        bad, reached = self.check(p)
        self.count += 1
        self.reached.update(reached)
        if bad:
            self.fail(p, bad)
        is_over = time.monotonic() - self.begin > self.options.seconds
        if not self.options.kept and (self.count >= self.options.programs or is_over):
            raise Enough
        if self.failures and self.options.first:
            raise Enough

    def check(self, p: Program):
        """Return the differences of a program's runs; a refusal must be the one that is listed."""
        words = known.refusal(p)
        bad, reached = product.check(p)
        is_refused = bool(bad) and bad[0][0] in ("raised ValueError", "raised TypeError")
        if words and is_refused and words in bad[0][2]:
            self.refusals[words] += 1
            return [], {"a refusal"}
        if words and "an end by an error" not in reached:
            return [("trained although refused", words, bad[:1])], reached
        return bad, reached

    def fail(self, p: Program, bad):
        """Note a failure; one that no failure before explains is shrunk and shown."""
        field, met = field_of(bad), frozenset(known.faults(p))
        self.failures.append((self.count, field, p))
        explained = [k for k in self.kinds if k[0] == field and (k[1] <= met if k[1] else not met)]
        explained = explained or [k for k in [self.shown.get((field, self.structures))] if k]
        if explained:
            self.kinds[explained[0]].append(self.count)
            return

        def fails(q):
            found, _ = self.check(q)
            return bool(found) and field_of(found) == field

        if self.options.shrink and not self.options.first:
            p = shrink.shrink(p, fails, self.options.shrink)
            bad, met = self.check(p)[0] or bad, frozenset(known.faults(p))
        self.kinds.setdefault((field, met), []).append(self.count)
        self.shown[field, self.structures] = field, met
        if self.options.keep:
            keep(p)
        print(
            f"\n--- program {self.count} fails: {field}; it meets {sorted(met) or 'no known fault'}"
        )
        print(source.whole_text(p) if self.options.shrink else "")
        print(json.dumps(to_json(p)))
        for name, wanted, found in bad[:4]:
            print(f"  {name}: wanted {text(wanted)}, found {text(found)}")
        sys.stdout.flush()

    def report(self):
        """Print what was found; return whether anything failed."""
        seconds = time.monotonic() - self.begin
        for kind, programs in sorted(self.kinds.items(), key=lambda x: x[1][0]):
            names = [kind[0], *sorted(kind[1])]
            print(f"{len(programs)} × {' | '.join(names)}, first after {programs[0]}")
        print(", ".join(f"{n} × {k}" for k, n in self.reached.most_common()))
        print("left out:", ", ".join(f"{n} × {k}" for k, n in self.left_out.most_common() if n))
        if missing := [x for x in GOALS if not self.reached[x]]:
            print("never reached:", ", ".join(missing))
        rate = 60 * self.count / seconds
        print(f"{self.structures} structures, {seconds:.0f} s, {rate:.0f} a minute")
        if self.options.json:
            first = [[n, field, known.faults(p), to_json(p)] for n, field, p in self.failures]
            Path(self.options.json).write_text(json.dumps({"count": self.count, "failures": first}))
        refused = f"{self.refusals.total()} refusals of {len(self.refusals)} kinds"
        print(f"{self.count} programs, {len(self.failures)} failures, {refused}")
        return bool(self.failures)


def field_of(bad):
    """Return what differs first, without the name of a leaf or the number of a step."""
    return bad[0][0].split("/")[0].rstrip("0123456789 ")


def text(x):
    """Return a value in one line."""
    shown = " ".join(str(x.tolist() if hasattr(x, "tolist") else x).split())
    return shown if len(shown) < 300 else shown[:300] + "…"


def keep(p: Program):
    """Keep a failure for later runs, the last fifty of them."""
    cases = [to_json(x) for x in read_kept() if x != p]
    lines = [json.dumps(x) for x in [*cases, to_json(p)][-50:]]
    KEPT.write_text("[\n" + ",\n".join(lines) + "\n]\n")


def read_kept():
    """Return the programs of failures that were found before."""
    return [Program(**x) for x in json.loads(KEPT.read_text())] if KEPT.exists() else []
