"""What does an update cost as the compilers of TPUs and GPUs make it? It is compiled, and not run.

    make compiled
    make compiled OPTIONS="--only adam,lamb --target v5e,H100 --tree matrix"

The compilers run without a device, in an environment of their own (`make compiled` makes it). What
they give is no time, but the program that would run: the bytes of HBM that it reads and writes, its
temporaries, kernels and loops, and on a TPU the compiler's estimate of its cycles. The floor is the
bytes that the rule must move: parameters, gradients and state read once, parameters and state
written once, and again what a norm has to read before the update; a program moves less where arrays
stay in a TPU's fast memory. Optax's rule stands beside.

Bytes, temporaries and the floor are bytes a parameter, except of tables: MB. Rows are kept in
`benchmarks/compiled.json`; a run of some of them replaces these.
"""

import argparse
import fnmatch
import itertools
import json
import multiprocessing
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from tqdm import tqdm

import optfn
from benchmarks import hlo, measure, targets, update

KEPT = measure.Kept(
    Path(__file__).with_suffix(".json"),
    ("target", "tree", "rule"),
    ("jax", "optax", "libtpu", "jax-cuda12-plugin"),
)
HEAD = (
    "| target | tree | rule | floor B | B/floor | temporaries B | kernels | loops | M cycles "
    "| compile s | optax: B/floor | temporaries B | kernels | M cycles |\n"
    "|---|---|---|---|---|---|---|---|---|---|---|---|---|---|"
)
TOUCHED, TABLE = 4096, 1_000_000  # rows of a table with a gradient, and all


class Rule(NamedTuple):
    """What is compiled.

    ours: makes optfn's transform.
    theirs: makes optax's with the same rule, if it has one.
    dtype: that of parameters and gradients.
    again: the bytes a parameter that a norm has to read before the update.
    most: the bound on bytes over the floor.
    """

    ours: Callable[[], Any]
    theirs: Callable[[], Any] | None = None
    dtype: str = "float32"
    again: int = 0
    most: float = 1.02


def _small(name: str, **options: Any) -> dict[str, Rule]:
    """Return the rules of an optimizer with moments in 16 and 8 bits."""

    def made(dtype: str) -> Callable[[], Any]:
        return lambda: getattr(optfn, name)(1e-3, **options, moment_dtype=dtype)

    norms = {"lamb": 8, "lars": 8}.get(name, 0)
    # XLA compiles equal kernels once. The 148 float32 leaves of GPT-2 small make 9 different
    # kernels on a v5e. In int8 they make 63, of which 30 have about 95 operations an element,
    # because the row maximum and the update both read g; small arrays are also prefetched (`S(1)`)
    # in ever other combinations: the twelve (768, 2304) in nine. So int8 takes six times the
    # compile seconds: of 24, 15 for the 50 matrices and 5.5 for the 98 vectors. Without the hash of
    # the random bits the matrices take 0.8 of it; scales of shape (1,) change nothing. In
    # bfloat16 up to three leaves share a kernel, because they share `u32[768]`, the random bits of
    # a row. Random bits without it make a kernel for each leaf, in 6.2 s for 9.2, of 5.69 million
    # cycles for 5.28.
    # LARS in int8 reads p and g three times, because the largest entry of a row waits for the
    # norms: `%abs_reduce_fusion = f32[16384] fusion(%g, %p, %select_n.15, …)`.
    return {
        f"{name}, bfloat16 moments": Rule(made("bfloat16"), again=norms, most=1.05),
        f"{name}, int8 moments": Rule(made("int8"), again=norms, most=1.3),
    }


def _masters(bits: int | None, most: float) -> Rule:
    # A v5p writes the bits of the master, `%fusion.9 = (s32[16384,4096], …)`, and makes parameter
    # and remainder of them in a second kernel, `%fusion.15`; a v5e and an H100 fuse the two. So it
    # does without the clip, the sign or the NaNs of the remainder too, and with a shorter update.
    # The same masters around sgd and momentum are one kernel, of 10 and 18 bytes.
    def made() -> Any:
        return optfn.master_weights(optfn.adam(1e-3), bits=bits)

    return Rule(made, dtype="bfloat16", most=most)


def _rules() -> dict[str, Rule]:
    """Return what is compiled for every tree, by name."""
    again = {"lars": 8, "lamb": 12, "adam, clip by global norm": 4}
    # accumulate: the step that is due is a loop, `%while.1`, which reads and writes the sums again:
    # 48 bytes, and 24 in a call that is not due, so 120 in four calls. Optax computes adam in each
    # call and selects, which is 144 bytes. On an H100 the host reads the condition of the loop.
    most = {"ftrl": 1.05}
    found = {
        name.replace(", 4 gradients", ""): Rule(
            ours, theirs, again=again.get(name, 0), most=most.get(name, 1.02)
        )
        for name, (ours, theirs) in update.PAIRS.items()
    }
    found["rmsprop, centered"] = Rule(lambda: optfn.rmsprop(0.1, centered=True))
    found["muon"] = Rule(lambda: optfn.muon(0.1), lambda: optax.contrib.muon(0.1))
    for name in ("adam", "adamw", "adamax", "lamb"):
        found |= _small(name)
    for name in ("momentum", "lars"):
        found |= _small(name, momentum=0.9)
    found |= _small("rmsprop") | _small("muon")
    found["adam, masters as copies"] = _masters(None, 1.1)
    found["adam, masters of 32 bits"] = _masters(32, 1.1)
    found["adam, masters of 24 bits"] = _masters(24, 1.3)
    return found | _wrapped()


