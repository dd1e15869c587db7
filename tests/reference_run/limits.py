"""Programs that are left out: they are wrong, or no text says what they must do."""

import inspect
import itertools
import math

import optfn
from reference_run.links import BY_PARTS, SQUARES, WRAPPERS
from reference_run.program import Program
from reference_run.source import COMPILED_LOOPS, WAYS

# Rules whose steps change little if a gradient changes little.
SMOOTH_RULES = [
    ("sgd", {}),
    ("momentum", {"momentum": 0.9}),
    ("adam", {"eps": 0.1}),
    ("adamw", {"eps": 0.1}),
    ("adagrad", {"eps": 0.1}),
    ("optax.sgd", {}),
    ("optax.adamw", {"eps": 0.1}),
]
NARROW_MOMENTS = [
    ("adam", {"eps": 0.1, "moment_dtype": "bfloat16"}),
    ("adam", {"eps": 0.1, "moment_dtype": "int8"}),
    ("adamw", {"eps": 0.1, "moment_dtype": "int8"}),
    ("momentum", {"momentum": 0.9, "moment_dtype": "bfloat16"}),
    ("momentum", {"momentum": 0.9, "nesterov": True, "moment_dtype": "bfloat16"}),
    ("adamax", {"eps": 0.1, "moment_dtype": "bfloat16"}),
    ("lamb", {"eps": 0.1, "weight_decay": 0.3, "moment_dtype": "bfloat16"}),
]
NARROW_RATE = 0.01
PLAIN = ("list", "generator")  # loaders of a list, of which a part can be passed
AVERAGES = ("ema", "model_average")
FOREIGN = ("multi_steps", "apply_if_finite")  # wrappers of optax
GUARDS = ("skip_nonfinite", "loss_scale", "apply_if_finite")  # of NaN
DECAYING = ("adamw", "lamb", "lars", "muon", "asgd", "ftrl")  # rules with a decay of their own
KEEPING = ("accumulate", "skip_nonfinite", "loss_scale", "skip_spikes")
# An older tree that is tried keeps no state on the host.
HAS_HOST = "state_memory" in inspect.signature(optfn.make_train_step).parameters


class Facts:
    """What the limits below ask of a program.

    ways: of the calls of the loop, without repeats.
    names: of the links, from the inside outwards.
    guards: of gradients that are not finite.
    sizes: the numbers of examples of batches.
    ends: the steps at which calls of the loop end; steps: those of the whole run.
    """

    def __init__(self, p: Program):
        self.ways = [*dict.fromkeys([p.way, *(x.get("way", p.way) for x in p.parts)])]
        self.names = [x[0] for x in p.links]
        self.guards = [x for x in self.names if x in GUARDS]
        self.has_bad = any(b.get("bad") for b in p.batches)
        self.is_foreign = p.rule[0].startswith("optax.")
        self.drops = [x["drop_last"] for x in p.parts if "drop_last" in x]
        self.sizes = [len(b["weights"]) for b in p.batches]
        if not isinstance(p.loader, str) and all([p.loader[3], *self.drops]):
            self.sizes = [p.loader[1]]
        found = [x.get(k) for x in p.parts for k in ("steps", "kill", "callback", "signal")]
        self.ends = [x for x in found if x]
        self.steps = p.num_steps if p.batches and all(self.sizes) else 0

    def is_outside(self, name: str) -> bool:
        """Tell whether a member of the chain stands outside of a wrapper."""
        first = next((i for i, x in enumerate(self.names) if x in WRAPPERS), len(self.names))
        return name in self.names[first:]

    def has(self, word: str) -> bool:
        """Tell whether the name of a way has a word."""
        return any(word in way for way in self.ways)


def unsaid(p: Program) -> str:
    """Return why a program is left out, "" if it is not."""
    facts = Facts(p)
    groups = of_run, of_optimizer, of_links, of_ways, of_own_loops, of_tables, of_pipelines
    limits = (pair for group in (*groups, of_narrow_params) for pair in group(p, facts).items())
    return next((reason for reason, holds in limits if holds), "")


