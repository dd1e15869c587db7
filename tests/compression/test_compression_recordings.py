"""Deep Gradient Compression beside the recordings of Paddle's operators."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from grids import nightly
from recorded import arrays, leaves
from simulation import simulated, stacked

import optfn
from optfn.distributed import deep_gradient_compression

pytestmark = pytest.mark.optimized  # float32 as users compile it


@pytest.mark.parametrize("nesterov", [False, nightly(True)])
def test_follows_paddles_momentum(nesterov):
    """Momentum on the mean before the ramp; after it what arrives is applied as it is."""
    name = "fluid18_dgc_momentum_op" + ("_nesterov" if nesterov else "")
    params = leaves(name, "p0")
    # Paddle's gradient is the sum of two workers'.
    sums = leaves(name, "g")
    with pytest.warns(UserWarning, match="little momentum remains"):
        tx = optfn.dgc_momentum(
            0.1, 0.9, rampup_begin_step=6, sparsity=(0.0,), nesterov=nesterov, min_size=1
        )
    step, p, s = simulated(tx), stacked(params, 2), stacked(tx.init(params), 2)
    for t in range(20):
        own = {k: np.stack([0.25 * g[t], 0.75 * g[t]]) for k, g in sums.items()}
        if t == 6:  # the operator leaves out what the workers accumulate before they send
            velocity = s[0].local_velocity
            s = (s[0]._replace(local_velocity=jax.tree.map(jnp.zeros_like, velocity)), s[1])
        if t >= 6 and nesterov:
            break  # there u = μ(u + g) is added to g on the worker
        p, s = step(p, s, own)
        for k in params:
            np.testing.assert_allclose(p[k][1], leaves(name, "p")[k][t], rtol=1e-5, atol=1e-6)
            if t < 6:
                want = arrays(name)[f"s/velocity/{k}"][t].reshape(-1)
                np.testing.assert_allclose(
                    s[0].local_velocity.value[k][0], want, rtol=1e-5, atol=1e-6
                )


def test_follows_paddles_clip():
    name = "fluid18_dgc_clip_by_norm_op"
    tx = deep_gradient_compression(0.0, sparsity=(0.0,), local_grad_clip_norm=1.0, min_size=1)
    update = jax.jit(jax.vmap(lambda g, s: tx.update(g, s)[0], axis_name="data"))
    for g, out in zip(leaves(name, "g")["x"], leaves(name, "out")["x"], strict=True):
        state = stacked(tx.init(jnp.asarray(g)), 1)
        np.testing.assert_allclose(update(g[None], state)[0], out, rtol=1e-5, atol=1e-6)
