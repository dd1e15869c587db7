"""The algebra that the documentation promises, over drawn trees, numbers, wrappers and their order.

A case is one drawn example. 30 of them belong to the suite; `make properties` draws 4,080. Cases
run operation by operation, on few shapes, so that little is compiled. What compiled
programs, packed params and a mesh change is drawn by tests/reference_run.
"""

import dataclasses
import functools
import inspect
import itertools
import os
import random
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from catalogue import OPTIMIZERS
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from machine import clear_programs

import optfn

NIGHTLY = "OPTFN_PROPERTIES" in os.environ
SHAPES = [(), (3,), (2, 3), (0, 3), (3, 1, 2)]
DTYPES = ["float32", "bfloat16", "float16"]
# The least and the largest value that is drawn for an argument of this name.
RATE, DECAY, WEIGHT = (1e-4, 0.1), (0.0, 0.99), (0.0, 0.1)
RANGES = {"learning_rate": RATE, "eps": (1e-6, 1e-2), "initial_accumulator_value": (0.0, 1.0)}
RANGES |= dict.fromkeys(("momentum", "decay", "rho", "b1"), DECAY) | {"b2": (0.5, 0.999)}
RANGES |= dict.fromkeys(("weight_decay", "lars_weight_decay", "l1", "l2"), WEIGHT)
RANGES |= {"lars_coeff": (1e-3, 0.1)}
# What goes around an optimizer, each at most once, in any order.
WRAPPERS = {
    "accumulate": lambda tx: optfn.accumulate(tx, 2),
    "skip_nonfinite": optfn.skip_nonfinite,
    "record_metrics": optfn.record_metrics,
    "master_weights": optfn.master_weights,
    "clip_by_value": lambda tx: optfn.chain(optfn.clip_by_value(0.5), tx),
    "clip_by_global_norm": lambda tx: optfn.chain(optfn.clip_by_global_norm(0.5), tx),
    "average": lambda tx: optfn.chain(tx, optfn.exponential_moving_average(0.9)),
    "window": lambda tx: optfn.chain(tx, optfn.model_average(0.5, min_average_window=2)),
}
# Sums over a tensor depend on the order of its elements.
OF_TENSORS = {"clip_by_global_norm", "record_metrics"}


class Pair(NamedTuple):
    first: Any
    second: Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Layer:
    w: Any
    b: Any


class Recipe(NamedTuple):
    """An optimizer by name, and the wrappers around it, the innermost first."""

    name: str
    wrappers: tuple[str, ...]

    def build(self, numbers: dict[str, Any]) -> Any:
        tx = getattr(optfn, self.name)(**numbers)
        for wrapper in self.wrappers:
            tx = WRAPPERS[wrapper](tx)
        return tx

    @property
    def keeps_dtypes(self) -> bool:
        return "master_weights" not in self.wrappers

    @property
    def is_elementwise(self) -> bool:
        return OPTIMIZERS[self.name].is_elementwise and not OF_TENSORS & {*self.wrappers}


def cases(count: int) -> Any:
    """Return a decorator: so many cases of a property in the suite, 136 times as many at night."""
    return settings(
        max_examples=count * (136 if NIGHTLY else 1),
        derandomize=not NIGHTLY,
        database=None,
        deadline=None,
        phases=[Phase.generate, Phase.shrink],
        suppress_health_check=["too_slow", "data_too_large"],
    )


def eagerly(test: Any) -> Any:
    """Decorate a test to run operation by operation; now and then it drops what was compiled."""
    count = itertools.count(1)

    @functools.wraps(test)
    def run(*args: Any, **options: Any) -> None:
        if next(count) % 200 == 0:
            clear_programs()
        with jax.disable_jit():
            test(*args, **options)

    return run


# What is drawn


class Spec(NamedTuple):
    """A leaf to be filled."""

    shape: tuple[int, ...]
    dtype: str


