"""The transform that docs/own-transform.md writes takes the steps of its paper."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from problems import run

import optfn
from docs.programs import programs

B1, B2, B3, EPS, RATE = 0.98, 0.92, 0.99, 1e-8, 0.01


def adan_of_page():
    names = {"__name__": "own-transform"}
    blocks = [program.code for program in programs("own-transform.md")]
    for code in (blocks[0], *(x for x in blocks if "def scale_by_adan" in x)):
        exec(code, names)
    return names["scale_by_adan"]()


def reference(x, gradients):
    """Algorithm 1 of arXiv 2208.06677, with bias correction and without decay, in float64."""
    m = v = n = np.zeros_like(x)
    for k, g in enumerate(gradients):
        change = g - gradients[k - 1] if k else np.zeros_like(g)
        m = B1 * m + (1 - B1) * g
        v = B2 * v + (1 - B2) * change
        n = B3 * n + (1 - B3) * (g + B2 * change) ** 2
        corrected = [a / (1 - b ** (k + 1)) for a, b in ((m, B1), (v, B2), (n, B3))]
        x = x - RATE * (corrected[0] + B2 * corrected[1]) / (np.sqrt(corrected[2]) + EPS)
    return x


@pytest.mark.parametrize("packed", [False, True])
def test_adan_of_the_page_follows_its_paper(packed):
    rng = np.random.default_rng(0)
    params = {"w": rng.normal(size=(4, 3)), "b": rng.normal(size=3)}
    gradients = [jax.tree.map(lambda p: rng.normal(size=p.shape), params) for _ in range(7)]
    tx = optfn.chain(adan_of_page(), optfn.scale_by_learning_rate(RATE))
    to = optfn.pack if packed else lambda x: x
    given = [to(jax.tree.map(jnp.float32, tree)) for tree in (params, *gradients)]
    found = run(tx, given[0], given[1:])[0][-1]
    found = optfn.unpack(found) if packed else found
    for name, p in params.items():
        expected = reference(p, [g[name] for g in gradients])
        np.testing.assert_allclose(found[name], expected, rtol=1e-4, atol=1e-6)
