"""Programs, drawn at random, often from the corners of what can be asked for.

Hypothesis, which likes to draw what it has drawn before, drew 52 structures in 303; each compiled
step should be another one. `shrink.py` makes what fails simpler.
"""

import dataclasses

from reference_run import limits
from reference_run.links import BY_PARTS, SCHEDULES, frozen_of
from reference_run.program import DAY, TABLES, Program
from reference_run.source import SPELLINGS, WAYS

EXAMPLES = 8
ONES = [1.0] * EXAMPLES
RULES = [
    ("sgd", {}),
    ("momentum", {"momentum": 0.9}),
    ("momentum", {"momentum": 0.9, "nesterov": True}),
    ("adam", {}),
    ("adam", {"eps_hat": False}),
    ("adam", {"b1": 0.0}),
    ("adamw", {}),
    ("adamw", {"weight_decay": 0.3}),
    ("adamw", {"weight_decay": 0.3, "exclude": ".*[bt]", "b1": 0.5, "b2": 0.9}),
    ("lars", {"momentum": 0.9, "lars_coeff": 0.1}),
    ("lars", {"momentum": 0.5, "lars_coeff": 0.1, "lars_weight_decay": 0.3, "exclude": ".*w"}),
    ("adagrad", {}),
    ("decayed_adagrad", {}),
    ("adadelta", {}),
    ("rmsprop", {}),
    ("rmsprop", {"momentum": 0.5, "centered": True}),
    ("adamax", {}),
    ("ftrl", {"l1": 0.01}),
    ("ftrl", {"l1": 0.01, "l2": 0.1, "lr_power": -0.4}),
    ("lamb", {}),
    ("lamb", {"weight_decay": 0.3, "exclude": ".*[bs]"}),
    ("lamb", {"bias_correction": True}),
    ("muon", {}),
    ("muon", {"weight_decay": 0.3, "exclude": ".*b", "nesterov": False, "scale": "moonlight"}),
    ("asgd", {"batch_num": 2}),
    ("asgd", {"batch_num": 3, "weight_decay": 0.3}),
    ("optax.sgd", {}),
    ("optax.adam", {}),
    ("optax.adamw", {}),
    ("optax.lion", {}),
    ("optax.rmsprop", {}),
    ("optax.adagrad", {}),
    ("optax.nadam", {}),
    ("optax.adabelief", {}),
    ("optax.amsgrad", {}),
]
DGC = [
    ("dgc_momentum", {"momentum": 0.5, "rampup_begin_step": n, "sparsity": s, "nesterov": nesterov})
    for n, s, nesterov in ((0, (0.7,), False), (2, (0.5, 0.8), False), (1, (0.7,), True))
]
DGC += [
    ("dgc_momentum", options | {"momentum": 0.9, "rampup_begin_step": 1, "sparsity": (0.5, 0.8)})
    for options in ({"local_grad_clip_norm": 0.5, "rampup_step": 4}, {"momentum_masking": False})
]
DGC_OF_FEW = ("dgc_momentum", {"momentum": 0.5, "rampup_begin_step": 0, "sparsity": (0.998,)})
COMMON_RULES = RULES[:7]
BY_TENSOR = [rule for rule in RULES if rule[0] in ("lamb", "lars", "muon")]
BY_SLICES = ("top_k(0.3)", "quantize(4)", "quantize(1)")
TABLE_RULES = [
    ("adam", {"lazy": True}),
    ("adamw", {"lazy": True}),
    ("adam", {"lazy": "exact"}),
    ("adamw", {"lazy": "exact"}),
    ("ftrl", {"l1": 0.01, "lazy": True}),
    ("ftrl", {"l1": 0.01, "lazy": False}),
]
EXCHANGING = [way for way in WAYS if "exchange" in way for _ in range(1 if "grid" in way else 3)]
LOCAL = [way for way in WAYS if "local" in way for _ in range(3 if "tables" in way else 1)]
USUAL = [way for way in WAYS if way not in (*EXCHANGING, *LOCAL)]
USUAL += [way for way in USUAL if "tables" in way]
ATTRS = [
    {"trainable": False},
    {"trainable": False},
    {"learning_rate": 0.5},
    {"learning_rate": 0.0},
    {"need_clip": False},
    {"regularization": ("l2", 0.2)},
    {"regularization": ("matrices", 0.3)},
    {"weight_decay": 0.0},
    {"weight_decay": 3.0},
]
ONCE = {"max_consecutive": 1}
ARGUMENTS = {
    "accumulate": [[1], [2], [3]],
    "multi_steps": [[1], [2], [3]],
    "apply_if_finite": [[9]],
    "skip_nonfinite": [[], [], [ONCE], [{"max_consecutive": 0}]],
    "loss_scale": [
        [2],
        [2],
        [1, {"growth_factor": 4.0, "backoff_factor": 0.25, "min_scale": 2.0}],
        [3, ONCE],
        [2, {"initial_scale": 0.25}],
    ],
    "skip_spikes": [[2.0, 3], [2.0, 3], [2.0, 2, ONCE], [1.5, 3, {"max_consecutive": 0}]],
}
FOREIGN = dict(zip(("accumulate", "skip_nonfinite"), limits.FOREIGN, strict=True))
PLATEAU = [{"cooldown": 1, "min_lr": 0.02, "threshold": 0.1, "threshold_mode": "abs"}]
MAX = [{"mode": "max", "threshold": 0.1}]
PER = {"per": [".*[wb]", ".*s"]}


