"""Which results depend on which arguments, for each primitive that has a function inside."""

import functools

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from optfn.distributed import data_mesh
from optfn.loss.jaxprs.dependence import find_dependent_leaves
from optfn.loss.jaxprs.primitives import as_scan

X = jnp.ones(3)


@jax.custom_jvp
def with_own_tangent(a, b):
    return a + 1, jnp.sin(b)


with_own_tangent.defjvp(lambda primals, tangents: (with_own_tangent(*primals), tangents))


@jax.custom_vjp
def with_own_gradient(a, b):
    return a + 1, jnp.sin(b)


with_own_gradient.defvjp(lambda a, b: (with_own_gradient(a, b), None), lambda _, g: g)


def scan(a, b, c):
    """A constant, two carries of which one reads the other, and elements."""

    def body(carry, x):
        first, second = carry
        return (first + a, second + first), (x, second, c)

    return lax.scan(body, (b, c), jnp.stack([c, c]))


def chained_scan(a, b, c):
    """What enters the first carry reaches the third after two iterations."""
    carry, _ = lax.scan(lambda s, _: ((s[0], s[0], s[1]), None), (a, b, c), length=3)
    return carry


def while_loop(a, b, c):
    return lax.while_loop(
        lambda s: s[0][0] < 3, lambda s: (s[0] + 1, s[1] + b, 2 * s[2]), (a, b, c)
    )


def fori_loop_of_unknown_length(a, b, c):
    n = a[0].astype(jnp.int32)
    return lax.fori_loop(0, n, lambda i, s: (s[0] + 1, 2 * s[1]), (b, c))


def cond(a, b, c):
    return lax.cond(a[0] > 0, lambda: (b, c, X), lambda: (b + 1, b, 2 * X))


def cond_on_c(a, b, c):
    return lax.cond(c[0] > 0, lambda: (a, b), lambda: (a + 1, a))


def switch(a, b, c):
    return lax.switch(c[0].astype(jnp.int32), [lambda: (a, c), lambda: (a, X), lambda: (X, b)])


def reduce(a, b, c):
    """A fold whose third result reads the second, and the second the first."""
    zero = jnp.float32(0)

    def add(x, y):
        return x[0] + y[0], x[1] + y[0], x[2] + y[1]

    return lax.reduce((a, b, c), (zero, zero, zero), add, (0,))


def shard_map(a, b, c):
    spec = P("data")
    fn = jax.shard_map(
        lambda a, b: (lax.psum(a, "data"), b), mesh=data_mesh(1), in_specs=spec, out_specs=spec
    )
    return fn(a, b)


def nested(a, b, c):
    body = jax.jit(lambda s, x: (s, with_own_tangent(a, x)))
    return lax.scan(jax.checkpoint(body), c, jnp.stack([b, b]))


# What each result may depend on.
CASES = {
    "scan": (scan, (("ab", "abc"), ("c", "abc", "c"))),
    "chained scan": (chained_scan, ("a", "ab", "abc")),
    "while_loop": (while_loop, ("a", "ab", "ac")),
    "fori_loop": (
        lambda a, b, c: lax.fori_loop(0, 3, lambda i, s: (s[0] + 1, s[1] * a), (b, c)),
        ("b", "ac"),
    ),
    "fori_loop of unknown length": (fori_loop_of_unknown_length, ("ab", "ac")),
    "cond": (cond, ("ab", "abc", "a")),
    "cond on c": (cond_on_c, ("ac", "abc")),
    "switch": (switch, ("ac", "bc")),
    "map": (lambda a, b, c: lax.map(lambda x: (x + a, c), b), ("ab", "c")),
    "jit": (jax.jit(lambda a, b, c: (a, b + c)), ("a", "bc")),
    "checkpoint": (jax.checkpoint(lambda a, b, c: (a, jnp.sin(b) + c)), ("a", "bc")),
    "custom_jvp": (lambda a, b, c: with_own_tangent(a, b + c), ("a", "bc")),
    "custom_vjp": (lambda a, b, c: with_own_gradient(a, b + c), ("a", "bc")),
    "relu": (lambda a, b, c: (jax.nn.relu(a), jax.nn.silu(b)), ("a", "b")),
    "vmap": (lambda a, b, c: jax.vmap(with_own_tangent)(a, b + c), ("a", "bc")),
    "gradient": (jax.grad(lambda a, b, c: jnp.sum(jnp.sin(a) * b + c), (0, 1, 2)), ("ab", "a", "")),
    "shard_map": (shard_map, ("a", "b")),
    "nested": (nested, ("c", ("a", "b"))),
    "sort": (lambda a, b, c: lax.sort((a, b)), ("ab", "ab")),
    "reduce": (reduce, ("abc", "abc", "abc")),
    "literals": (lambda a, b, c: (jnp.zeros_like(a), 1.0), ("", "")),
}


@pytest.mark.parametrize("argument", "abc")
@pytest.mark.parametrize("name", CASES)
def test_dependence_is_followed_through(name, argument):
    fn, expected = CASES[name]
    found = find_dependent_leaves(fn, (X, X, X), [x == argument for x in "abc"])
    expected = [argument in x for x in jax.tree.leaves(expected)]
    assert jax.tree.leaves(found) == expected


def test_scans_of_this_jax_are_told_apart():
    """Else a scan counts as one that cannot be split, and all its results as dependent."""
    closed = jax.make_jaxpr(functools.partial(scan, X, X))(X)
    (equation,) = [e for e in closed.jaxpr.eqns if e.primitive.name == "scan"]
    found = as_scan(equation)
    assert found.num_carry == 2
    assert found.num_constants == len(equation.invars) - 2 - 1
