"""What optfn refuses, and known faults: `--avoid` leaves out programs that meet an open one."""

import math

from reference_run.limits import AVERAGES, FOREIGN, Facts
from reference_run.links import frozen_of
from reference_run.program import SHAPES, TABLES, Program, batches_of
from reference_run.source import WAYS

# The faults that are not mended. The others name what an older tree fails by.
OPEN: tuple[str, ...] = ()


def is_open(p: Program) -> bool:
    """Tell whether a program meets a fault that is not mended."""
    return any(name in OPEN for name in faults(p))


def refusal(p: Program) -> str:
    """Return words of the error that a program must end with, "" if it trains."""
    return next(filter(None, (refusal_in(p, way) for way in Facts(p).ways)), "")


def refusal_in(p: Program, way: str) -> str:
    """Return words of the error with which a call of the loop ends, "" if it trains.

    docs/recipes.md has the reasons: packed params have no leaves for labels and shapes, and what
    stands in front of an exchange keeps gradients of one worker.
    """
    foreign, by_hand = p.names(*FOREIGN), "by hand" in way
    is_own = "pmap" in way  # whose devices keep what they like
    if foreign and p.exchanges and not is_own:
        return "encloses a transform that exchanges gradients"
    if p.loop == "vmap" and "host" in way:
        return "memory_space of all inputs passed to `gather` must be the same"
    if "packed" in way and (p.partition is not None or decays_by_shape(p)):
        return "cannot be combined with packed=True"
    if p.names("multi_steps") and p.is_weighted and not by_hand:
        return "optax.MultiSteps takes the plain mean of several gradients"
    if p.exchanges and p.names("trace") and not is_own:
        return "would differ between workers"
    if p.is_pipeline and p.names("loss_scale"):
        return "dynamic_loss_scale needs loss_fn"
    is_foreign = p.rule[0].startswith("optax.") and not p.regularization  # which makes rows dense
    tables = sparse_of(p) if "tables" in way else []
    if any(decays_by_shape(p, k) or is_foreign or foreign for k in tables):
        if by_hand and p.links and p.links[-1][0] == "multi_steps":
            return "different types at key path"  # the error of JAX, since optax has the call
        return "put optfn.sparse.densify() before it"
    return ""


def sparse_of(p: Program) -> list[str]:
    """Return the tables whose gradients are rows: what sums them in front of a rule makes them
    dense."""
    tables, partition = TABLES.keys() & {*p.leaves}, p.partition or {"leaves": (), "links": ()}
    # Those on the outside see them first.
    outside = [x[0] for x in p.links if x[0] in ("accumulate", "trace", *FOREIGN)][-1:]
    if not Facts(p).has("tables") or not {*FOREIGN}.issuperset(outside):
        return []
    sums = any(x[0] == "accumulate" for x in partition["links"])
    return [k for k in tables if not (sums and k in partition["leaves"])]


def decays_by_shape(p: Program, *names: str) -> bool:
    """Tell whether a rule of another library decays a leaf because it is a matrix: one of these, or
    any."""
    attrs = [p.attrs.get(k, {}) for k in names or ("w", "large", *TABLES) if k in p.leaves]
    trained = [x for x in attrs if x.get("trainable", True) and x.get("learning_rate", 1.0)]
    decays = [x.get("regularization", p.regularization) for x in trained]
    return any(x is not None and x[0] == "matrices" for x in decays)


def faults(p: Program) -> list[str]:
    """Return the names of the known faults, mended or not, whose conditions a program meets."""
    facts = Facts(p)
    met = of_empty_calls(p, facts) | of_judges(p, facts) | of_layouts(p, facts)
    met |= of_own_loops(p, facts)
    return [name for name, holds in met.items() if holds]


def of_empty_calls(p: Program, facts: Facts) -> dict[str, bool]:
    """Return which faults of updates that do not count a program meets."""
    weights = [w for b in p.batches for w in b["weights"]] if p.is_weighted else []
    by_call = [x[2].sum() for e in range(p.epochs or 1) for x in batches_of(p, e)]
    is_empty = p.is_weighted and 0 in by_call
    accumulates = bool(p.names("accumulate"))
    nested = len(p.names("accumulate")) > 1
    by_value = bool(p.names("plateau")) and not p.watches_evaluations
    more = accumulates or bool(p.names("skip_spikes"))
    return {
        "02 small weights": accumulates and any(0 < w < 1e-4 for w in weights),
        "03 plateau in accumulate": accumulates and by_value,
        "11 counts of workers in local steps": p.local_steps > 1 and 0 in weights,
        "20 exchange of nothing": p.exchanges and is_empty,
        "77 spikes or masters of labels in an empty call": bool(
            p.partition and p.names("skip_spikes", "master_weights")
        )
        and accumulates
        and is_empty,
        "21 labels and an empty call": bool(p.partition) and accumulates and is_empty,
        "22 nested accumulations": nested and p.is_weighted,
        "24 model state of an empty call": p.model_state and accumulates and is_empty,
        "25 checkpoint of an empty call": p.saves and is_empty,
        "27 checkpoint with a NaN in its state": p.saves and facts.has_bad and more,
    }