def structures(rng):
    """Draw what a compiled step depends on: way, loss, optimizer."""
    pick, chance = picker(rng)
    way = pick(*EXCHANGING) if chance(0.2) else pick(*LOCAL) if chance(0.15) else pick(*USUAL)
    partition, links = None, []
    dtype = pick("float32", *["float64"] * ("exchange" not in way))
    rule = pick(*RULES) if chance(0.6) else pick(*COMMON_RULES)
    in_stages = "pipeline" in way
    may_have_layers = in_stages or way == "whole" or chance(0.15)
    rule = pick(*BY_TENSOR) if may_have_layers and chance(0.3) else rule
    leaves = ["w", "b", "s"] + ["empty"] * (chance(0.15) and not in_stages)
    leaves += ["z"] * (chance(0.25) and not in_stages)
    if "tables" in way:
        leaves += pick(["t"], ["t", "u"], ["u"])
        rule = pick(*TABLE_RULES) if chance(0.5) else rule
        while limits.says_no_rows(rule) or (rule[0].startswith("optax.") and chance(0.8)):
            rule = pick(*RULES)  # most of another library's are refused
    if "exchange" not in way and "local" not in way and "tables" not in way and chance(0.1):
        dtype, rule = "bfloat16", pick(*limits.SMOOTH_RULES)
    elif dtype == "float32" and chance(0.1):
        rule = pick(*limits.NARROW_MOMENTS)
    is_foreign = rule[0].startswith("optax.")
    leaves += ["count"] * (
        chance(0.15) and not is_foreign and not in_stages and dtype != "bfloat16"
    )
    attrs = {
        pick("b", "s", "w", *[x for x in (*TABLES, "z") if x in leaves]): pick(*ATTRS)
        for _ in range(pick(0, 0, 1, 1, 2))
    }
    attrs = {} if is_foreign else attrs
    clip = pick(None, None, None, ("value", 0.2), ("norm", 0.3), ("global_norm", 0.3))
    decay = pick(None, None, None, ("l2", 0.1), ("l1", 0.1), ("matrices", 0.2))
    schedule = pick(None, None, None, *filter(None, SCHEDULES))
    if (
        chance(0.2)
        and "exchange" not in way
        and not in_stages
        and ("packed" not in way or chance(0.3))
    ):
        around = pick([["accumulate", 2]], [["accumulate", 2]], [["accumulate", 3]], [])
        partition, attrs = (
            {"leaves": pick(["b"], ["w", "b"], ["s"], *[["t"]] * ("t" in leaves)), "links": around},
            {},
        )
        if chance(0.2):
            partition |= {"links": [], "frozen": True}
        links = [x for x in chain_members(rng) if x[0] in limits.AVERAGES]
    else:
        links = chain_members(rng)
    compressor = None
    if "exchange" in way:
        compressor = pick("top_k(1.0)", *3 * ["top_k(0.3)"], "quantize(4)", "quantize(1)")
        if chance(0.4):  # of other ranks, a factor of no use is replaced by fixed numbers
            compressor = pick("power_sgd(1)", "power_sgd(1)", "power_sgd(4)")
        if compressor in BY_SLICES and chance(0.5):
            compressor += BY_PARTS
        if chance(0.3):
            compressor += pick(", error_feedback=0.5", ", warmup_steps=2")
        if "grid" in way:
            compressor = "top_k(1.0)"
        elif chance(0.25):
            rule, compressor, clip, schedule = pick(*DGC), None, None, None
            decay = pick(None, None, ("l2", 0.1))
        if "grid" not in way and chance(0.3):  # few entries are rows of an update
            leaves += ["large"]
            compressor = compressor and "top_k(1 / 512)"
            rule = rule if compressor else pick(DGC[0], DGC_OF_FEW)
    if rule[1].get("lazy") and chance(0.9):  # what makes rows dense is known to be left out
        attrs, decay, links, partition = {}, None, [x for x in links if x[0] != "trace"], None
    more = {}
    if "local" in way:
        master = ["master_weights", "jnp.float64"]
        in_masters = [[master], [["ema", 0.5], master]] * (dtype == "float32")
        more = {
            "local_steps": 2,
            "outer": pick(None, None, [], [["ema", 0.5]], [["model_average", 2]], *in_masters),
        }
        if more["outer"] is not None and chance(0.4):
            rule = pick(*limits.SMOOTH_RULES) if chance(0.7) else rule
            compressor = pick("top_k(1.0)", "top_k(0.3)", "quantize(4)", "power_sgd(1)")
            compressor += pick("", "", ", error_feedback=0.5", ", warmup_steps=2")
        links, partition = [], None
    if "tables" in way:
        links = [x for x in links if x[0] != "scaled"]
    if rule[0] == "dgc_momentum":
        attrs, links = {}, [x for x in links if x[0] != "plateau"]
    masters, wide = [], ()
    if dtype != "float64" and "exchange" not in way and chance(0.25):
        masters = [["master_weights", "jnp.float64"]]
    if dtype == "bfloat16":
        masters = [["master_weights", pick("jnp.float32", "bits=32", "bits=24")]]
        if not is_foreign and chance(0.3):
            masters, rule = [], (rule[0], rule[1] | {"multi_precision": pick(True, 32, 24)})
        wide = pick((), ("b",), ("s",), ("w", "s"), tuple(x for x in leaves if x in TABLES))
    around = [*links, *masters, *wrappers(rng, rule)]
    if compressor:  # the norms that it records are those of workers
        around = [x for x in around if x[0] != "record_metrics"]
    if more:
        around = wrappers_of_workers(rng, more["outer"])
    if rule[1].get("lazy") and chance(0.9):
        around = [x for x in around if x[0] not in ("accumulate", "trace")]
    if "by hand" in way:  # which evaluates nothing
        around = [[y for y in x if y != "evaluation"] for x in around]
    # Norms are divided by the rate.
    if any(x[0] == "skip_spikes" for x in around) and rule not in DGC and chance(0.5):
        schedule = schedule or pick("rises", "rises", "piecewise")
    if any(x[0] == "plateau" for x in around):
        schedule = None
    is_rounded = dtype == "bfloat16" or "moment_dtype" in rule[1]
    kinds = {x[0] for x in around}
    averages = not kinds.isdisjoint(limits.AVERAGES)
    averages_sums = "accumulate" in kinds and averages
    rows = pick(1, 1, 1, 4) if way != "one" and "local" not in way else 1
    plain = not in_stages and not is_rounded
    plain = plain and "by hand" not in way
    has_layers = in_stages or way == "whole"
    has_layers = has_layers or (may_have_layers and "by hand" not in way)
    # A call of `minimize` compiles its step anew.
    spelling = [x for x in SPELLINGS if chance(0.05 if x == "minimize" else 0.15)]
    spelling += ["reversed"] * (has_layers and not in_stages and chance(0.15))
    loss = pick("plain", "mean", *["mean"] * (0 if rule[1].get("lazy") else 2))
    says_stacked = has_layers and not (in_stages or is_foreign or compressor) and chance(0.3)
    return Program(
        stages=4 if has_layers else 0,
        stacked=("w", "b") if says_stacked else (),
        rows=1 if in_stages else rows,
        way=way,
        compressor=compressor,
        leaves=tuple(leaves),
        rule=rule,
        attrs=attrs,
        partition=partition,
        dtype=dtype,
        wide=wide,
        spelling=spelling,
        loss=loss,
        aux=chance(0.3) and not in_stages and not is_rounded and "by hand" not in way,
        model_state=chance(0.6 if averages_sums else 0.5 if averages else 0.3)
        and plain
        and way != "compiler, microbatches"
        and pick(
            *[True] * 3,
            *["key"] * 2 * (WAYS[way].microbatches == 1),
            *["weights"] * (loss == "mean" and rows == 1),
        ),
        key=chance(0.2) and "grid" not in way and plain and way != "compiler, microbatches",
        pass_step=chance(0.15) and plain,
        rate=limits.NARROW_RATE if is_rounded else 0.05,
        schedule=schedule,
        clip=clip,
        regularization=decay,
        links=around,
        evaluate={
            "every": None,
            "patience": None,
            "keep_best": False,
            "mode": pick("min", "max"),
            "average": chance(0.7),
            "values": None,
        },
        batches=[{"seed": 0, "weights": ONES}],
        **more,
    )