def _wrapped() -> dict[str, Rule]:
    """Return the wrappers, around adam."""

    def adam() -> Any:
        return optfn.adam(1e-3, eps_hat=False)

    def theirs() -> Any:
        return optax.apply_if_finite(optax.adam(1e-3), 5)

    # model_average on a TPU: `%fusion` makes moments, parameter and the first sum, of 36 bytes.
    # The other 24 are of `%while`, which moves sums, in one step of 10,000 by default. As plain
    # expressions they would be two kernels of 64 bytes in each step, because XLA does not put two
    # sums that depend on the new parameter into one kernel.
    averages = {
        "exponential_moving_average": lambda: optfn.exponential_moving_average(0.999),
        "model_average": lambda: optfn.model_average(0.15),
    }
    found = {
        f"{name}(adam)": Rule(lambda make=make: optfn.chain(adam(), make()), most=1.05)
        for name, make in averages.items()
    }
    # skip_spikes: XLA writes u beside its norm instead of computing u again after the decision,
    # `%multiply_reduce_fusion = (f32[], f32[16384,4096]) fusion(%g, %nu, …, %mu, …)`. A second
    # call of the optimizer would double the products of muon.
    # record_metrics on an H100: with a reduction for each norm XLA copies the parameter instead of
    # writing it over the old one: `%copy.6 = f32[16384,4096] copy(%get-tuple-element.8)`. So there
    # one reduction gives all three (`xla.sum_each`). It would make a v5e hold a temporary.
    return found | {
        "skip_nonfinite(adam)": Rule(lambda: optfn.skip_nonfinite(adam()), theirs, again=4),
        "dynamic_loss_scale(adam)": Rule(lambda: optfn.dynamic_loss_scale(adam()), again=4),
        "skip_spikes(adam)": Rule(lambda: optfn.skip_spikes(adam()), again=12),
        "record_metrics(adam)": Rule(lambda: optfn.record_metrics(adam()), most=1.3),
    }


def _tables() -> dict[str, Rule]:
    return {"lazy adam": Rule(lambda: optfn.adam(1e-3, lazy=True))}


RULES = _rules()
# Shapes of parameters by the name of a tree. "packed" is the tree of ResNet-50 in one buffer, on
# which lamb misses its floor on a v5e: `%concatenate.0 = f32[25557032]` joins the repeated ratio of
# each tensor, and `%reshape.330 = f32[6,589824]` lays tensors out anew for their norms. A slice for
# each tensor makes fewer bytes there, and twice the kernels on an H100.
# If the rows of a table have 64 entries, a v5e copies the table and both moments in each step of
# lazy adam; rows of 128 entries are updated in place.
TREES: dict[str, Callable[[], dict[str, tuple[int, ...]]]] = {
    "matrix": lambda: {"w": (16384, 4096)},
    "gpt2": measure.gpt2_small,
    "resnet50": measure.resnet50,
    "packed": measure.resnet50,
    "table of 64": lambda: {"table": (TABLE, 64)},
    "table of 128": lambda: {"table": (TABLE, 128)},
    "toy": lambda: {"w": (64, 256), "b": (64,)},
}


def rules_of(tree: str) -> dict[str, Rule]:
    """Return what is compiled for a tree."""
    return _tables() if tree.startswith("table") else RULES


def arguments(tree: str, dtype: str) -> tuple[Any, Any, float]:
    """Return abstract params and gradients, and the share of the parameters that have one."""
    shapes = TREES[tree]()
    params: Any = {k: jax.ShapeDtypeStruct(shape, jnp.dtype(dtype)) for k, shape in shapes.items()}
    if tree == "packed":
        params = jax.eval_shape(optfn.pack, params)
    if not tree.startswith("table"):
        return params, params, 1.0
    (rows, width), dtype = shapes["table"], "float32"
    indices = jax.ShapeDtypeStruct((TOUCHED,), jnp.int32)
    values = jax.ShapeDtypeStruct((TOUCHED, width), jnp.float32)
    return params, {"table": optfn.sparse.Rows(indices, values, rows)}, TOUCHED / rows


def _unit(tree: str, params: Any) -> float:
    """Return what a byte is divided by: MB of a table, and the parameters of any other tree."""
    return 1e6 if tree.startswith("table") else measure.size(params)


