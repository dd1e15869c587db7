"""A pmean in front of an exchange: each worker then sends the same entries, which is said once."""

import itertools
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from arrays import normal
from grids import nightly, suite
from jax.sharding import PartitionSpec as P

import optfn
from optfn.distributed import data_mesh, exchange, top_k

N = 4
X = np.asarray(normal(0, N, 4, 64))
PARAMS = {"w": jnp.zeros((64, 64))}
DGC = {"rampup_begin_step": 0, "min_size": 1}
RULES = {
    "dgc": lambda **late: optfn.dgc_momentum(0.1, 0.9, axis_name="data", **DGC | late),
    "exchange": lambda: optfn.chain(
        exchange(top_k(0.01), axis_name="data", min_size=1), optfn.sgd(0.1)
    ),
}


def replicate(tree):
    return jax.tree.map(lambda x: np.broadcast_to(x, (N, *np.shape(x))), tree)


def trainer(tx, around):
    """Return the loop of one's own of two steps: (batches of the workers, whether gradients are
    averaged) -> params of the first worker."""

    @around
    def step(params, state, x, averages):
        grads = jax.grad(lambda p: jnp.mean((x @ p["w"] - 1.0) ** 2))(params)
        grads = jax.tree.map(lambda g: jnp.where(averages, jax.lax.pmean(g, "data"), g), grads)
        updates, state = tx.update(grads, state, params)
        return optfn.apply_updates(params, updates), state

    def train(x, averages=False):
        params, state = replicate(PARAMS), replicate(tx.init(PARAMS))
        for _ in range(2):
            params, state = step(params, state, x, np.full(N, averages))
        jax.effects_barrier()
        return jax.tree.map(lambda x: np.asarray(x)[0], params)

    return train


def pmap(step):
    return jax.pmap(step, axis_name="data")


def vmap(step):
    return jax.jit(jax.vmap(step, axis_name="data"))


def untracked(step):
    """shard_map in which JAX does not track which arrays vary."""

    def one(*args):
        out = step(*jax.tree.map(lambda x: x[0], args))
        return jax.tree.map(lambda x: x[None], out)

    specs = {"in_specs": P("data"), "out_specs": P("data")}
    return jax.jit(jax.shard_map(one, mesh=data_mesh(N), check_vma=False, **specs))


@pytest.mark.parametrize(
    ("rule", "around"),
    suite(itertools.product(RULES, [pmap, vmap, untracked]), ("exchange", untracked)),
)
def test_equal_gradients_are_said_in_the_first_step(rule, around):
    train = trainer(RULES[rule](), around)
    with pytest.warns(UserWarning, match=r"same gradient in the first step.*Leave out") as caught:
        averaged = train(X, averages=True)
    assert len(caught) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        own = train(X)
    assert np.count_nonzero(own["w"]) > 2 * np.count_nonzero(averaged["w"])


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("around", [nightly(pmap), vmap, nightly(untracked)])
def test_ordinary_loops_hear_nothing(around):
    """Dense leaves, gradients of zero, an exchange that is a plain mean, dense steps first."""
    trainer(optfn.dgc_momentum(0.1, 0.9, rampup_begin_step=0), around)(X, averages=True)
    trainer(RULES["dgc"](), around)(np.zeros_like(X))
    trainer(optfn.chain(exchange(axis_name="data"), optfn.sgd(0.1)), around)(X, averages=True)
    trainer(RULES["dgc"](rampup_begin_step=2), around)(X)


@pytest.mark.filterwarnings("error")
def test_a_step_of_the_library_has_no_such_check():
    """It takes each worker's gradient itself, so equal batches of all workers are no mistake."""
    step = optfn.make_train_step(
        lambda p, x: jnp.mean((x @ p["w"] - 1.0) ** 2), RULES["dgc"](), mesh=data_mesh(N)
    )
    state = step.init(PARAMS)
    state, _ = step(state, np.ones((N, 64), np.float32))
    assert "callback" not in step.lower(PARAMS, np.ones((N, 64), np.float32)).as_text()


@pytest.mark.parametrize("grads", [np.eye(2, 4), np.full((2, 4), np.nan)], ids=["moved", "NaN"])
def test_gradients_with_the_same_entries_elsewhere_or_nan_say_nothing(grads):
    tx, p = exchange(top_k(0.5), min_size=1), jnp.ones(4)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        update = jax.vmap(lambda g: tx.update(g, tx.init(p), p, weight=1.0)[0], axis_name="data")
        update(jnp.asarray(grads, jnp.float32)).block_until_ready()
        jax.effects_barrier()