def of_run(p: Program, facts: Facts) -> dict[str, bool]:
    """Return which limits of data and runs a program does not keep."""
    e, ends = p.evaluate, facts.ends
    rates = ["rate" in x for x in p.parts]
    kills = [x["kill"] for x in p.parts if x.get("kill")]
    per_epoch = max(1, facts.steps // (p.epochs or 1))
    by_epoch = bool(e) and e["every"] == "epoch"
    is_thawed = any("attrs" in x for x in p.parts)
    return {
        "it has no call": not facts.steps,
        "it ends before it begins": ends != sorted(set(ends)) or max(ends, default=0) > facts.steps,
        "a stop is found before a death": p.stops and bool(kills),
        "it dies after its end": any(x.get("kill") == facts.steps for x in p.parts),
        "what goes on has been saved": not p.saves and not all("carry" in x for x in p.parts[1:]),
        "what is carried has all that it needs": any("carry" in x for x in p.parts)
        and bool(p.saves or kills or p.epochs or p.log or any(rates) or p.loader not in PLAIN),
        # Of these a state that begins late is told by more than the count of steps.
        "other leaves of some rules": is_thawed
        and bool(p.exchanges or p.rule[0] == "asgd" or "lazy" in p.rule[1] or facts.is_foreign),
        "an outer optimizer goes on in a frozen leaf": is_thawed and p.outer is not None,
        "other leaves are loaded": any("attrs" in x for x in p.parts[:-1])
        or any(("attrs" in x) != (x.get("carry") == "thaw") for x in p.parts),
        "a rate is a number": any("set_rate" in x for x in p.parts)
        and bool(p.schedule or facts.is_foreign or p.names("plateau") or p.local_steps > 1),
        "a state is of its way": any(
            x.get("carry") in ("state", "params", "only")
            and x.get("way", p.way) != before.get("way", p.way)
            for before, x in itertools.pairwise(p.parts)
        ),
        "another rate than that of a state": any(rates) and (facts.is_foreign or rates[0]),
        "another rate without a state": any(rates) and min(kills, default=math.inf) < p.save_every,
        "shuffled batches alone drop any": bool(facts.drops) and isinstance(p.loader, str),
        "it drops a batch that its steps need": any(facts.drops)
        and not isinstance(p.loader, str)
        and max(ends, default=0) > len_without_last(p),
        # The call before dies unsaved, where the next batch shows whether an epoch has ended.
        "other batches after a death": by_epoch and bool(facts.drops and kills),
        "shuffled batches are too few": not isinstance(p.loader, str)
        and sum(len(b["weights"]) for b in p.batches) < p.loader[1],
        "shuffled batches have one row": p.rows > 1 and not isinstance(p.loader, str),
        "a generator ends": p.loader in ("generator", "reader") and bool(p.epochs),
        "an epoch is due": by_epoch and not p.epochs,
        # Whether an epoch has ended is known by the next batch, which dies before the save.
        "it dies between epochs": by_epoch
        and any(n % per_epoch == 0 or n % p.save_every == 0 for n in kills),
        "a plateau watches evaluations": p.watches_evaluations and not (e and e["every"]),
        "values of a best state with a NaN": bool(
            e and e["keep_best"] and e["values"] and p.model_state
        )
        and facts.has_bad
        and len(p.parts) > 1,
        # A state whose evaluation would have been due is evaluated when the run goes on.
        "a best state and another every": bool(e and e["keep_best"])
        and any("every" in x for x in p.parts),
        # The run that goes on would give the state that was best before the death another value.
        "other values after a death": bool(e and e["keep_best"] and e["values"] and kills),
        "an average is evaluated": bool(e and e["average"] and not p.names(*AVERAGES)),
        # Another way gives the same state another last bit, which may be the better one.
        "held batches are compared in one way": bool(e and e.get("held"))
        and bool(p.watches_evaluations or e["keep_best"] or e["patience"])
        and len(facts.ways) > 1,
    }


def len_without_last(p: Program) -> int:
    """Return the number of shuffled batches of all epochs without those that are too short."""
    return sum(len(b["weights"]) for b in p.batches) // p.loader[1] * (p.epochs or 1)


def of_optimizer(p: Program, facts: Facts) -> dict[str, bool]:
    """Return which limits of an optimizer a program does not keep."""
    gives_up = "max_consecutive" in str(p.links)
    is_dgc, bad = p.rule[0] == "dgc_momentum", facts.has_bad and (gives_up or not facts.guards)
    further = p.clip or p.attrs or (p.regularization and p.regularization[0] != "l2")
    more = further or p.schedule or p.names("plateau", "trace") or p.dtype == "float64" or bad
    is_huge = any(b.get("bad") == "huge" for b in p.batches)
    patterned = p.regularization is not None and p.regularization[0] == "matrices"
    return {
        # Around 0 the sign of a param is that of its rounding; in float64 the same program agrees.
        "an l1 decay over many steps in float32": p.dtype == "float32"
        and facts.steps > 24
        and "'l1', " in str((p.regularization, p.attrs)),
        "a decay of a rule without one": any("weight_decay" in x for x in p.attrs.values())
        and p.rule[0] not in DECAYING,
        "optax knows no attributes": facts.is_foreign and bool(p.attrs),
        "optax knows no integers": "count" in p.leaves
        and bool(facts.is_foreign or p.names(*FOREIGN)),
        "DGC has arguments of its own": is_dgc and bool(more),
        "a schedule behind a plateau": bool(p.names("plateau")) and p.schedule is not None,
        "huge gradients, but for a guard": is_huge and not takes_huge(p),
        "a clip of NaN": bad and (p.clip is not None or p.rule[0] == "ftrl"),
        # Those that a worker, or a microbatch, has alone pass no NaN on.
        "NaN in rows that examples without weight look up": bad
        and p.has_tables
        and p.is_weighted
        and any(0 in b["weights"] for b in p.batches),
        "a decay by shape in a label": patterned and p.partition is not None,
        # A call without weight may be an update of this label alone.
        "an average around a label that waits": bool(p.partition and p.partition["links"])
        and bool(p.names(*AVERAGES))
        and not all(any(b["weights"]) for b in p.batches),
    }


def of_links(p: Program, facts: Facts) -> dict[str, bool]:
    """Return which limits of wrappers and their order a program does not keep."""
    names, has_masters = facts.names, "master_weights" in facts.names
    has_masters = has_masters or "multi_precision" in p.rule[1]
    outside = names[names.index("loss_scale") + 1 :] if "loss_scale" in names else []
    once = ("skip_nonfinite", "loss_scale", "skip_spikes", "record_metrics")
    return {
        "a guard is inside of a loss scale": bool({*outside} - {"accumulate"}),
        "one guard": any(names.count(x) > 1 for x in once) or len(facts.guards) > 1,
        "a plateau is inside of wrappers": facts.is_outside("plateau"),
        "a schedule behind the rule": "scaled" in names
        and (facts.is_outside("scaled") or "plateau" in names or facts.has("tables")),
        "an average is inside of wrappers": any(facts.is_outside(x) for x in AVERAGES),
        "norms are those of workers": p.exchanges and "record_metrics" in names,
        "labels exchange nothing": p.exchanges and p.partition is not None,
        # It multiplies its sum by 0 to begin anew.
        "optax.MultiSteps keeps a NaN": facts.has_bad
        and "multi_steps" in names
        and "skip_nonfinite" not in names[names.index("multi_steps") :],
        "what reads more than gradients inside of optax.MultiSteps": "multi_steps" in names
        and ("plateau" in names or (p.model_state and not {*names}.isdisjoint(AVERAGES))),
        # Of a plain loss a call inside counts 1, however many calls it has taken.
        "nested accumulations go on with other calls": names.count("accumulate") > 1
        and any("accumulate" in x for x in p.parts)
        and not p.is_weighted,
        "attributes inside of wrappers of optax": bool(p.stacked)
        and facts.has("whole")
        and not {*names}.isdisjoint((*FOREIGN, "scaled")),
        "masters inside of a guard of optax": "apply_if_finite" in names and bool(has_masters),
        "a schedule behind masters": "scaled" in names and "multi_precision" in p.rule[1],
        "an exchange in wide masters sends all": bool(p.compressor and p.names("master_weights"))
        or (p.exchanges and "master_weights" in names),
    }


def of_ways(p: Program, facts: Facts) -> dict[str, bool]:
    """Return which limits of a way a program does not keep."""
    ways = [WAYS[name] for name in facts.ways]
    keys = {(way.workers, way.microbatches) for way in ways}
    uneven = any(n % way.parts or n % way.devices for n in facts.sizes for way in ways)
    is_local, is_outer = p.local_steps > 1, p.outer is not None
    others = {*facts.names} - {"accumulate", "skip_nonfinite"}
    more = p.partition or p.exchanges or others
    of_nothing = facts.has_bad and (not facts.guards or is_outer)
    of_nothing = of_nothing or (is_outer and "accumulate" in facts.names)
    is_chosen = p.rule[0] == "dgc_momentum" or p.compressor not in (None, "top_k(1.0)")
    return {
        "a batch has equal parts": uneven,
        "what stays whole is stacked": facts.has("whole") and not p.stages,
        "a tree without state on the host": facts.has("host") and not HAS_HOST,
        "a model state of a way": p.model_state
        and (
            p.model_state == "weights"
            or (p.is_weighted and facts.has_bad)
            or any(x.microbatches > 1 for x in ways)
        )
        and len(keys) > 1,
        "a key of microbatches": p.model_state == "key" and any(x.microbatches > 1 for x in ways),
        "statistics by weight need weights": p.model_state == "weights"
        and not (p.is_weighted and p.rows == 1),
        "keys are those of a way": (p.key and len(keys) > 1)
        or ((p.key or p.model_state == "key") and facts.has("grid")),
        "the compiler's microbatches": (p.key or p.model_state)
        and facts.has("compiler, microbatches"),
        "a way has local steps": any(("local" in name) != is_local for name in facts.ways),
        "local steps without more": is_local and (bool(more) or {*facts.sizes} != {8}),
        "an outer step of nothing": is_local and of_nothing,
        "an outer optimizer of no rounds": is_outer and not is_local,
        # As the first steps of rmsprop have: which of them a packet has is rounding.
        "a choice among steps of one size": is_local
        and p.compressor not in (None, "top_k(1.0)")
        and p.rule not in SMOOTH_RULES,
        "a way exchanges": any(("exchange" in name) != p.exchanges for name in facts.ways),
        "a choice in each part of a leaf": facts.has("grid") and is_chosen,
        "a grid's exchange goes on in its way": p.exchanges and facts.has("grid") and len(ways) > 1,
        "others choose slices, or among all packed leaves": (
            p.exchanges
            and (BY_PARTS in str(p.compressor) and len({x.exchanging for x in ways}) > 1)
        )
        or (p.rule[0] == "dgc_momentum" and facts.has("packed") and len(ways) > 1),
        "a mapping has its workers": p.exchanges
        and len({x.exchanging for x in ways}) > 1
        and any(x.get("carry") in ("mapping", "state") for x in p.parts),
    }


def of_own_loops(p: Program, facts: Facts) -> dict[str, bool]:
    """Return which limits of loops that a user writes a program does not keep."""
    more = p.saves or p.epochs or p.evaluate or p.stops or p.reports or p.log or p.loader != "list"
    by_hand, is_own = facts.has("by hand"), p.loop != "fit"
    aux = p.aux or p.model_state or p.key or p.pass_step or p.stages or p.local_steps > 1
    last = facts.names[-1] if facts.names else ""
    guards = [x for x in facts.names if x in KEEPING and x != "accumulate"]
    by_shape = p.partition or "matrices" in str((p.attrs, p.regularization))
    return {
        "a loop of one's own has a step alone": is_own and bool(more),
        "it ends in a way of its own": is_own
        and any(k in x for x in p.parts for k in ("kill", "callback", "signal")),
        "who writes a step writes the loop": by_hand and p.loop != "own",
        "calls of one program take equal batches": p.loop in COMPILED_LOOPS
        and len({*facts.sizes}) > 1,
        # Its first call gives the workers their counters.
        "a scan of local steps over a mean": p.loop in COMPILED_LOOPS
        and p.local_steps > 1
        and p.is_weighted,
        "a step by hand has a plain loss": by_hand and bool(aux),
        # Without a guard or an accumulation the one who writes the loop decides.
        "an empty call by hand": by_hand
        and p.is_weighted
        and last not in KEEPING
        and not all(any(b["weights"]) for b in p.batches),
        "rows of a guard of optax by hand": facts.has("by hand, tables")
        and "apply_if_finite" in facts.names,
        "a plain mean of calls by hand": by_hand and p.is_weighted and "multi_steps" in facts.names,
        "integers have no mean by hand": by_hand and "count" in p.leaves and p.way != "by hand",
        "norms of frozen leaves are those of a way": by_hand
        and "record_metrics" in facts.names
        and any("attrs" in x for x in p.parts)
        and len(facts.ways) > 1,
        "a pmap begins with its copies": any(
            ("pmap" in x.get("way", p.way)) > ("pmap" in before.get("way", p.way))
            for before, x in itertools.pairwise(p.parts)
        ),
        # A loop cannot undo what is beside a guard.
        "a link is around a guard by hand": by_hand and "trace" in facts.names and bool(guards),
        "labels of packed params by hand": facts.has("by hand, packed") and bool(by_shape),
    }


def of_narrow_params(p: Program, facts: Facts) -> dict[str, bool]:
    """Return which limits of bfloat16 params, and of moments in 8 or 16 bits, a program does not
    keep.

    Nothing may turn their rounding into another decision.
    """
    e, is_narrow = p.evaluate, p.dtype == "bfloat16"
    bare = (p.rule[0], {k: x for k, x in p.rule[1].items() if k != "multi_precision"})
    rounds, is_smooth = p.is_rounded, bare in SMOOTH_RULES or "moment_dtype" in p.rule[1]
    ways = [WAYS[name] for name in facts.ways]
    in_chunks = p.rule[1].get("moment_dtype") == "int8"
    is_chosen = bool(e) and not e["values"] and (e["keep_best"] or e["patience"])
    # A step of one param by its last bit may be as large as all others together.
    judges = p.names("skip_spikes", "plateau", "record_metrics") or is_chosen
    more = p.aux or p.model_state or p.exchanges or (is_narrow and p.local_steps > 1)
    more = more or p.rate > NARROW_RATE or "count" in p.leaves
    return {
        "narrow params have masters": is_narrow
        and not (p.names("master_weights") or "multi_precision" in p.rule[1]),
        "rounding decides": rounds and bool(judges or more or not is_smooth),
        "8 bits over many steps": in_chunks and facts.steps > 12,
        "chunks of 8 bits stay as they are": in_chunks
        and len({(way.virtual, "packed" in way.options) for way in ways}) > 1,
        "a remainder beside a wide param": "bits=" in str(p.links) and not is_narrow,
        "wide leaves are beside narrow ones": bool(p.wide) and not is_narrow,
    }


def of_tables(p: Program, facts: Facts) -> dict[str, bool]:
    """Return which limits of rows a program does not keep.

    The reference takes the rows that have a gradient for those that an example looks up. A worker
    whose first local step makes all of "w" 0, as l1 does, has none for the rows of its next step.
    """
    is_lazy, ways = p.rule[1].get("lazy"), ["tables" in name for name in facts.ways]
    decays = p.regularization or any("regularization" in x for x in p.attrs.values())
    has_zeros = p.is_weighted and any(0 in b["weights"] for b in p.batches)
    is_dense = decays or has_zeros or p.names("accumulate", "trace") or not all(ways)
    is_dense = is_dense or ("l1" in p.rule[1] and p.local_steps > 1)
    return {
        "no table to look up": any(ways) and not p.has_tables,
        "a rule that does not say what it does with rows": any(ways) and says_no_rows(p.rule),
        "a lazy rule sees all rows": bool(is_lazy) and bool(is_dense),
    }


def of_pipelines(p: Program, facts: Facts) -> dict[str, bool]:
    """Return which limits of a pipeline a program does not keep."""
    ways = ["pipeline" in name for name in facts.ways]
    more = p.aux or p.model_state or p.key or p.pass_step or p.partition or p.local_steps > 1
    by_shape = "matrices" in str((p.regularization, p.attrs))
    return {
        "a pipeline has stages": any(ways) and not (p.stages and all(ways)),
        "a pipeline has a loss alone": any(ways) and bool(more or p.rows > 1),
        "gradients of asgd keep their virtual stages": len({WAYS[x].virtual for x in facts.ways})
        > 1
        and p.rule[0] == "asgd",
        "attributes of layers without layers": bool(p.stacked) and not p.stages,
        # Rows that few examples look up have a smaller rank, and then rounding decides.
        "factors of few rows": p.has_tables and "power_sgd(4)" in str(p.compressor),
        "factors of stacked layers": bool(p.stages) and "power_sgd" in str(p.compressor),
        "a rule by shape sees stages": bool(p.stages) and by_shape,
    }


def says_no_rows(rule) -> bool:
    """Tell whether a rule is FTRL that is neither lazy nor not."""
    return rule[0] == "ftrl" and "lazy" not in rule[1]


def takes_huge(p: Program) -> bool:
    """Tell whether a guard right around a rule skips a huge gradient, as the rule keeps squares.

    Without squares the params go so far that the next loss is beyond float32. In an accumulation
    XLA squares total/every as total²/every², which overflows before the square of the mean.
    """
    guarded = bool(p.links) and p.links[0][0] == "skip_nonfinite" and p.rule[0] in SQUARES
    more = p.clip or p.partition or p.names("accumulate")
    return guarded and p.dtype == "float32" and not more
