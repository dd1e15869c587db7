"""`estimate_statistics`: the statistics of each batch, averaged, whatever the model's momentum."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from arrays import normal
from grids import nightly

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
    variables = jax.jit(net.init)(jax.random.key(0), BATCHES[0])

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


@pytest.mark.parametrize("momentum", [nightly(0.0), 0.999])
def test_they_are_the_means_of_the_batches(momentum):
    loss_fn, params, stats = make(momentum)
    stats = jax.tree.map(
        lambda x: np.asarray(x) + np.float32(3), stats
    )  # those from before do not count
    found = optfn.estimate_statistics(loss_fn, params, stats, BATCHES)
    for name, want in expected(params).items():
        np.testing.assert_allclose(found["norm"][name], want, rtol=2e-3, atol=1e-4)


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


@pytest.mark.parametrize(("decay", "steps"), [(0.9, 3), nightly(0.999, 7000)])
def test_an_average_may_be_corrected_for_its_start(decay, steps):
    """As those of haiku: a hidden average, the corrected one, and how many there were."""

    def loss_fn(params, state, x):
        count = state["counter"] + 1
        hidden = decay * state["hidden"] + (1 - decay) * jnp.mean(x, axis=0)
        average = hidden / (1 - jnp.power(jnp.float32(decay), count))
        return jnp.sum(params), {"hidden": hidden, "average": average, "counter": count}

    start = {"hidden": jnp.full(4, 1 - decay**steps), "average": jnp.ones(4)}
    state = {**start, "counter": jnp.int32(steps)}
    found = optfn.estimate_statistics(loss_fn, jnp.ones(2), state, BATCHES)
    want = np.average([x.mean(0) for x in BATCHES], axis=0, weights=[len(x) for x in BATCHES])
    for name in ("hidden", "average"):
        np.testing.assert_allclose(found[name], want, rtol=2e-3, atol=1e-4)
    assert found["counter"] == steps


@pytest.mark.parametrize("scale", [1e-9, 1e9])
def test_statistics_may_be_large_or_small(scale):
    def loss_fn(params, state, x):
        new = {"mean": jnp.mean(x, 0), "var": scale * jnp.var(x, 0)}
        return jnp.sum(params), jax.tree.map(lambda s, x: 0.99 * s + 0.01 * x, state, new)

    state = {"mean": jnp.zeros(4), "var": jnp.ones(4)}
    found = optfn.estimate_statistics(loss_fn, jnp.ones(2), state, BATCHES)
    weights = [len(x) for x in BATCHES]
    want = np.average([x.astype(float).var(0) for x in BATCHES], axis=0, weights=weights)
    np.testing.assert_allclose(found["var"] / scale, want, rtol=1e-4)


def test_narrow_statistics_of_many_batches():
    def average(params, state, x):
        return jnp.sum(params), {"m": 0.99 * state["m"] + 0.01 * x}

    batches = np.linspace(1, 3, 400, dtype=np.float32).reshape(400, 1)
    state = {"m": jnp.zeros(1, jnp.bfloat16)}
    wide = lambda params, state, x: average(params, state, x.astype(state["m"].dtype))  # noqa: E731
    found = optfn.estimate_statistics(wide, jnp.ones(2), state, batches)
    assert found["m"].dtype == jnp.bfloat16
    np.testing.assert_allclose(found["m"].astype(np.float32), 2.0, rtol=1e-2)

    def rounds(params, state, x):
        loss, new = average(params, state, x)
        return loss, {"m": new["m"].astype(jnp.bfloat16)}

    with pytest.raises(ValueError, match="returns 'm' of the model state in bfloat16"):
        optfn.estimate_statistics(rounds, jnp.ones(2), state, batches)


@pytest.mark.parametrize(
    ("name", "rule"),
    [
        ("sum", lambda s, x: {**s, "sum": s["sum"] + x}),
        ("level", lambda s, x: {**s, "level": 0.5 * (s["level"] + s["sum"]) + 0.5 * x}),
        ("var", lambda s, x: {**s, "var": 0.9 * s["var"] + 0.1 * (x - s["level"]) ** 2}),
    ],
)
def test_other_rules_have_no_estimate(name, rule):
    state = {"level": jnp.ones(4), "sum": jnp.ones(4), "var": jnp.ones(4)}
    loss_fn = lambda params, state, x: (jnp.sum(params), rule(state, jnp.mean(x, 0)))  # noqa: E731
    with pytest.raises(ValueError, match=f"does not average '{name}'"):
        optfn.estimate_statistics(loss_fn, jnp.ones(2), state, BATCHES)


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
