"""Random layouts train as one device does, and keep and send what their plan says.

They run in a child process, which an abort of XLA may end.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from grids import nightly
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from mesh_layouts import WAYS, Layout, difference, outcomes

import optfn


@pytest.mark.nightly
@pytest.mark.parametrize("way", WAYS)
def test_hundreds_of_layouts_train_as_one_device_and_as_planned(way):
    assert outcomes([(way, seed) for seed in range(40)]) == {}


@pytest.mark.parametrize(
    "way", [nightly("state, one of two"), "params, one of two", nightly("specs, one of two")]
)
def test_workers_along_an_axis_behind_the_shards_train_or_are_refused(way):
    """XLA ends the process from jaxlib 0.11.2 on; two axes alone are right there too."""
    specs = {"cube": P("fast"), "layers/w": P(None, "fast")}
    assert difference(Layout(way, {"fast": 4, "data": 2}, ("data", "fast"), specs, True)) == ""
    three = Layout(way, {"fast": 2, "data": 2, "other": 2}, ("data", "fast"), specs, True)
    if jax.__version_info__ < (0, 11, 2):
        assert difference(three) == ""
        return
    words = r"needs the axes \('data',\).*before the axes \('fast',\).*\('data', 'fast', 'other'\)"
    with pytest.raises(ValueError, match=words):
        difference(three)


@pytest.mark.parametrize("spec", [P(("data", "model")), P(("model", "data"))])
def test_a_dimension_over_a_data_axis_and_another_keeps_its_order(spec):
    mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ("data", "model"))
    w, x = jnp.arange(16.0), jnp.tile(100 * jnp.arange(16.0), (8, 1))
    step = optfn.make_train_step(
        lambda p, x: jnp.sum(p["w"] * x.mean(0)), optfn.sgd(0.1), mesh=mesh, shard={"w": spec}
    )
    state, metrics = step(step.init({"w": w}), x)
    assert metrics["loss"] == 124_000  # Σ 100·i²
    np.testing.assert_allclose(state.params["w"], -9 * np.arange(16.0))
