"""What every update keeps, over drawn trees, numbers, wrappers and their order.

A case is one drawn example. 12 of them belong to the suite; `make properties` draws 1,632. Cases
run operation by operation, on few shapes, so that little is compiled. The numbers of wrappers, of
compiled programs, packed params and a mesh are drawn by tests/reference_run.
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
from problems import spec

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
    """Draw a recipe, its transform, params and gradients."""
    recipe, tree, seed = draw(RECIPES), draw(TREES), draw(SEEDS)
    tx = recipe.build(numbers_of(recipe.name, seed))
    scale = draw(st.sampled_from([1e-3, 1.0, 30.0]))
    gradients = filled(tree, (seed + 1) % 2**32, scale, of_gradient=True)
    return recipe, tx, filled(tree, seed), gradients


def bits(x: Any) -> tuple[Any, ...]:
    x = np.asarray(x)
    return x.shape, x.dtype, x.tobytes()


def assert_same_bits(got: Any, want: Any) -> None:
    assert jax.tree.structure(got) == jax.tree.structure(want)
    named = jax.tree_util.tree_leaves_with_path(got)
    for (path, a), b in zip(named, jax.tree.leaves(want), strict=True):
        assert bits(a) == bits(b), (jax.tree_util.keystr(path), a, b)


@cases(12)
@given(problems())
@eagerly
def test_an_update_is_pure_and_keeps_structures(problem):
    """And the state after it goes through a dict, which changes no bit of it."""
    recipe, tx, params, g = problem
    state = tx.init(params)
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
    assert spec(loaded) == spec(state)
