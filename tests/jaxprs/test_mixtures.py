"""Which leaves a value mixes, through each primitive that has a function inside."""

from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import optfn
from optfn.jaxprs.mixtures import find_mixtures

X = jnp.ones(3)
LEAVES = [0, 1, 2]


def function_in(filename, expression):
    """Return the function of x whose line is in a file of this name."""
    return eval(compile(f"lambda x: {expression}", filename, "eval"), {"jnp": jnp, "lax": lax})


def scan(a, b, c):
    """Each element of the carry has the sums of earlier elements."""
    carry, _ = lax.scan(lambda s, x: (s + jnp.sum(x), None), b, jnp.stack([a, a]))
    return carry


def while_loop(a, b, c):
    return lax.while_loop(lambda s: jnp.sum(s) < 3, lambda s: s + 1, a)


def switch(a, b, c):
    return lax.cond(jnp.max(c) > 0, lambda: a / jnp.sum(a), lambda: a)


# The leaves among whose elements a mix of the result is another one than in their buffer.
PARTIAL = {
    "elementwise": (lambda a, b, c: jnp.tanh(a) * b, ""),
    "norm": (lambda a, b, c: a / jnp.linalg.norm(a), "a"),
    "norm of another": (lambda a, b, c: a / jnp.linalg.norm(b), "b"),
    "global norm": (lambda a, b, c: a / jnp.sqrt(sum(jnp.vdot(x, x) for x in (a, b, c))), ""),
    "norm of two": (lambda a, b, c: a / jnp.sqrt(sum(jnp.vdot(x, x) for x in (a, b))), "ab"),
    "flat norm": (lambda a, b, c: a / jnp.linalg.norm(jnp.concatenate([a, b, c])), ""),
    "norm behind a global norm": (
        lambda a, b, c: jnp.sum(a / (jnp.sum(a) + jnp.sum(b) + jnp.sum(c))),
        "a",
    ),
    "reshape and back": (lambda a, b, c: jnp.tanh(a.reshape(3, 1)).reshape(3), ""),
    "jit": (jax.jit(lambda a, b, c: a / jnp.sum(a)), "a"),
    "scan": (scan, "a"),
    "while": (while_loop, "a"),
    "cond": (switch, "ac"),
    "vmap": (lambda a, b, c: jax.vmap(lambda x: x * jnp.sum(a))(b), "a"),
    "mean": (lambda a, b, c: a - jnp.mean(a), "a"),
    "sort": (lambda a, b, c: jnp.sort(a), "a"),
    "constants": (lambda a, b, c: a * jnp.sum(X), ""),
}


@pytest.mark.parametrize("name", PARTIAL)
def test_mixes_are_followed_through(name):
    fn, expected = PARTIAL[name]
    (mixture,) = jax.tree.leaves(
        find_mixtures(fn, (X, X, X), LEAVES), is_leaf=lambda x: hasattr(x, "mixes")
    )
    line = mixture.find_partial(LEAVES)
    assert bool(line) == bool(expected)
    assert not line or "test_mixtures.py" in line
    mixed = {"abc"[i] for group in mixture.mixes for i in LEAVES if group >> (i + 1) & 1}
    assert not expected or mixed >= set(expected)


@pytest.mark.parametrize("first", ["own", "foreign"])
@pytest.mark.parametrize("expression", ["jnp.linalg.norm(x) * x", "jnp.var(x) * x"])
def test_a_function_that_jax_keeps_has_the_line_of_each_caller(expression, first):
    """JAX traces its jitted functions once, and keeps the lines of the first caller."""
    x = jnp.ones(3 + (first == "own"))
    own = function_in(f"{Path(optfn.__file__).parent / 'transforms' / 'x.py'}", expression)
    foreign = function_in("/outside/rule.py", expression)
    jax.make_jaxpr(own if first == "own" else foreign)(x)
    assert not find_mixtures(own, (x,), [0]).mixes
    assert "/outside/rule.py:1" in next(iter(find_mixtures(foreign, (x,), [0]).mixes.values()))


def test_a_flat_buffer_has_no_rows_and_columns():
    matrix = jnp.ones((3, 2))
    for fn, is_changed in (
        (lambda x: x / jnp.sum(x), False),
        (lambda x: x / jnp.sum(x, axis=0), True),
        (lambda x: x @ x.T @ x, True),
        (lambda x: x * jnp.tensordot(x, x), False),
        (lambda x: x.ravel() / jnp.sum(x.ravel()), False),
    ):
        assert bool(find_mixtures(fn, (matrix,), [0]).find_partial([0])) == is_changed
