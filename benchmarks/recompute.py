"""What does recomputation cost, and what memory does it save?

    python -m benchmarks.recompute [--model transformer|mlp|toy] [--picture FILE]
        [--shares 0.15 0.2 …]

Temporaries and FLOPs of the jitted gradient, as the compiler counts them: nothing recomputed, cut
after each block, √n segments, after named blocks only, a `save_only_these_names` policy over the
full function, and byte budgets, as shares of what the gradient takes with nothing recomputed.
Nothing is run. Where the compiler undoes recomputation (`is_effective`; jaxlib 0.10 on a CPU), the
temporaries do not shrink; the residuals that the gradient saves are printed beside them.
"""

import argparse
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

import optfn
from benchmarks import measure
from examples import transformer
from optfn.loss.recomputation.budget import is_recomputation_kept

SHARES = [0.15, 0.2, 0.25, 0.3, 0.4, 0.6, 0.8]


class Chain(NamedTuple):
    """A model as a list of functions, the loss last, with shapes of params and of the input."""

    fns: Sequence[Callable[[Any, Any], Any]]
    params: Sequence[Any]
    x: Any


def transformer_chain(blocks: int, batch: int, config: transformer.Config) -> Chain:
    """Return the demo's transformer: embedding, blocks, head and loss."""
    config = config._replace(blocks=blocks)
    params = jax.eval_shape(lambda: transformer.init(jax.random.key(0), config))

    def head(params: Any, x: jax.Array) -> jax.Array:
        return jnp.mean(jax.nn.logsumexp(transformer.head(params, x), axis=-1))

    block = partial(transformer.block, heads=config.heads)
    x = jax.ShapeDtypeStruct((batch, config.length), jnp.int32)
    parts = [params["embed"], *params["blocks"], params["head"]]
    return Chain([transformer.embed, *[block] * blocks, head], parts, x)