def chain_members(rng):
    """Draw what stands behind the rule: a plateau, an average."""
    pick, chance = picker(rng)
    links = []
    if chance(0.35):
        monitor = pick([], ["evaluation"])
        links.append(["plateau", pick(0, 1), *monitor, *pick([], PLATEAU, [] if monitor else MAX)])
    elif chance(0.15):
        links.append(["scaled"])
    if chance(0.5):
        links.append(pick(["ema", 0.5], ["ema", 0.9], ["model_average", 2], ["model_average", 3]))
        links[-1] += [{"thres_steps": True}] * (links[-1][0] == "ema" and chance(0.5))
        if chance(0.15):
            links.append(["model_average", 2] if links[-1][0] == "ema" else ["ema", 0.5])
    return links


def wrappers(rng, rule):
    """Draw the wrappers, from the inside outwards."""
    pick, chance = picker(rng)
    links, guard = [["record_metrics", *pick([], [PER])]] if chance(0.2) else [], None
    for _ in range(pick(0, 1, 1, 2, 2, 3)):
        more = ["accumulate"] * 3
        if guard is None:
            more += ["skip_nonfinite", "skip_nonfinite", "loss_scale"]
        if guard != "loss_scale" and "skip_spikes" not in [x[0] for x in links]:
            more += ["skip_spikes"]
        name = pick(*more)
        name = FOREIGN.get(name, name) if chance(0.1) else name
        links.append([name, *pick(*ARGUMENTS[name])])
        guard = name if name in limits.GUARDS else guard
    if rule[0] in ("sgd", "adagrad", "adam") and chance(0.25):
        links.append(["trace"])
    return links