def of_judges(p: Program, facts: Facts) -> dict[str, bool]:
    """Return which faults of what judges values a program meets."""
    e, plateaus = p.evaluate or {}, bool(p.names("plateau"))
    has_nan = any(map(math.isnan, e.get("values") or ())) or facts.has_bad
    judges = bool(e) and (e["keep_best"] or plateaus)
    return {
        "01 first value NaN": plateaus and has_nan,
        "08 another drop_last": bool(facts.drops),
        "09 patience at the end": bool(e.get("patience")),
        "84 plateaus of a best state": judges and any("carry" in x for x in p.parts),
        "78 a best state and a broken end": judges and facts.has_bad and len(p.parts) > 2,
        "10 evaluation at the end": judges and len(p.parts) > 1,
        "79 a spike's guard stands for one of NaN": p.stops and bool(p.names("skip_spikes")),
        "80 frozen params of a best state": not p.save_frozen and judges,
        "70 squares that overflow": any(b.get("bad") == "huge" for b in p.batches),
    }


def of_own_loops(p: Program, facts: Facts) -> dict[str, bool]:
    """Return which faults of steps by hand, and of states that are handed on, a program meets."""
    by_hand, is_thawed = facts.has("by hand"), any("attrs" in x for x in p.parts)
    guards = bool(p.names("skip_nonfinite", "loss_scale"))
    from_pmap = facts.has("pmap") and any("carry" in x for x in p.parts)
    least = 2 if "power_sgd" in str(p.compressor) else 1
    is_sent = any(len(SHAPES[k]) >= least for k in p.leaves if k not in frozen_of(p))
    counts = {WAYS[way].exchanging for way in facts.ways}
    return {
        "85 guards in a loop of one's own": by_hand and guards and p.is_weighted,
        "86 workers by hand decide alone": by_hand and guards and p.exchanges,
        "87 a checkpoint of a pmap": from_pmap and (p.exchanges or is_thawed),
        # The number of workers of a state was known by its residuals alone.
        "90 sums of workers beside no residual": bool(p.exchanges and p.names("accumulate"))
        and len(counts) > 1
        and not is_sent,
        "88 an evaluation that was due": any("every" in x or "drop_last" in x for x in p.parts),
        "89 a leaf that begins late on the host": is_thawed and facts.has("packed"),
    }


def of_layouts(p: Program, facts: Facts) -> dict[str, bool]:
    """Return which faults of how arrays lie a program meets."""
    packed, records = facts.has("packed"), bool(p.names("record_metrics"))
    by_shape = decays_by_shape(p)
    frozen, by_compiler = bool(frozen_of(p)), facts.has("compiler, microbatches")
    return {
        "76 updates of masters in accumulate": p.dtype == "float32"
        and bool(p.names("master_weights") and p.names("accumulate")),
        "12 a rule in packed attributes": packed and "matrices" in str(p.attrs),
        "15 rows of an example": p.rows > 1 and by_compiler,
        "28 labels of packed params": packed and p.partition is not None,
        "75 a round that one worker's guard drops": p.local_steps > 1 and facts.has_bad and p.saves,
        "74 sums of local steps": p.local_steps > 1
        and p.is_weighted
        and bool(p.names("accumulate")),
        "30 packed and frozen": packed and frozen and (records or bool(p.names(*AVERAGES))),
        "82 rows whose indices a schedule of optax scales": p.rule[0] == "optax.sgd"
        and p.schedule is not None
        and bool(sparse_of(p)),
        "83 a page of what each worker keeps": p.reports and p.exchanges and facts.has("grid"),
        "81 frozen stages in another fold": not p.save_frozen and p.is_pipeline,
        "73 a rule of another library behind a packed exchange": packed
        and p.exchanges
        and by_shape,
    }
