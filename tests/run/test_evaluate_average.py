"""`evaluate_average`: what is evaluated is the average of params and of the model state."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from grids import nightly

import optfn
from optfn.distributed import data_mesh

X = np.random.default_rng(0).normal(size=(6, 8, 3)).astype(np.float32)
DECAY, RATE = 0.5, 0.1


def loss_fn(params, batch):
    return jnp.mean((batch @ params["w"] - batch @ jnp.array([1.0, -2.0, 0.5])) ** 2)


def loss_of_state(params, state, batch):
    mean = 0.5 * state["mean"] + 0.5 * jnp.mean(batch, 0)
    new = {"mean": mean, "count": state["count"] + 1, "key": state["key"]}
    return loss_fn(params, batch - state["mean"]), new


PARAMS = {"w": jnp.zeros(3)}
STATE = {"mean": jnp.zeros(3), "count": jnp.zeros((), jnp.int32), "key": jax.random.key(3)}


def make_optimizer():
    return optfn.chain(optfn.sgd(RATE), optfn.exponential_moving_average(DECAY))


def read(params):
    return {"first": params["w"][0], "second": params["w"][1]}


def train(tx=None, average=True, **options):
    return optfn.minimize(
        loss_fn, tx or make_optimizer(), PARAMS, X, progress=False, evaluate=read,
        evaluate_average=average, evaluate_every=1, **options,
    )  # fmt: skip


def test_a_name_chooses_one_of_several_averages():
    averages = [optfn.exponential_moving_average(DECAY), optfn.model_average(0.15)]
    tx = optfn.chain(optfn.sgd(RATE), *averages)
    state, history = train(tx, average="model_average")
    want = optfn.averaged_params(state.opt_state, state.params, name="model_average")
    assert history["evaluation/first"][-1] == want["w"][0]


LAYOUTS = {
    "params": {"mesh": data_mesh(), "shard": "params"},
    "packed on a mesh": {"packed": True, "mesh": data_mesh()},
    "rows of a table": {"mesh": data_mesh(), "tables": "w", "shard_tables": True},
}


@pytest.mark.nightly
@pytest.mark.parametrize("layout", [*LAYOUTS])
def test_the_average_of_any_layout_lies_as_its_params(layout):
    """11 rows are padded on eight devices; rows of a divided table are not."""
    rows = 16 if "table" in layout else 11
    ids = np.random.default_rng(1).integers(0, 11, size=(2, 16)).astype(np.int32)
    params = {"w": np.random.default_rng(2).normal(size=(rows, 2)).astype(np.float32)}

    def places(average):
        seen = []
        optfn.minimize(
            lambda params, ids: jnp.mean((params["w"][ids] - 1.0) ** 2), make_optimizer(), params,
            ids, progress=False, evaluate=lambda params: seen.append(params["w"]) or 0.0,
            evaluate_average=average, evaluate_every=1, **LAYOUTS[layout],
        )  # fmt: skip
        assert len(seen) == len(ids) and all(x.shape == (rows, 2) for x in seen)
        return [x.sharding for x in seen]

    for average, plain in zip(places(True), places(False), strict=True):
        assert average.is_equivalent_to(plain, 2)


def test_what_evaluate_average_refuses():
    with pytest.raises(TypeError, match="evaluate_average must be True, False, or the name"):
        train(average=1.5)
    with pytest.raises(ValueError, match="evaluate_average needs evaluate"):
        optfn.minimize(loss_fn, make_optimizer(), PARAMS, X, evaluate_average=True)


def test_a_function_reads_what_is_evaluated_from_the_state():
    """schedule_free keeps its x, which is to be judged, beside the params that are trained."""
    tx = optax.contrib.schedule_free_sgd(0.1)

    def loss_fn(w, x):
        return jnp.mean((w - x) ** 2)

    x = np.arange(8, dtype=np.float32).reshape(4, 2)
    state, history = optfn.minimize(
        loss_fn, tx, jnp.zeros(2), x, progress=False, evaluate=lambda w: float(w[1]),
        evaluate_every=1, evaluate_average=optax.contrib.schedule_free_eval_params,
    )  # fmt: skip
    params, opt_state, want = jnp.zeros(2), tx.init(jnp.zeros(2)), []
    for batch in x:
        u, opt_state = tx.update(jax.grad(loss_fn)(params, batch), opt_state, params)
        params = optax.apply_updates(params, u)
        want.append(optax.contrib.schedule_free_eval_params(opt_state, params)[1])
    np.testing.assert_allclose(history["evaluation"], want, rtol=1e-6)
    assert not np.allclose(want[-1], state.params[1])


def run_with_state(batches, evaluate=lambda params, state: 0.0, **options):
    optfn.minimize(
        loss_of_state, make_optimizer(), PARAMS, batches, model_state=STATE, progress=False,
        evaluate=evaluate, **options,
    )  # fmt: skip


def test_whole_numbers_and_keys_of_a_model_state_have_no_average():
    """And without the argument a state has no statistics."""
    plain, averaged = (
        optfn.make_train_step(
            loss_of_state, make_optimizer(), model_state=True, average_model_state=average
        )
        for average in (False, True)
    )
    names, more = (set(optfn.state_dict(x.init(PARAMS, STATE))) for x in (plain, averaged))
    assert more - names == {"exponential_moving_average/statistics/mean"}
    seen = []
    run_with_state(
        X,
        evaluate=lambda params, state: seen.append(int(state["count"])) or 0.0,
        evaluate_average=True,
        evaluate_every=1,
    )
    assert seen == [*range(1, len(X) + 1)]


def test_what_has_nothing_to_average_is_an_error():
    make = functools.partial(optfn.make_train_step, loss_of_state, optfn.adam(0.1))
    with pytest.raises(ValueError, match="needs an average in tx"):
        make(model_state=True, average_model_state=True).init(PARAMS, STATE)
    with pytest.raises(ValueError, match="needs model_state=True"):
        make(average_model_state=True)


@pytest.mark.parametrize("first", [False, nightly(True)])
def test_a_run_that_resumes_with_another_evaluate_average_names_it(first, tmp_path):
    run_with_state(X[:2], evaluate_average=first, checkpoint=tmp_path)
    with pytest.raises(ValueError, match=r"statistics/mean.*with evaluate_average"):
        run_with_state(X[:4], evaluate_average=not first, checkpoint=tmp_path)