def wrappers_of_workers(rng, outer):
    """Draw the wrappers of the optimizer that takes local steps."""
    pick, _ = picker(rng)
    return (
        pick([], [["skip_nonfinite"]])
        if outer is not None
        else pick([], [["skip_nonfinite"]], [["accumulate", 2]], [["accumulate", 3]])
    )


def runs(rng, p):
    """Draw data, and a run over it, for a structure."""
    pick, chance = picker(rng)
    stops = chance(0.2)
    batches = batch_lists(rng, p, stops)
    watched = p.watches_evaluations
    if "by hand" in p.way or (chance(0.08) and not watched):
        return own_loops(rng, dataclasses.replace(p, batches=batches, evaluate=None))
    epochs = pick(None, None, 1, 2, 3)
    has_average = bool(p.names("ema", "model_average"))
    evaluate = None
    if watched or chance(0.6):
        values = [pick(1.0, 2.0, 3.0, 4.0, 2.0, float("nan")) for _ in range(rng.randint(3, 9))]
        average = has_average and p.evaluate["average"]
        given = None if average and chance(0.7) else values if chance(0.7) else None
        held = given is None and p.rows == 1 and not p.is_pipeline and chance(0.4)
        evaluate = p.evaluate | {
            "every": pick(
                *([] if watched else [None]), 1, 2, 3, *(["epoch"] * 2 if epochs else [])
            ),
            "patience": pick(None, None, 1, 2),
            "keep_best": chance(0.5),
            "average": average,
            "values": given,
            "held": held,
            "named": chance(0.2),
        }
    loader = pick("list", "list", "generator", "reader") if not epochs else "list"
    if epochs and p.rows == 1 and chance(0.25):
        loader = ["shuffled", EXAMPLES, pick(0, 1), chance(0.6)]
    made = dataclasses.replace(
        p,
        batches=batches,
        epochs=epochs,
        evaluate=evaluate,
        loader=loader,
        save_every=pick(1, 2, 3, 100, DAY),
        keep=pick(1, 2, 3),
        prefetch=pick(0, 1),
        save_frozen=not (frozen_of(p) and chance(0.6)),
        stops=stops,
        reports=chance(0.1),
        log=chance(0.4),
    )
    parts = ways_on(rng, made)
    if len(parts) > 1 and loader in limits.PLAIN and not epochs and chance(0.4):
        return carried(rng, made, parts)
    return dataclasses.replace(made, parts=parts, saves=len(parts) > 1 or chance(0.3))


