"""What is not drawn because no text says what must happen, what optfn refuses, and known faults."""

import dataclasses
import math

from reference_run.program import Program, batches_of
from reference_run.source import WAYS

replace = dataclasses.replace


def ways_of(p: Program) -> list[str]:
    """Return the ways of the calls of the loop, without repeats."""
    return [*dict.fromkeys([p.way, *(x.get("way", p.way) for x in p.parts)])]


def frozen(p: Program) -> list[str]:
    """Return the leaves that are not trained."""
    return [k for k, x in p.attrs.items() if not x.get("trainable", True)]


def order(p: Program, name: str) -> list[int]:
    """Return the places of the links of a name, from the inside."""
    return [i for i, x in enumerate(p.links) if x[0] == name]


# Programs that are left out, with the reason.
def unsaid(p: Program) -> str:
    """Return why a program is left out: it is wrong, or what it must do is said nowhere."""
    ways, names = ways_of(p), [x[0] for x in p.links]
    is_foreign = p.rule[0].startswith("optax.")
    exchanges = p.exchanges
    sizes = [len(b["weights"]) for b in p.batches]
    drops = [x["drop_last"] for x in p.parts if "drop_last" in x]
    if not isinstance(p.loader, str) and all([p.loader[3], *drops]):
        sizes = [p.loader[1]]
    ends = [x.get(k) for x in p.parts for k in ("steps", "kill", "callback") if x.get(k)]
    calls = p.num_steps if p.batches and all(sizes) else 0
    first = [x for x in names if x in ("accumulate", "skip_nonfinite", "loss_scale", "skip_spikes")]
    has_bad = any(b.get("bad") for b in p.batches)
    guards = [x for x in names if x in ("skip_nonfinite", "loss_scale")]
    reasons = {
        "the parts of a batch must be equal": any(n % WAYS[w].parts or n % WAYS[w].devices for n in sizes for w in ways),
        "it has no call, or ends before it begins": not calls or ends != sorted(set(ends)) or max(ends, default=0) > calls,
        "a killed run ends before its last call": any(x.get("kill") == calls for x in p.parts),
        "rules of optax know no attributes, clips, integers": is_foreign and bool(p.attrs or p.clip or p.regularization or "count" in p.leaves),
        "a guard reads the gradient, not times the scale": "loss_scale" in names and bool(set(names[names.index("loss_scale") + 1 :]) - {"accumulate"}),
        "one guard of a kind": any(names.count(x) > 1 for x in ("skip_nonfinite", "loss_scale", "skip_spikes", "record_metrics")) or len(guards) > 1,
        "a plateau stands inside accumulations and guards": "plateau" in names and names.index("plateau") > (names.index(first[0]) if first else 99),
        "an average stands in the chain": any(names.index(x) > (names.index(first[0]) if first else 99) for x in ("ema", "model_average") if x in names),
        "model state goes through microbatches in turn": p.model_state and any(WAYS[w].microbatches > 1 for w in ways),
        "keys are those of a way": p.key and (len({(WAYS[w].workers, WAYS[w].microbatches) for w in ways}) > 1 or any("grid" in w or w == "compiler, microbatches" for w in ways)),
        "local steps are a way": (p.local_steps > 1) != all("local" in w for w in ways) or any(("local" in w) != ("local" in p.way) for w in ways),
        "local steps without more": p.local_steps > 1 and bool(p.aux or p.model_state or p.key or p.pass_step or p.partition or set(names) - {"accumulate", "skip_nonfinite"} or p.exchanges or any(len(b["weights"]) != 8 for b in p.batches)),
        "an outer step of nothing": p.local_steps > 1 and ((has_bad and (not guards or p.outer is not None)) or (p.outer is not None and "accumulate" in names)),
        "an outer optimizer has rounds": p.outer is not None and p.local_steps == 1,
        "rates of workers that count apart": p.local_steps > 1 and p.schedule is not None and p.is_weighted,
        "workers exchange by a compressor or by DGC": exchanges != any("exchange" in way for way in ways),
        "what is sent of a divided leaf is chosen in each of its parts": any("grid" in w for w in ways) and (p.compressor or "top_k(1.0)") != "top_k(1.0)",
        "DGC selects in each part, too": any("grid" in w for w in ways) and p.rule[0] == "dgc_momentum",
        "DGC knows no more than its arguments": p.rule[0] == "dgc_momentum" and bool(p.clip or p.regularization or p.schedule or p.attrs or p.names("plateau") or p.dtype == "float64" or "trace" in names or (has_bad and not guards)),
        "an exchange is part of the state": exchanges and len(ways) > 1,
        "norms are those of the workers": exchanges and "record_metrics" in names,
        "exchanges are inside the labels of a partition": exchanges and p.partition is not None,
        "an evaluation of the average needs one": bool(p.evaluate and p.evaluate["average"] and not p.names("ema", "model_average")),
        "one average, of all leaves": bool(p.partition and p.names("ema")),
        "plateau with evaluation needs one": any(len(x) > 2 for x in p.names("plateau")) and not (p.evaluate and p.evaluate["every"]),
        "epochs that are due need epochs": bool(p.evaluate and p.evaluate["every"] == "epoch" and not p.epochs),
        "a generator ends": p.loader == "generator" and bool(p.epochs),
        "huge gradients overflow, but for a guard": any(b.get("bad") == "huge" for b in p.batches) and not takes_huge(p),
        "what a clip or a threshold makes of NaN": has_bad and not guards and (p.clip is not None or p.rule[0] == "ftrl"),
        "an example has several rows in a batch of batches": p.rows > 1 and not isinstance(p.loader, str),
        "another rate is that of a state of optfn's, when it goes on": any("rate" in x for x in p.parts) and (is_foreign or "rate" in p.parts[0]),
        "only shuffled batches have a remainder": bool(drops) and isinstance(p.loader, str),
        "a patterned decay is one of the whole tree": p.regularization is not None and p.regularization[0] == "matrices" and p.partition is not None,
        "what goes on has been saved": not p.saves and len(p.parts) > 1,
        "a schedule behind a plateau": bool(p.names("plateau")) and p.schedule is not None,
    }  # fmt: skip
    return next((k for k, v in reasons.items() if v), "")


