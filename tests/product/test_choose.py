"""The numbers in choose.md, which-way.md and wrappers.md are those of shapes and programs."""

import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hlo import collectives

import optfn
from optfn.loss.jaxprs.primitives import walk

N = 8
DOCS = Path(__file__).parents[2] / "docs"
PAGE = "".join((DOCS / f"{name}.md").read_text() for name in ("choose", "which-way"))
SIZE = 1 << 19  # elements, so that step counters and flags do not count
close = pytest.approx


def table(heading: str, number: int = 0) -> list[list[str]]:
    """Return the rows of a table below a heading, without its head."""
    section = re.search(rf"^## {heading}\n(.*?)(?=^## |\Z)", PAGE, re.M | re.S).group(1)
    rows = re.findall(r"(?:^\|.*\n)+", section, re.M)[number].splitlines()[2:]
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]


def code(cell: str) -> list[str]:
    return re.findall(r"`(.*?)`", cell)


def num_bytes(tree) -> int:
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))


@pytest.mark.parametrize("row", table("An optimizer"), ids=lambda row: row[0])
def test_bytes_of_state(row):
    tx = eval(code(row[0])[0])
    state = jax.eval_shape(tx.init, {"w": jax.ShapeDtypeStruct((512, SIZE // 512), "float32")})
    assert num_bytes(state) / SIZE == close(float(row[1]), rel=0.02, abs=1e-3)


@pytest.mark.parametrize(
    ("call", "found"),
    re.findall(r"^\| `(\w+\(.*?\))`.*\| (\d+ B.*) \|$", (DOCS / "wrappers.md").read_text(), re.M),
    ids=lambda cell: cell,
)
def test_bytes_of_a_wrapper(call, found):
    """Beside those of the optimizer: bytes in all, a parameter, or a group."""
    tx, params = optfn.sgd(1e-3), {"w": jax.ShapeDtypeStruct((SIZE,), "float32")}
    names = {"tx": tx, "every": 4, "factor": 9.0, "decay": 0.9, "rate": 0.15}

    def added(**options):
        wrapper = eval(call, vars(optfn) | names | options)
        state = num_bytes(jax.eval_shape(wrapper.init, params))
        return state - num_bytes(jax.eval_shape(tx.init, params)) * ("tx" in call)

    if "a parameter" in found:
        assert found == f"{added() / SIZE:.0f} B a parameter"
    else:
        group = f", and {added(patterns=['w']) - added(patterns=None)} B a group"
        assert found == f"{added(patterns=None)} B" + group * ("patterns" in call)


@pytest.mark.parametrize("row", table("A precision"), ids=lambda row: f"{row[0]} {row[1]}")
def test_bytes_of_a_precision(row):
    params = {"w": jax.ShapeDtypeStruct((SIZE,), code(row[0])[0])}
    state = jax.eval_shape(eval(code(row[1])[0]).init, params)
    assert num_bytes((params, state)) / SIZE == close(float(row[2]), rel=0.02)


def loss_fn(params, x):
    return jnp.mean((x @ params["w"]) ** 2)


def compiled(tx, params, **options):
    """Return a step on 8 workers, its state and its program."""
    step = optfn.make_train_step(loss_fn, tx, mesh=optfn.distributed.data_mesh(N), **options)
    state = step.init(params)
    x = jnp.ones((4 * N, params["w"].shape[0]))
    return step, state, step.compiled.lower(state, x).compile()


def held(tree) -> int:
    """Return the bytes on one device."""
    return sum(x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(tree))


def sent(program) -> float:
    """Return the bytes that each worker sends, in a ring."""
    factor = {
        "all-reduce": 2 * (N - 1) / N, "all-gather": (N - 1) / N, "reduce-scatter": N - 1,
        "all-to-all": (N - 1) / N,
    }  # fmt: skip
    found = collectives(program.as_text())
    return sum(factor[kind] * sum(sizes) for kind, sizes in found.items())


@pytest.mark.optimized
@pytest.mark.parametrize("row", table("A compression"), ids=lambda row: row[0])
def test_bytes_on_the_link(row):
    call, *options = code(row[0])
    options = eval(f"dict({', '.join(options)})")
    params = {"w": np.zeros((256, 256), np.float32)}
    tx = eval(call, vars(optfn) | vars(optfn.distributed))
    if call.startswith("exchange"):
        tx = optfn.chain(tx, optfn.sgd(1.0))
    _, state, program = compiled(tx, params, **options)
    assert held(state.opt_state) / params["w"].size == close(float(row[1]), rel=0.02)
    found = sent(program) / params["w"].size / options.get("local_steps", 1)
    assert found == close(float(row[2]), rel=0.2)
    terms = {"N": N, "H": options.get("local_steps", 1), "d": 256}
    formula = row[3].replace("−", "-").replace("·", "*").replace("2(", "2*(")
    assert eval(formula, terms) == close(float(row[2]), rel=0.01)


@pytest.mark.optimized
@pytest.mark.parametrize(
    "row", table("Without a compiler: what a way keeps and sends"), ids=lambda row: row[0]
)
def test_bytes_of_a_way_of_splitting(row):
    """The plan for each row, and what the compiled step takes and sends."""
    names = vars(optfn.distributed)
    shard, *scanned = (x if x == "scan_layers" else eval(x, names) for x in code(row[0]))
    w = np.zeros((4, 128, 128) if scanned else (256, 256), np.float32)
    params, tx = {"w": optfn.Stacked(w) if scanned else w}, optfn.adam(1e-3)
    plan = optfn.distributed.plan_memory(tx, params, optfn.distributed.data_mesh(N), shard=shard)
    found = [x / w.size for x in (plan.params, plan.state, plan.sent)]
    assert found == close([float(x) for x in row[1:4]], rel=0.02)
    if not scanned:  # tests/mesh/test_sharded_step.py has the compiled loop over layers
        _, state, program = compiled(tx, params, shard=shard)
        assert held(state) / w.size == close(found[0] + found[1], rel=0.2)
        assert sent(program) / w.size == close(found[2], rel=0.2)


@pytest.mark.parametrize(
    "row", table("Without a compiler: what a way keeps and sends", 1), ids=lambda row: row[0]
)
def test_idle_time_of_a_pipeline(row):
    plan = eval(code(row[0])[0])
    assert plan.bubble == close(float(row[1]), rel=0.01)


@pytest.mark.parametrize(
    "row", table("Without a compiler: what a way keeps and sends", 2)[1:], ids=lambda row: row[0]
)
def test_flops_of_recomputation(row):
    """Matrix products of the gradient of a deep chain, over those without recomputation."""
    n, width = 9, 8
    layers = [lambda p, x: jnp.tanh(jnp.tanh(x @ p[0]) @ p[1])] * n
    params, x = [[jnp.ones((width, width))] * 2] * n, jnp.ones((width, width))

    def count(f):
        program = jax.make_jaxpr(jax.grad(lambda p: jnp.sum(f(p, x))))(params)
        return sum(e.primitive.name == "dot_general" for e in walk(program.jaxpr))

    def plain(params, x):
        for f, p in zip(layers, params, strict=True):
            x = f(p, x)
        return x

    segments = code(row[0])[0].removeprefix("segments=").strip('"')
    recomputed = optfn.recompute(layers, segments=segments)
    assert count(recomputed) / count(plain) == close(float(row[1]), rel=0.2)