def own_loops(rng, p):
    """Draw loops that a user writes around the step, one after the other."""
    pick, _ = picker(rng)
    parts = ways_on(rng, p)
    for part in parts:
        for end in part.keys() & {"kill", "callback", "signal"}:
            part["steps"] = part.pop(end)
    loop = "own" if "by hand" in p.way else pick("own", "own", "scan", "vmap")
    return carried(rng, dataclasses.replace(p, loop=loop), parts)


def carried(rng, p, parts):
    """Draw how the state reaches the calls behind the first, without checkpoints of the run."""
    pick, chance = picker(rng)
    for i, part in enumerate(parts):
        if "kill" in part:
            part[pick("steps", "callback", "signal")] = part.pop("kill")
        part.pop("rate", None)
        if i:
            of_way = [] if "way" in part else ["state"] + ["params"] * ("by hand" not in p.way)
            of_way += ["only"] * ("way" not in part)
            part["carry"] = pick("file", "newest", "parts", "mapping", *of_way)
        if i and chance(0.3) and not (p.schedule or p.names("plateau") or p.local_steps > 1):
            part["set_rate"] = pick(0.02, 0.1)
    if len(parts) > 1 and not p.partition and chance(0.4):
        parts[-1] |= {"carry": "thaw", "attrs": other_attrs(rng, p)}
    return dataclasses.replace(p, parts=parts, saves=False, save_frozen=True, log=False)


def other_attrs(rng, p):
    """Draw attributes by which other leaves are trained: those that were frozen, or all but one."""
    if frozen_of(p):
        thawed = {k: dict(x) for k, x in p.attrs.items()}
        for k in frozen_of(p):
            thawed[k].pop("trainable")
        return {k: x for k, x in thawed.items() if x}
    return p.attrs | {rng.choice(["b", "s", "w"]): {"trainable": False}}