LEAVES = st.builds(Spec, st.sampled_from(SHAPES), st.sampled_from(DTYPES))
KEYS = st.sampled_from(["w", "b", "0", "a.b", "version", "history", "größe", "layer 1"])


def containers(children: Any) -> Any:
    return st.one_of(
        st.dictionaries(KEYS, children, min_size=1, max_size=3),
        st.lists(children, min_size=1, max_size=3),
        st.tuples(children, children),
        st.builds(Pair, children, children),
        st.builds(Layer, children, children),
    )


TREES = st.recursive(
    st.one_of(LEAVES, LEAVES, LEAVES, LEAVES, st.none(), st.just(Spec((2,), "int32"))),
    containers,
    max_leaves=3,
).filter(lambda tree: any(s.dtype != "int32" for s in specs(tree)))
RECIPES = st.builds(
    Recipe,
    st.sampled_from(list(OPTIMIZERS)),
    st.lists(st.sampled_from(list(WRAPPERS)), unique=True, max_size=3).map(tuple),
)
SEEDS = st.integers(0, 2**32 - 1)


def specs(tree: Any) -> list[Spec]:
    return jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, Spec))


def filled(tree: Any, seed: int, scale: float = 1.0, of_gradient: bool = False) -> Any:
    """Return a tree of normal numbers; the gradient of an integer leaf is float0."""
    rng = np.random.default_rng(seed)

    def fill(leaf: Spec) -> Any:
        if leaf.dtype == "int32":
            return np.zeros(leaf.shape, jax.dtypes.float0) if of_gradient else jnp.arange(2)
        return jnp.asarray(rng.standard_normal(leaf.shape) * scale, leaf.dtype)

    return jax.tree.map(fill, tree, is_leaf=lambda x: isinstance(x, Spec))


def numbers_of(name: str, seed: int) -> dict[str, float]:
    """Return hyper-parameters of an optimizer; now and then the ends of their ranges."""
    pick = random.Random(seed)

    def draw(low: float, high: float) -> float:
        return pick.choice([low, high, *[pick.uniform(low, high)] * 4])

    ranges = RANGES | OPTIMIZERS[name].ranges
    arguments = inspect.signature(getattr(optfn, name)).parameters
    return {key: draw(*ranges[key]) for key in arguments if key in ranges}


@st.composite
def problems(draw: Any) -> Any:
    """Draw a recipe, its transform, params, and a function (i, scale) -> gradients."""
    recipe, tree, seed = draw(RECIPES), draw(TREES), draw(SEEDS)
    tx = recipe.build(numbers_of(recipe.name, seed))
    scale = draw(st.sampled_from([1e-3, 1.0, 30.0]))
    params = filled(tree, seed)

    def gradients(i: int) -> Any:
        return filled(tree, (seed + i + 1) % 2**32, scale, of_gradient=True)

    return recipe, tx, params, gradients


# How it is compared


def spec(tree: Any) -> Any:
    leaves, structure = jax.tree.flatten(tree)
    return structure, [(jnp.shape(x), jnp.asarray(x).dtype) for x in leaves]


def bits(x: Any) -> tuple[Any, ...]:
    x = np.asarray(x)
    return x.shape, x.dtype, x.tobytes()


def assert_same_bits(got: Any, want: Any) -> None:
    assert jax.tree.structure(got) == jax.tree.structure(want)
    named = jax.tree_util.tree_leaves_with_path(got)
    for (path, a), b in zip(named, jax.tree.leaves(want), strict=True):
        assert bits(a) == bits(b), (jax.tree_util.keystr(path), a, b)


def run(tx: Any, params: Any, gradients: Any, state: Any = None) -> Any:
    """Return params and state after a step with each gradient."""
    state = tx.init(params) if state is None else state
    for g in gradients:
        updates, state = tx.update(g, state, params)
        params = optfn.apply_updates(params, updates)
    return params, state