def takes_huge(p: Program) -> bool:
    """Tell whether a guard stands right around a rule, which may keep squares of gradients."""
    guarded = bool(p.links) and p.links[0][0] == "skip_nonfinite"
    return guarded and p.dtype == "float32" and not p.clip and not p.partition


# Programs that optfn refuses: a predicate, and words of the error and of the documentation.
def refusal(p: Program) -> str:
    """Return words of the error that a program must end with; "" if it trains."""
    packed = any("packed" in way for way in ways_of(p))
    patterned = "matrices" in str((p.attrs, p.regularization))
    reasons = {"packed": packed and (p.partition is not None or patterned)}
    return next((k for k, v in reasons.items() if v), "")


# Faults that are known and not mended yet: `--avoid` leaves out the programs that meet them.
def faults(p: Program) -> list[str]:
    """Return the names of the known faults whose conditions a program meets."""
    weights = [w for b in p.batches for w in b["weights"]]
    by_call = [batch[2].sum() for e in range(p.epochs or 1) for batch in batches_of(p, e)]
    is_empty = p.is_weighted and any(w == 0 for w in by_call)
    packed = any("packed" in way for way in ways_of(p))
    accumulates = bool(p.names("accumulate"))
    has_average = bool(p.names("ema", "model_average"))
    values = (p.evaluate or {}).get("values") or [1.0]
    has_bad = any(b.get("bad") for b in p.batches)
    has_nan = any(map(math.isnan, values)) or has_bad
    met = {
        "01 first value NaN": bool(p.names("plateau")) and has_nan,
        "02 small weights": accumulates and p.is_weighted and any(0 < w < 1e-4 for w in weights),
        "03 plateau in accumulate": accumulates and any(len(x) == 2 for x in p.names("plateau")),
        "09 patience at the end": bool(p.evaluate and p.evaluate["patience"]),
        "10 evaluation at the end": bool(p.evaluate and len(p.parts) > 1 and (p.evaluate["keep_best"] or p.names("plateau"))),
        "08 another drop_last": any("drop_last" in x for x in p.parts),
        "12 a rule in the attributes of packed params": packed and "matrices" in str(p.attrs),
        "15 rows of an example in microbatches": p.rows > 1 and "compiler, microbatches" in ways_of(p),
        "11 counts of workers in local steps": p.local_steps > 1 and p.is_weighted and 0 in weights,
        "20 exchange of nothing": p.exchanges and is_empty,
        "21 labels and an empty call": bool(p.partition) and accumulates and is_empty,
        "22 nested accumulations": p.is_weighted and len(p.names("accumulate")) > 1,
        "24 model state of an empty call": p.model_state and accumulates and is_empty,
        "25 checkpoint of an empty call": is_empty and p.saves,
        "27 a checkpoint with a NaN in its state": p.saves and has_bad and (accumulates or bool(p.names("skip_spikes"))),
        "28 labels of packed params": packed and p.partition is not None,
        "30 packed and frozen": packed and bool(frozen(p)) and (has_average or bool(p.names("record_metrics"))),
        "72 norms of frozen leaves inside a wrapper": bool(frozen(p)) and bool(p.names("record_metrics")),
        "71 DGC of packed params": packed and p.rule[0] == "dgc_momentum",
        "70 squares that overflow": any(b.get("bad") == "huge" for b in p.batches),
    }  # fmt: skip
    return [k for k, v in met.items() if v]