def ways_on(rng, p):
    """Draw the calls of the loop: where each ends, and how the next goes on."""
    pick, chance = picker(rng)
    parts, at, each = [], 0, p.local_steps
    whole = p.num_steps // each
    for _ in range(pick(0, 0, 1, 1, 2)):
        if at < whole - 1:
            at = rng.randint(at + 1, whole - 1)
            parts.append({pick("kill", "kill", "steps", "steps", "callback", "signal"): at * each})
    parts.append(pick({}, {}, {"steps": whole * each}))
    for part in parts[1:]:
        others = [k for k in WAYS if takes_over(k, p)]
        if others and chance(0.25):
            part["way"] = pick(*others)
        if p.evaluate and isinstance(p.evaluate["every"], int) and chance(0.2):
            part["every"] = pick(1, 2, 3)
        if any(x[0] == "accumulate" for x in p.links) and not p.partition and chance(0.2):
            part["accumulate"] = pick(1, 2, 3)
        if chance(0.4) and not isinstance(p.loader, str):
            part["drop_last"] = not p.loader[3]
        if (
            chance(0.1)
            and not p.rule[0].startswith("optax.")
            and not p.schedule
            and not p.names("plateau")
        ):
            part["rate"] = 2 * p.rate
    return parts


def takes_over(way, p):
    """Tell whether a run can go on in a way."""
    by_kind = [("exchange", p.exchanges), ("local", p.local_steps > 1), ("pipeline", p.is_pipeline)]
    return (
        all((kind in way) == is_asked for kind, is_asked in by_kind)
        and not (p.exchanges and "grid" in way + p.way)
        and (p.has_tables or "tables" not in way)
        and ("by hand" not in way or p.loop == "own")
    )


def batch_lists(rng, p, stops):
    """Draw the batches of a run; one that stops at NaN likes to meet some."""
    pick, chance = picker(rng)
    has_guard = bool(p.names(*limits.GUARDS))
    is_calm, scale = chance(0.2), 1e-17 if chance(0.04) else 1.0
    may_fail = not p.clip and p.rule[0] not in ("ftrl", "dgc_momentum") and not p.compressor
    often = 0.35 if has_guard else 0.15 if may_fail and chance(0.5 if stops else 0.1) else 0.0
    batches = []
    # These remember: a window, bad values, good steps, a residual.
    remembers = p.exchanges or p.names("plateau", "skip_spikes", "loss_scale")
    for _ in range(pick(6, 8) if remembers and chance(0.6) else pick(1, 2, 3, 4, 6, 8)):
        weights = ONES if is_calm else weights_of_batch(rng)
        batch = {"seed": rng.randint(0, 99), "weights": [scale * w for w in weights]}
        if chance(often):
            batch["bad"] = pick("nan", "nan", "huge") if limits.takes_huge(p) else "nan"
        batches.append(batch)
    if chance(0.4 if p.rows > 1 else 0.1):
        batches[-1]["weights"] = batches[-1]["weights"][:4]
    return batches


def weights_of_batch(rng):
    """Draw the weights of the examples: often 0 for one, for a worker, for all."""
    pick, _ = picker(rng)
    i = rng.randint(0, EXAMPLES - 1)
    zero = [0.0] * EXAMPLES
    one = [float(k == i) for k in range(EXAMPLES)]
    return pick(
        ONES,
        ONES,
        ONES,
        zero,
        zero,
        one,
        [1 - x for x in one],
        [float(k // 2 != i // 2) for k in range(EXAMPLES)],
        [0.0] * 4 + [1.0] * 4,
        [float(k % 4) for k in range(EXAMPLES)],
        [0.25 * (k * i % 5) for k in range(EXAMPLES)],
    )


def picker(rng):
    """Return functions that draw one of some values, and an event of a probability."""

    def pick(*values):
        return rng.choice(values)

    def chance(probability):
        return rng.random() < probability

    return pick, chance
