"""The shortest program that still fails: data and run first, since they need no other step."""

import dataclasses
import time

from reference_run import limits
from reference_run.program import Program

replace = dataclasses.replace
STRUCTURE = (
    "rows",
    "spelling",
    "stacked",
    "stages",
    "aux",
    "model_state",
    "key",
    "pass_step",
    "schedule",
    "clip",
    "regularization",
    "partition",
    "attrs",
    "rule",
    "wide",
    "dtype",
    "loss",
    "way",
)


def without(items, i):
    return [*items[:i], *items[i + 1 :]]


def with_item(items, i, item):
    return [*items[:i], item, *items[i + 1 :]]


def smaller_runs(p: Program):
    """Yield programs with a simpler run or simpler data."""
    for i in range(len(p.parts) - 1):
        yield replace(p, parts=without(p.parts, i))
    for i, part in enumerate(p.parts):
        for key in ("way", "rate", "drop_last", "every", "set_rate", "accumulate"):
            if key in part:
                yield replace(
                    p, parts=with_item(p.parts, i, {k: v for k, v in part.items() if k != key})
                )
        if i == len(p.parts) - 1 and part:
            yield replace(p, parts=with_item(p.parts, i, {}))
    if p.parts[-1].get("carry") == "thaw":
        plain = {k: v for k, v in p.parts[-1].items() if k != "attrs"}
        yield replace(p, parts=with_item(p.parts, len(p.parts) - 1, plain | {"carry": "file"}))
    if p.evaluate:
        yield replace(p, evaluate=None)
    for k, v in (
        ("epochs", None),
        ("loader", "list"),
        ("loop", "fit"),
        ("saves", False),
        ("save_every", 100),
        ("keep", 2),
        ("prefetch", 1),
        ("log", False),
        ("save_frozen", True),
        ("stops", False),
        ("reports", False),
    ):
        if getattr(p, k) != v:
            yield replace(p, **{k: v})
    for i in reversed(range(len(p.batches))):
        if len(p.batches) > 1:
            yield replace(p, batches=without(p.batches, i))
    for i, b in enumerate(p.batches):
        for change in ({"bad": None}, {"weights": [1.0] * 8}, {"weights": [0.0] * 8}):
            if b | change != b | {"bad": b.get("bad")}:
                yield replace(p, batches=with_item(p.batches, i, b | change))
    plain = {"patience": None, "keep_best": False, "values": None, "every": 1}
    plain |= {"named": False, "held": False}
    for k, v in plain.items():
        if p.evaluate and p.evaluate.get(k, v) != v:
            yield replace(p, evaluate=p.evaluate | {k: v})
    for i, part in enumerate(p.parts):
        for k in part.keys() & {"steps", "kill", "callback", "signal"}:
            if part[k] > 1:
                yield replace(p, parts=with_item(p.parts, i, part | {k: part[k] - 1}))


def smaller_structures(p: Program):
    """Yield programs with a simpler step."""
    plain = Program()
    for k in STRUCTURE:
        if getattr(p, k) != getattr(plain, k):
            yield replace(p, **{k: getattr(plain, k)})
    for i in range(len(p.links)):
        yield replace(p, links=without(p.links, i))
    for k in ("empty", "count", "large", "z"):
        if k in p.leaves:
            yield replace(p, leaves=tuple(x for x in p.leaves if x != k))
    for k in p.attrs:
        yield replace(p, attrs={x: y for x, y in p.attrs.items() if x != k})
    if p.evaluate and p.evaluate["average"]:
        yield replace(p, evaluate=p.evaluate | {"average": False})
    for way in ("mesh", "packed", "state"):
        if p.way not in ("one", "mesh", "packed", "state"):
            yield replace(p, way=way)


def shrink(p: Program, fails, seconds: float) -> Program:
    """Return the simplest program found in some seconds for which `fails` holds still."""
    end, simpler = time.monotonic() + seconds, True
    while simpler and time.monotonic() < end:
        simpler = False
        for candidates in (smaller_runs, smaller_structures):
            for q in candidates(p):
                if time.monotonic() > end:
                    break
                if not limits.unsaid(q) and fails(q):
                    p, simpler = q, True
                    break
            if simpler:
                break
    return p