def floor(rule: Rule, tree: str) -> float:
    """Return the bytes that a rule must move, in the unit of its row."""
    params, gradients, share = arguments(tree, rule.dtype)
    state = jax.eval_shape(rule.ours().init, params)
    moved = 2 * share * measure.num_bytes((params, state)) + measure.num_bytes(gradients)
    return moved / _unit(tree, params) + rule.again


def measured(target: str, tree: str, name: str) -> measure.Row:
    """Return the row of a rule, of optfn and of optax."""
    rule = rules_of(tree)[name]
    row: measure.Row = {
        "target": target, "tree": tree, "rule": name,
        "floor": floor(rule, tree), "most": rule.most,
    }  # fmt: skip
    sides = {"": rule.ours} | ({"optax_": rule.theirs} if rule.theirs else {})
    for side, make in sides.items():
        of_side = "resnet50" if side and tree == "packed" else tree  # optax knows no buffers
        params, gradients, _ = arguments(of_side, rule.dtype)
        tx, unit = make(), _unit(tree, params)
        found = _costs(target, tx, params, jax.eval_shape(tx.init, params), gradients)
        for column, x in found.items():
            row[side + column] = x / unit if column in ("bytes", "temporaries") else x
        row[side + "over_floor"] = row[side + "bytes"] / row["floor"]
    return row


def _costs(target: str, tx: Any, *arrays: Any) -> dict[str, float]:
    def step(params: Any, state: Any, gradients: Any) -> tuple[Any, Any]:
        updates, state = tx.update(gradients, state, params)
        return optfn.apply_updates(params, updates), state

    start = time.process_time()
    program = targets.compiled(step, targets.TARGETS[target], *arrays, donated=(0, 1))
    seconds = time.process_time() - start
    found = hlo.cost(program.as_text())
    return {
        "bytes": found.num_bytes,
        "temporaries": program.memory_analysis().temp_size_in_bytes,
        "kernels": found.kernels,
        "loops": found.loops,
        "cycles": found.cycles,
        "seconds": round(seconds, 1),
    }


def _prepare(target: str) -> None:
    targets.prepare(targets.TARGETS[target])


def found_rows(chosen: list[tuple[str, str, str]]) -> Iterator[measure.Row]:
    """Yield the rows of some (target, tree, rule), those of each target from one process."""
    spawn = multiprocessing.get_context("spawn")
    with tqdm(total=len(chosen), unit="program", file=sys.stderr) as bar:
        for target in dict.fromkeys(target for target, _, _ in chosen):
            with ProcessPoolExecutor(1, spawn, _prepare, (target,)) as pool:
                for one in (one for one in chosen if one[0] == target):
                    bar.set_description(", ".join(one))
                    yield pool.submit(measured, *one).result()
                    bar.update()


def keep(row: measure.Row) -> None:
    """Write a row to `compiled.json`, which has the rules that there are, in their order."""
    trees = ((tree, rule) for tree in TREES for rule in rules_of(tree))
    KEPT.keep(
        row, [(target, *names) for target, names in itertools.product(targets.TARGETS, trees)]
    )


def line(row: measure.Row) -> str:
    """Return a row of the table."""

    def cells(side: str) -> list[str]:
        if side + "bytes" not in row:
            return ["-"] * 5
        cycles = row[side + "cycles"]
        return [
            f"{row[side + 'over_floor']:.2f}",
            f"{row[side + 'temporaries']:.2f}",
            str(row[side + "kernels"]),
            f"{cycles / 1e6:.2f}" if cycles else "-",
        ]

    ratio, held, kernels, cycles = cells("")
    about = [row["target"], row["tree"], row["rule"], f"{row['floor']:.1f}"]
    ours = [ratio, held, kernels, str(row["loops"]), cycles, f"{row['seconds']:.1f}"]
    return "| " + " | ".join([*about, *ours, *cells("optax_")[:4]]) + " |"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])

    def add(name: str, default: list[str], about: str) -> None:
        parser.add_argument(
            name, default=default, type=lambda names: names.split(","), metavar="A,B", help=about
        )

    add("--only", ["*"], "rules, or patterns of their names")
    add("--target", list(targets.TARGETS), ", ".join(targets.TARGETS))
    add("--tree", [name for name in TREES if name != "toy"], ", ".join(TREES))
    parser.add_argument("--json", metavar="FILE", help="write the rows there, and keep none")
    options = parser.parse_args()
    chosen = [
        (target, tree, rule)
        for target in options.target
        for tree in options.tree
        for rule in rules_of(tree)
        if any(fnmatch.fnmatch(rule, pattern) for pattern in options.only)
    ]
    print(HEAD)
    rows = []
    for row in found_rows(chosen):
        tqdm.write(line(row))
        rows.append(row)
        if not options.json:
            keep(row)
    if options.json:
        Path(options.json).write_text(json.dumps(rows))


if __name__ == "__main__":
    main()
