"""Packets of all workers in one buffer, from which one after the other is taken."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from optfn.mesh.collectives.gathers import GatheredPackets


def mean_of(*buckets):
    zeros = [jnp.zeros(x.shape[1:], x.dtype) for x in buckets]

    def add(totals, packets, scale):
        return [total + scale * x for total, x in zip(totals, packets, strict=True)]

    return GatheredPackets(list(buckets), list).mean(zeros, add)


def test_the_mean_is_that_of_all_rows():
    x = np.random.default_rng(0).normal(size=(4, 6)).astype(np.float32)
    y = np.random.default_rng(1).normal(size=(4, 3)).astype(np.float32)
    for found, rows in zip(jax.jit(mean_of)(x, y), (x, y), strict=True):
        np.testing.assert_allclose(found, rows.mean(0), rtol=1e-6)


@pytest.mark.parametrize(("size", "taken"), [(2**26, (2**26,)), (2**27, (1, 2**27))])
def test_places_fit_into_32_bits(size, taken):
    """With 16 workers, the last packet of 2²⁷ words begins near the largest int32."""
    program = jax.make_jaxpr(mean_of)(jax.ShapeDtypeStruct((16, size), jnp.float32))
    assert f"dynamic_slice[slice_sizes={taken}]" in str(program)
