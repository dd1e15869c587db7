"""Arrays that JAX would take for others, and arrays that a call would both donate and read."""

import jax.numpy as jnp
import numpy as np
import pytest
from grids import suite

import optfn

MESH = {"mesh": optfn.distributed.data_mesh()}
LAYOUTS = {
    "one device": {},
    "packed": {"packed": True},
    "mesh": MESH,
    "params": MESH | {"shard": "params"},
    "compiler": MESH | {"shard": "params", "partitioner": "compiler"},
}
TREES = [layout for layout in LAYOUTS if layout != "packed"]
ONES = np.ones(8, np.float32)
FOREIGN = {
    "masked": (np.ma.masked_array(ONES, [True] + [False] * 7), "is a masked array, .* x.filled"),
    "long double": (ONES.astype(np.longdouble), "has dtype float128, which JAX does not have"),
    "swapped": (ONES.astype(">f4"), "has dtype >f4, in another byte order"),
}


def distance(p, x):
    return jnp.mean((p["w"] - x["t"]) ** 2)


def make(layout, loss=distance, **options):
    return optfn.make_train_step(loss, optfn.sgd(0.5), **LAYOUTS[layout], **options)


MIXED = {"a": {1: ONES, "b": ONES}}
STEP = optfn.make_train_step(lambda p, x: jnp.sum(p["w"]), optfn.sgd(0.5))
KEYS = {
    "TrainStep.init: params": lambda: STEP.init(MIXED),
    "pack: parameter": lambda: optfn.pack(MIXED),
    "summary: params": lambda: optfn.summary(optfn.adam(0.1), MIXED),
    "state_dict: state": lambda: optfn.state_dict(MIXED),
    "the batch": lambda: STEP(STEP.init({"w": ONES}), MIXED),
    "save_checkpoint: state": lambda: optfn.save_checkpoint("unused", MIXED, step=1),
}


@pytest.mark.parametrize("noun", KEYS)
def test_keys_that_jax_cannot_sort_are_named(noun):
    with pytest.raises(TypeError, match=f"{noun}: JAX sorts the keys of dicts.*; got 1, 'b'"):
        KEYS[noun]()


@pytest.mark.parametrize("name", FOREIGN)
@pytest.mark.parametrize("layout", suite(LAYOUTS, "one device", "packed", "params"))
def test_params_that_jax_would_read_wrongly_are_refused(layout, name):
    array, words = FOREIGN[name]
    if array.dtype == float:
        pytest.skip("this machine's long double is a double")
    with pytest.raises(TypeError, match=f"parameter 'w' {words}"):
        make(layout).init({"w": array})


@pytest.mark.parametrize("layout", suite(LAYOUTS, "one device", "mesh"))
def test_batches_that_jax_would_read_wrongly_are_refused_or_converted(layout):
    step = make(layout)
    state = step.init({"w": ONES})
    state, _ = step(
        state, {"t": ONES}
    )  # from then on, JAX alone reads other byte orders as its own
    for name in ("masked", "long double"):
        array, words = FOREIGN[name]
        if array.dtype != float:
            with pytest.raises(TypeError, match=f"leaf 't' of the batch {words}"):
                step(state, {"t": array})
    numbers = np.arange(8.0)
    for dtype in (">f4", ">f8", ">i4"):
        state = step.init({"w": ONES})
        _, metrics = step(state, {"t": numbers.astype(dtype)})
        np.testing.assert_allclose(metrics["loss"], np.mean((1 - numbers) ** 2))


@pytest.mark.parametrize("name", FOREIGN)
def test_arrays_that_a_file_would_keep_as_others_are_refused_or_converted(name, tmp_path):
    array, words = FOREIGN[name]
    with pytest.raises(TypeError, match=f"state_dict: state 'w' {words}"):
        optfn.state_dict({"w": array})
    with pytest.raises(TypeError, match=f"save_checkpoint: state 'w' {words}"):
        optfn.save_checkpoint(tmp_path, {"w": array}, step=1)
    if name == "masked":
        with pytest.raises(ValueError, match="'w' is a masked array"):
            optfn.load_state_dict({"w": jnp.zeros(8)}, {"w": array})
    else:
        found = optfn.load_state_dict({"w": jnp.zeros(8)}, {"w": array})
        np.testing.assert_array_equal(found["w"], ONES)


@pytest.mark.parametrize("dtype", [">u2", ">i4", ">f2"])
def test_saved_numbers_in_another_byte_order_are_read(dtype):
    saved = {"w": np.arange(3).astype(dtype)}
    like = {"w": jnp.zeros(3, np.dtype(dtype).newbyteorder("="))}
    np.testing.assert_array_equal(optfn.load_state_dict(like, saved)["w"], [0, 1, 2])


def test_model_state_with_a_mask_is_refused():
    step = make("one device", lambda p, s, x: (distance(p, x), s), model_state=True)
    with pytest.raises(TypeError, match="model_state 'mean' is a masked array"):
        step.init({"w": ONES}, {"mean": FOREIGN["masked"][0]})


@pytest.mark.parametrize("layout", suite(TREES, "one device", "params"))
def test_arrays_of_the_state_may_be_in_its_batch(layout):
    """As in a proximal term, in the first step of a distillation from oneself."""

    def loss(p, x):
        return distance(p, x) + 0 * x["n"]

    step = make(layout, loss)
    state = step.init({"w": ONES})
    state, _ = step(state, {"t": 0 * ONES, "n": 0})
    for _ in range(2):
        moved = np.asarray(state.params["w"])
        state, metrics = step(state, {"t": state.params["w"], "n": state.step})
        assert float(metrics["loss"]) == 0
        np.testing.assert_array_equal(state.params["w"], moved)


@pytest.mark.parametrize("layout", suite(TREES, "one device", "mesh"))
def test_arrays_of_the_state_may_be_its_model_state(layout):
    """As in a target network, which is the params from time to time."""

    def loss(p, target, x):
        return jnp.mean((p["w"] - target["w"]) ** 2), target

    step = make(layout, loss, model_state=True)
    state = step.init({"w": ONES}, {"w": 0 * ONES})
    state, _ = step(state, ONES)
    state, metrics = step(state._replace(model_state=state.params), ONES)
    assert float(metrics["loss"]) == 0
    np.testing.assert_array_equal(state.params["w"], state.model_state["w"])


@pytest.mark.parametrize("layout", suite(TREES, "one device", "params"))
def test_a_batch_of_an_earlier_state_is_refused_by_name(layout):
    step = make(layout)
    state = step.init({"w": ONES})
    batch = {"t": state.params["w"]}
    state, _ = step(state, {"t": ONES})
    with pytest.raises(ValueError, match="leaf 't' of the batch has been deleted"):
        step(state, batch)
    state, _ = step(state, {"t": ONES})
