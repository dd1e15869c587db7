"""Programs for a CPU make several passes over memory; those for a TPU or GPU are one expression."""

import re
from functools import partial

import jax
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import optfn
from optfn.mesh.compilers import xla

RULES = {
    "ftrl": lambda: optfn.ftrl(0.1, l1=0.01),
    "lamb": lambda: optfn.lamb(0.01),
    "bfloat16": lambda: optfn.adam(0.1, moment_dtype="bfloat16"),
    "int8": lambda: optfn.adam(0.1, moment_dtype="int8"),
}
SHAPE = (8, 256)


def updated(tx, p, g, state):
    """Return p and the state after an update."""
    updates, state = tx.update(g, state, p)
    return optfn.apply_updates(p, updates), state


def after_two(step, p, g, state):
    """Return p after two updates."""
    p, state = step(p, g, state)
    return step(p, -0.5 * g, state)[0]


def normal(seed, shape=SHAPE):
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


@pytest.mark.parametrize("name", RULES)
def test_a_program_for_another_platform_has_no_loop(name):
    tx, p = RULES[name](), normal(0)
    traced = jax.jit(partial(updated, tx)).trace(p, normal(1), tx.init(p))
    text = {x: traced.lower(lowering_platforms=(x,)).as_text() for x in ("cpu", "tpu", "cuda")}
    assert "stablehlo.while" in text["cpu"]
    assert "stablehlo.while" not in text["tpu"] + text["cuda"]


@pytest.mark.parametrize("name", RULES)
def test_updates_under_vmap_are_those_of_each(name, expressions):
    tx = RULES[name]()
    p, g, step = normal(0, (3, *SHAPE)), normal(1, (3, *SHAPE)), partial(updated, tx)
    found = after_two(jax.jit(jax.vmap(step)), p, g, jax.vmap(tx.init)(p))
    alone = jax.jit(step)
    one_by_one = [after_two(alone, *x, tx.init(x[0])) for x in zip(p, g, strict=True)]
    np.testing.assert_allclose(found, one_by_one, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", RULES)
def test_updates_of_shards_are_those_of_each(name, plain_expressions):
    tx, mesh = RULES[name](), Mesh(np.array(jax.devices()[:2]), ("x",))
    p, g = normal(0, (2, *SHAPE)), normal(1, (2, *SHAPE))
    mapped = jax.shard_map(
        jax.vmap(tx.update), mesh=mesh, in_specs=(P("x"),) * 3, out_specs=(P("x"),) * 2
    )
    arguments = g, jax.vmap(tx.init)(p), p
    found, expected = jax.jit(mapped)(*arguments), jax.jit(jax.vmap(tx.update))(*arguments)
    np.testing.assert_allclose(found[0], expected[0], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["bfloat16", "int8"])
def test_small_moments_are_those_of_a_cpu(name, monkeypatch):
    """Both sides round by the same random bits; the last digit may move a few to a neighbour."""
    tx, p, g = RULES[name](), normal(0), normal(1)
    found = []
    for behind in (("cpu",), ()):
        monkeypatch.setattr(xla, "CPU_PLATFORMS", behind)
        state = jax.jit(tx.update)(g, tx.init(p), p)[1]
        found.append([np.asarray(x, np.float32) for x in jax.tree.leaves(state)])
    for ours, theirs in zip(*found, strict=True):
        assert np.mean(ours != theirs) < 0.01
        np.testing.assert_allclose(ours, theirs, rtol=0.01, atol=1)


WRAPPERS = {
    "TPU": lambda: optfn.chain(
        optfn.sgd(0.1), optfn.model_average(0.5, min_average_window=2, max_average_window=3)
    ),
    "GPU": lambda: optfn.record_metrics(optfn.sgd(0.1)),
}


@pytest.mark.parametrize("platform", WRAPPERS)
def test_an_expression_of_one_platform_gives_what_a_cpu_does(platform, monkeypatch):
    """On a TPU a loop moves the sums of an average where they are due; on a GPU one reduction
    gives three norms."""
    tx, p, g = WRAPPERS[platform](), {"w": normal(0), "b": normal(1, (3,))}, normal(2)
    g = {"w": g, "b": g[0, :3]}
    found = []
    for behind in (False, True):
        if behind:
            monkeypatch.setattr(xla, "CPU_PLATFORMS", ())
            monkeypatch.setattr(xla, f"{platform}_PLATFORMS", ("cpu",))
        state, step = tx.init(p), jax.jit(lambda *arguments: tx.update(*arguments)[1])
        trail = []
        for _ in range(5):
            state = step(g, state, p)
            trail += jax.tree.leaves(state)
        found.append(trail)
    for ours, theirs in zip(*found, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-6)


def test_which_platform_has_a_loop_for_an_average_and_one_reduction_for_norms():
    p = normal(0)
    texts = {}
    for name, make in WRAPPERS.items():
        tx = make()
        traced = jax.jit(tx.update).trace(p, tx.init(p), p)
        for x in ("cpu", "tpu", "cuda"):
            texts[name, x] = traced.lower(lowering_platforms=(x,)).as_text()
    loops = {x: texts["TPU", x].count("stablehlo.while") for x in ("cpu", "tpu", "cuda")}
    assert loops == {"cpu": 3, "tpu": 1, "cuda": 0}
    several = r"stablehlo\.reduce\(.* init: .*\), \(.* init: "
    found = {x: bool(re.search(several, texts["GPU", x])) for x in loops}
    assert found == {"cpu": False, "tpu": False, "cuda": True}


def test_the_derivative_of_sums_in_one_reduction(monkeypatch):
    monkeypatch.setattr(xla, "CPU_PLATFORMS", ())
    monkeypatch.setattr(xla, "GPU_PLATFORMS", ("cpu",))

    def fn(x):
        first, second = xla.sum_each(x**2, normal(1))
        return first * second

    x = normal(0)
    np.testing.assert_allclose(jax.grad(fn)(x), 2 * x * normal(1).sum(), rtol=1e-4)
