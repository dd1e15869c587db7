"""`estimate_statistics`: the statistics of each batch, averaged, whatever the model's momentum."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from arrays import normal

import optfn

linen = pytest.importorskip("flax.linen")
nnx = pytest.importorskip("flax.nnx")

BATCHES = [np.asarray(normal(i, n, 4)) for i, n in enumerate((16, 16, 8))]


class Net(linen.Module):
    momentum: float = 0.99

    @linen.compact
    def __call__(self, x):
        norm = linen.BatchNorm(use_running_average=False, momentum=self.momentum, name="norm")
        return linen.Dense(1)(norm(linen.Dense(3, name="first")(x)))


def make(momentum=0.99):
    net = Net(momentum)
    variables = net.init(jax.random.key(0), BATCHES[0])

    def loss_fn(params, stats, x):
        variables = {"params": params, "batch_stats": stats}
        y, new = net.apply(variables, x, mutable=["batch_stats"])
        return jnp.mean(y**2), new["batch_stats"]

    return loss_fn, variables["params"], variables["batch_stats"]


def expected(params):
    """Return mean and variance of the first layer, by batches and their sizes, in NumPy."""
    first = jax.tree.map(lambda x: np.asarray(x, np.float64), params["first"])
    values = [x.astype(np.float64) @ first["kernel"] + first["bias"] for x in BATCHES]
    sizes = [len(x) for x in BATCHES]
    return {
        "mean": np.average([x.mean(0) for x in values], axis=0, weights=sizes),
        "var": np.average([x.var(0) for x in values], axis=0, weights=sizes),
    }


@pytest.mark.parametrize("momentum", [0.0, 0.9, 0.99, 0.999])
def test_they_are_the_means_of_the_batches(momentum):
    loss_fn, params, stats = make(momentum)
    stats = jax.tree.map(lambda x: x + 3.0, stats)  # those from before do not count
    found = optfn.estimate_statistics(loss_fn, params, stats, BATCHES)
    for name, want in expected(params).items():
        np.testing.assert_allclose(found["norm"][name], want, rtol=2e-3, atol=1e-4)


def test_an_average_is_judged_with_them():
    """Params far from the last ones: with their own statistics the loss is that of training."""
    loss_fn, params, stats = make()
    params = jax.tree.map(lambda x: 3 * x + 1, params)
    found = optfn.estimate_statistics(loss_fn, params, stats, BATCHES)
    net = linen.BatchNorm(use_running_average=True)
    x = BATCHES[0] @ params["first"]["kernel"] + params["first"]["bias"]
    norm = {"params": params["norm"], "batch_stats": found["norm"]}
    y = (net.apply(norm, x) - params["norm"]["bias"]) / params["norm"]["scale"]
    assert np.abs(np.mean(y, axis=0)).max() < 0.6 and 0.5 < np.var(y) < 2


def test_keys_counts_and_other_arrays_stay():
    """Models of nnx keep the state of their keys beside the statistics."""

    class Model(nnx.Module):
        def __init__(self):
            rngs = nnx.Rngs(0)
            self.norm = nnx.BatchNorm(4, rngs=rngs)
            self.drop = nnx.Dropout(0.5, rngs=rngs)

        def __call__(self, x):
            return self.drop(self.norm(x))

    graphdef, params, rest = nnx.split(Model(), nnx.Param, ...)

    def loss_fn(params, rest, x):
        model = nnx.merge(graphdef, params, rest)
        model.train()
        loss = jnp.mean(model(x) ** 2)
        return loss, (nnx.split(model, nnx.Param, ...)[2], {"loss": loss})

    found = optfn.estimate_statistics(loss_fn, params, rest, BATCHES[:2], has_aux=True)
    want = np.mean([x.mean(0) for x in BATCHES[:2]], axis=0)
    np.testing.assert_allclose(found["norm"]["mean"][...], want, rtol=1e-3, atol=1e-5)
    assert found["drop"]["rngs"]["count"][...] == rest["drop"]["rngs"]["count"][...]


def test_a_key_is_that_of_the_batch():
    key = jax.random.key(3)

    def loss_fn(params, state, x, key):
        return jnp.sum(params), {"m": 0.5 * state["m"] + 0.5 * jax.random.normal(key)}

    found = optfn.estimate_statistics(loss_fn, jnp.ones(2), {"m": jnp.zeros(())}, [0, 1], rng=key)
    draws = [float(jax.random.normal(jax.random.fold_in(key, i))) for i in (0, 1)]
    np.testing.assert_allclose(found["m"], np.mean(draws), rtol=1e-5)


def test_what_is_no_average_is_named():
    def loss_fn(params, state, x):
        u = state["u"] / jnp.linalg.norm(state["u"]) + 1.0
        return jnp.sum(params), {"u": u, "m": 0.9 * state["m"] + 0.1 * jnp.mean(x)}

    state = {"u": jnp.arange(3.0), "m": jnp.ones(())}
    with pytest.raises(ValueError, match=r"does not average 'u'.*only="):
        optfn.estimate_statistics(loss_fn, jnp.ones(2), state, BATCHES)
    found = optfn.estimate_statistics(loss_fn, jnp.ones(2), state, BATCHES, only="m")
    np.testing.assert_array_equal(found["u"], state["u"])
    weights = [len(x) for x in BATCHES]
    want = np.average([x.mean() for x in BATCHES], weights=weights)
    np.testing.assert_allclose(found["m"], want, rtol=1e-4, atol=1e-6)
    with pytest.raises(ValueError, match="at least one batch"):
        optfn.estimate_statistics(loss_fn, jnp.ones(2), state, [], only="m")