# One at a time


@cases(12)
@given(problems())
@eagerly
def test_an_update_is_pure_and_keeps_structures(problem):
    """And the state after it goes through a dict, from which training continues bit for bit."""
    recipe, tx, params, gradients = problem
    state, g = tx.init(params), gradients(0)
    before = [bits(x) for x in jax.tree.leaves((params, state, g))]
    first, second = (tx.update(g, state, params) for _ in range(2))
    assert_same_bits(first, second)
    assert before == [bits(x) for x in jax.tree.leaves((params, state, g))]
    assert spec(first[1]) == spec(state)
    assert jax.tree.structure(first[0]) == jax.tree.structure(params)
    if recipe.keeps_dtypes:
        assert spec(first[0]) == spec(params)
    after = optfn.apply_updates(params, first[0])
    assert spec(after) == spec(params)
    for a, b in zip(jax.tree.leaves(after), jax.tree.leaves(params), strict=True):
        assert a.dtype != jnp.int32 or bits(a) == bits(b)
    saved = optfn.state_dict(first[1])
    assert all(isinstance(x, np.ndarray) and x.dtype.kind != "V" for x in saved.values())
    loaded = optfn.load_state_dict(tx.init(params), saved)
    assert_same_bits(loaded, first[1])
    ends = [tx.update(gradients(1), s, after) for s in (first[1], loaded)]
    assert_same_bits(*ends)


@cases(4)
@given(problems(), st.sampled_from([1, 2, 4]))
@eagerly
def test_accumulate_is_the_mean(problem, every):
    """Bit for bit the step with the mean in float32, and none before it.

    For powers of two, which XLA divides by exactly; of others it multiplies by the reciprocal.
    """
    _, tx, params, gradients = problem
    each = [gradients(i) for i in range(4)]
    outer = optfn.accumulate(tx, every)
    got, want, state, inner = params, params, outer.init(params), tx.init(params)
    for i, g in enumerate(each):
        updates, state = outer.update(g, state, got)
        got = optfn.apply_updates(got, updates)
        if (i + 1) % every:
            assert not any(np.any(u) for u in jax.tree.leaves(updates))
        else:
            window = each[i + 1 - every : i + 1]
            updates, inner = tx.update(jax.tree.map(mean, *window), inner, want)
            want = optfn.apply_updates(want, updates)
        assert_same_bits(got, want)
        assert_same_bits(state.inner_state, inner)


def mean(*gradients: Any) -> Any:
    """Return the mean in float32, added in order, by NumPy."""
    first, *others = (np.asarray(g) for g in gradients)
    if first.dtype == jax.dtypes.float0:
        return first
    total = first.astype(np.float32)
    for g in others:
        total = total + g.astype(np.float32)
    return jnp.asarray(total / np.float32(len(gradients)))


@cases(14)
@given(problems(), st.lists(st.sampled_from([0.0, np.nan, np.inf, -np.inf]), max_size=5))
@eagerly
def test_a_skipped_step_is_left_out(problem, damages):
    """Params and state are bit for bit those of the good gradients alone."""
    _, tx, params, gradients = problem
    each = []
    for i, damage in enumerate(damages):
        leaves, structure = jax.tree.flatten(gradients(i))
        k = next((k for k, x in enumerate(leaves) if x.size and x.dtype != jax.dtypes.float0), None)
        bad = k is not None and damage != 0
        if bad:
            leaves[k] = leaves[k].at[(0,) * leaves[k].ndim].set(damage)
        each.append((structure.unflatten(leaves), bad))
    got, state = run(optfn.skip_nonfinite(tx), params, [g for g, _ in each])
    want, inner = run(tx, params, [g for g, bad in each if not bad])
    assert_same_bits((got, state.inner_state), (want, inner))
    assert int(state.skipped) == sum(bad for _, bad in each)


# Compiled programs: a few recipes and trees, any numbers