def mlp_chain(hidden: Sequence[int], batch: int) -> Chain:
    """Return residual layers of width 64 with these hidden widths."""

    def layer(p: Any, x: jax.Array) -> jax.Array:
        return x + jax.nn.gelu(x @ p["up"]) @ p["down"]

    def shape(*sizes: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(sizes, jnp.float32)

    params = [{"up": shape(64, h), "down": shape(h, 64)} for h in hidden]
    fns = [layer] * len(hidden)
    return Chain([*fns, lambda _, x: jnp.mean(x**2)], [*params, {}], shape(batch, 64))


MODELS: dict[str, Callable[[], Chain]] = {
    "transformer": lambda: transformer_chain(12, 8, transformer.Config()),
    "mlp": lambda: mlp_chain([64 * (1 + (7 * i * i + 3 * i) % 13) for i in range(24)], 256),
    "toy": lambda: mlp_chain([32] * 4, 8),
}


def in_order(chain: Chain, params: Any, x: Any, names: str = "") -> Any:
    """Run the chain; with a prefix `names`, every output is named."""
    for i, (fn, layer_params) in enumerate(zip(chain.fns, params, strict=True)):
        x = fn(layer_params, x)
        if names:
            x = checkpoint_name(x, f"{names}{i}")
    return x


def forms(chain: Chain) -> dict[str, Callable[[Any, Any], Any]]:
    """Return the functions to compare."""
    named = partial(in_order, chain, names="block_")
    last = len(chain.fns) - 2
    every_fourth = [f"block_{i}" for i in range(2, last, 4)]
    every = [f"block_{i}" for i in range(last + 1)]
    policy = jax.checkpoint_policies.save_only_these_names(*every)
    return {
        "nothing": partial(in_order, chain),
        "each": optfn.recompute(chain.fns, segments="each"),
        "√n": optfn.recompute(chain.fns, segments="sqrt"),
        f"{len(every)} names": optfn.recompute(named, checkpoints=every),
        f"{len(every_fourth)} names": optfn.recompute(named, checkpoints=every_fourth),
        "policy over the whole": jax.checkpoint(named, policy=policy),
    }


def residual_bytes(f: Callable[..., Any], *args: Any) -> int:
    """Return the bytes of the residuals other than the arguments."""
    closed = jax.make_jaxpr(lambda *a: jax.tree.leaves(jax.vjp(f, *a)[1]))(*args)
    kept = {a for a in closed.jaxpr.outvars if not hasattr(a, "val")} - {*closed.jaxpr.invars}
    return sum(a.aval.size * a.aval.dtype.itemsize for a in kept)


def row(name: str, f: Callable[..., Any], chain: Chain) -> measure.Row:
    """Return the figures of one function."""
    start = time.perf_counter()
    lowered = jax.jit(jax.value_and_grad(f)).lower(chain.params, chain.x)
    traced = time.perf_counter() - start
    compiled = lowered.compile()
    memory, cost = compiled.memory_analysis(), compiled.cost_analysis()
    x = chain.x
    if jnp.issubdtype(x.dtype, jnp.integer):  # no gradient, so a constant
        kept = residual_bytes(lambda p: f(p, jnp.zeros(x.shape, x.dtype)), chain.params)
    else:
        kept = residual_bytes(f, chain.params, x)
    return {
        "recomputed": name,
        "temporaries": memory.temp_size_in_bytes,
        "residuals": kept,
        "flops": cost["flops"],
        "trace_s": traced,
    }


def run(model: str, shares: Sequence[float]) -> list[measure.Row]:
    """Return a row per function, and per budget as a share of the memory without recomputation."""
    chain = MODELS[model]()
    rows: list[measure.Row] = []
    for name, f in forms(chain).items():
        rows.append(row(name, f, chain))
        print(_line(rows[-1], rows[0]), flush=True)
    none, sqrt = rows[0], rows[2]
    size = "temporaries" if is_recomputation_kept() else "residuals"
    budgets = [int(share * none[size]) for share in shares]
    for budget in [*budgets, sqrt[size], 1]:
        try:
            f = optfn.recompute(chain.fns, memory_budget=budget)
            rows.append(row(f"budget {_mebi(budget)}", f, chain))
        except ValueError as error:
            print(f"| budget {_mebi(budget)} | {error} | | | | |", flush=True)
            continue
        print(_line(rows[-1], none), flush=True)
    return rows


HEAD = (
    "| recomputed | temporaries MiB | residuals MiB | MFLOP | × nothing | trace and plan s |\n"
    "|---|---|---|---|---|---|"
)


def _mebi(size: float) -> str:
    return f"{size / 2**20:.2f}"


def _line(row: measure.Row, none: measure.Row) -> str:
    return (
        f"| {row['recomputed']} | {_mebi(row['temporaries'])} | {_mebi(row['residuals'])} "
        f"| {row['flops'] / 1e6:.0f} | {row['flops'] / none['flops']:.3f} | {row['trace_s']:.1f} |"
    )


def curve(rows: list[measure.Row], model: str = "") -> Any:
    """Draw FLOPs against memory, and return the figure.

    Memory is temporaries, or residuals where the compiler undoes recomputation.
    """
    size = "temporaries" if is_recomputation_kept() else "residuals"
    costs = {row["recomputed"]: (row[size], row["flops"]) for row in rows}
    budgets = [costs.pop(name) for name in list(costs) if name.startswith("budget")]
    ax = optfn.plot.recompute(costs, budgets)
    ax.set(
        title="Gradient with recomputation" + (f": {model}" if model else ""),
        xlabel=f"{size}, {ax.get_xlabel()}",
    )
    return ax.figure


def draw(rows: list[measure.Row], file: str, model: str = "") -> None:
    """Save the picture of `curve`."""
    import matplotlib

    matplotlib.use("Agg")
    curve(rows, model).savefig(file, dpi=120)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=MODELS, default="transformer")
    parser.add_argument("--picture")
    parser.add_argument("--shares", type=float, nargs="+", default=SHARES)
    options = measure.parse(parser, model="toy", shares=[0.9])

    def found() -> list[measure.Row]:
        rows = run(options.model, options.shares)
        if options.picture:
            draw(rows, options.picture, options.model)
        return rows

    measure.report(options, HEAD, found, effective=is_recomputation_kept())


if __name__ == "__main__":
    main()
