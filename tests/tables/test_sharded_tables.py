"""Tables whose rows are spread over workers: the unsharded step, whatever the ids are."""

import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from grids import suite
from problems import trained

import optfn
from benchmarks import wire
from optfn.distributed import data_mesh
from optfn.tables.sharded_table import to_logical
from optfn.tables.tables import _choose_sizes
from optfn.train.state import TrainState

N, ROWS, WIDTH, STEPS = 8, 64, 4, 4
RNG = np.random.default_rng(0)
PARAMS = {
    "t": RNG.normal(size=(ROWS, WIDTH)).astype(np.float32),
    "w": RNG.normal(size=(WIDTH, 2)).astype(np.float32),
}
TARGETS = RNG.normal(size=(STEPS, 32, 2)).astype(np.float32)


def zipf(rng):
    weights = 1 / np.arange(1, ROWS + 1) ** 1.05
    return rng.choice(ROWS, (STEPS, 32, 5), p=weights / weights.sum())


IDS = {"uniform": lambda rng: rng.integers(0, ROWS, (STEPS, 32, 5)), "zipf": zipf}


def batches(kind):
    ids = IDS[kind](np.random.default_rng(1)).astype(np.int32)
    return list(zip(ids, TARGETS, strict=True))


def loss_fn(params, batch):
    ids, y = batch
    return jnp.mean((params["t"][ids].mean(1) @ params["w"] - y) ** 2)


def run(step, data, params=PARAMS):
    return trained(step, step.init(params), data)


def sharded(tx, loss=loss_fn, tables="t", **options):
    options = {"mesh": data_mesh(N)} | options
    return optfn.make_train_step(loss, tx, tables=tables, shard_tables=True, **options)


CLIPPED = optfn.adam(0.01, lazy=True, grad_clip=optfn.clip_by_global_norm(0.1))


@pytest.mark.nightly
def test_rows_of_all_devices_that_are_more_than_an_owner_keeps_or_updates_at_a_time():
    """160 ids go to the owner of 128 rows, which updates about 30 at a time."""
    rng = np.random.default_rng(2)
    params = PARAMS | {"t": rng.normal(size=(1024, WIDTH)).astype(np.float32)}
    ids = N * rng.integers(0, 1024 // N, (STEPS, 32, 5)).astype(np.int32) + N - 1
    assert min(np.unique(part).size for part in ids) > 80
    data = list(zip(ids, TARGETS, strict=True))
    want, losses = run(optfn.make_train_step(loss_fn, CLIPPED, tables="t"), data, params)
    state, found = run(sharded(CLIPPED), data, params)
    np.testing.assert_allclose(found, losses, rtol=1e-5)
    np.testing.assert_allclose(to_logical(state.params)["t"], want.params["t"], atol=1e-6)


LOOKUPS = {
    "two lookups": lambda t, ids: t[ids] + t[ids[:, ::-1]],
    "an id": lambda t, ids: t[ids[0, 0]],
    "vmap of an id": lambda t, ids: jax.vmap(lambda i: t[i])(ids[:, 0]),
}


@pytest.mark.parametrize("name", suite(LOOKUPS, "two lookups"))
def test_ids_outside_the_table_are_as_in_a_dense_lookup(name):
    ids = np.random.default_rng(2).integers(-2 * ROWS, 2 * ROWS, (32, 5)).astype(np.int32)
    ids[::4, 0] = [-2 * ROWS, -ROWS - 1, -ROWS, -1, 0, ROWS - 1, ROWS, 2 * ROWS]

    def loss(params, batch):
        return jnp.mean(jnp.sin(LOOKUPS[name](params["t"], batch)))

    params = {"t": PARAMS["t"]}
    dense = optfn.make_train_step(loss, optfn.sgd(10.0), mesh=data_mesh(N))
    want, losses = run(dense, [ids], params)
    state, found = run(sharded(optfn.sgd(10.0), loss), [ids], params)
    np.testing.assert_allclose(found, losses, rtol=1e-5)
    np.testing.assert_allclose(state.params["t"], want.params["t"], rtol=1e-5, atol=1e-6)
    assert np.any(want.params["t"] != params["t"])


@pytest.mark.nightly
def test_two_tables_of_other_optimizers_and_dtypes():
    params = {
        "embed": np.random.default_rng(0).normal(size=(ROWS, WIDTH)).astype(jnp.bfloat16),
        "wide": np.zeros((128, 1), np.float32),
        "w": PARAMS["w"],
    }

    def loss(params, batch):
        ids, y = batch
        deep = params["embed"][ids].astype(jnp.float32).mean(1) @ params["w"]
        return jnp.mean((deep + params["wide"][2 * ids].sum(1) - y) ** 2)

    def tx():
        return optax.partition(
            {
                "lazy": optfn.adam(0.01, lazy=True, multi_precision=True),
                "ftrl": optfn.ftrl(0.1, l1=0.1),
            },
            {"embed": "lazy", "w": "lazy", "wide": "ftrl"},
        )  # fmt: skip

    data = batches("uniform")
    want, losses = run(optfn.make_train_step(loss, tx(), tables="embed|wide"), data, params)
    state, found = run(sharded(tx(), loss, tables="embed|wide"), data, params)
    np.testing.assert_allclose(found, losses, rtol=1e-4)
    zeros = [np.asarray(s.params["wide"]) == 0 for s in (state, want)]
    np.testing.assert_array_equal(*zeros)  # FTRL's exact zeros
    np.testing.assert_allclose(state.params["wide"], want.params["wide"], rtol=1e-4, atol=1e-6)


def test_the_entry_of_params_is_the_table_in_natural_order():
    step = sharded(optfn.adam(0.01, lazy="exact"))
    state = step.init(PARAMS)
    table, natural = state.params["t"], PARAMS["t"]
    assert (table.shape, table.dtype, len(table)) == (natural.shape, natural.dtype, ROWS)
    np.testing.assert_array_equal(np.asarray(table), natural)
    np.testing.assert_array_equal(jnp.asarray(table), natural)
    np.testing.assert_array_equal(jax.device_get(table), natural)
    np.testing.assert_array_equal(jax.jit(lambda p: 2 * p["t"].T)(state.params), 2 * natural.T)
    for ids in (-1, np.arange(-ROWS, ROWS).reshape(2, -1), slice(2, 5), (4, 1)):
        np.testing.assert_array_equal(table[ids], natural[ids])
    np.testing.assert_array_equal(table.T, natural.T)
    rows = np.asarray(table.addressable_shards[3].data)
    np.testing.assert_array_equal(rows, natural[3::N])
    again = step.init(state.params)
    np.testing.assert_array_equal(np.asarray(again.params["t"]), natural)


def test_a_number_of_rows_that_the_devices_divide_once_only():
    """A block of the natural order has 3 rows, fewer than devices."""
    params = PARAMS | {"t": PARAMS["t"][: 3 * N]}
    state, _ = run(sharded(optfn.adam(0.01, lazy=True)), [], params)
    np.testing.assert_array_equal(to_logical(state.params)["t"], params["t"])
    np.testing.assert_array_equal(optfn.state_dict(state)["train/params/t"], params["t"])


def test_a_state_that_was_not_made_by_init_is_refused():
    step = sharded(optfn.sgd(0.1))
    state = step.init(PARAMS)
    with pytest.raises(TypeError, match=r"params\['t'\].* must be a ShardedTable"):
        step(state._replace(params=state.params | {"t": PARAMS["t"]}), batches("uniform")[0])


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore:.*dense:UserWarning")
@pytest.mark.parametrize("width", [WIDTH, 256])  # one scale for the table, and one for each row
def test_eight_bit_moments(width, tmp_path):
    """Random bits belong to the places of rows, so codes differ by one from those of one device."""
    params = {
        "t": RNG.normal(size=(ROWS, width)).astype(np.float32),
        "w": RNG.normal(size=(width, 2)).astype(np.float32),
    }
    tx, data = optfn.adam(0.01, moment_dtype="int8"), batches("zipf")
    want, losses = run(optfn.make_train_step(loss_fn, tx, tables="t"), data, params)
    step = sharded(tx)
    state, found = run(step, data, params)
    np.testing.assert_allclose(found, losses, rtol=1e-2)
    moved = np.linalg.norm(want.params["t"] - params["t"])
    assert np.linalg.norm(to_logical(state.params)["t"] - want.params["t"]) < 0.1 * moved
    saved = optfn.state_dict(state)
    for moment in ("mu", "nu"):
        name = f"scale_by_int8_adam/{moment}_scale/t"
        np.testing.assert_allclose(saved[name], optfn.state_dict(want)[name], rtol=1e-2)
        assert saved[name].shape == ((ROWS,) if width == 256 else ())
    optfn.save_checkpoint(tmp_path, state)
    again, _ = optfn.restore_checkpoint(tmp_path, step.init(params))
    for name, x in optfn.state_dict(again).items():
        np.testing.assert_array_equal(x, saved[name])


def without_rows():
    """Return sgd with a state of three numbers for each leaf."""
    state = optax.TraceState
    return optax.GradientTransformation(
        lambda params: state(jax.tree.map(lambda p: jnp.zeros(3), params)), optfn.sgd(0.1).update
    )


def test_a_state_without_rows_is_refused():
    with pytest.raises(ValueError, match=r"an array of shape \(3,\), without an axis of rows"):
        sharded(without_rows()).init(PARAMS)


def compiled(tx, rows, ids=4096, width=64):
    """Return the compiled step of a table that is not there."""
    step = sharded(tx, lambda p, b: jnp.mean((p["t"][b[0]] @ p["w"] - b[1]) ** 2))
    place = step.layout.make_shardings
    params = {
        "t": jax.ShapeDtypeStruct((rows, width), jnp.float32),
        "w": jax.ShapeDtypeStruct((width, 2), jnp.float32),
    }

    def placed(values, shardings):
        return jax.tree.map(
            lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), values, shardings
        )

    opt_state = jax.eval_shape(tx.init, params)
    state = TrainState(
        jax.ShapeDtypeStruct((), jnp.int32),
        placed(params, place(step.layout.param_specs(params))),
        placed(opt_state, place(step.layout.state_specs(opt_state, params))),
    )
    batch = jax.ShapeDtypeStruct((ids,), jnp.int32), jax.ShapeDtypeStruct((ids, 2), jnp.float32)
    return step.compiled.lower(state, batch).compile()


@pytest.mark.nightly
@pytest.mark.optimized
@pytest.mark.parametrize("lazy", [True, "exact"])
def test_temporaries_and_the_wire_do_not_depend_on_the_number_of_rows(lazy):
    """16M × 64 on 8 devices, 4,096 ids: 4 MB of temporaries, 1.6 times the ideal bytes."""
    tx = optfn.adam(0.01, lazy=lazy, grad_clip=optfn.clip_by_global_norm(1.0))
    small, big = compiled(tx, 1 << 16), compiled(tx, 1 << 24)
    temporaries = [c.memory_analysis().temp_size_in_bytes for c in (small, big)]
    assert max(temporaries) <= 4e6
    assert temporaries[1] == pytest.approx(temporaries[0], rel=0.1)
    arguments = big.memory_analysis().argument_size_in_bytes
    assert arguments == pytest.approx(3 * 4 * (1 << 24) * 64 / N, rel=0.01)
    assert not re.search(r"(all-gather|reduce-scatter)", big.as_text())
    sent, ideal = bytes_of_batches(big, lambda rng: rng.integers(0, 1 << 24, (N, 4096 // N)))
    assert sent <= 1.6 * ideal


def bytes_of_batches(step, draw, width=64, count=20):
    """Return the bytes that a device sends in a step, and the least, the mean of some batches.

    The least are the distinct rows that a device does not keep, and their gradients.
    """
    sizes, once = _choose_sizes(4096 // N, N), wire.bytes_sent(step, N, rounds=0)
    in_round = [wire.bytes_sent(step, N, branch=k) - once for k in range(len(sizes))]
    sent, least = [], []
    for seed in range(count):
        each = [np.unique(ids) for ids in draw(np.random.default_rng(seed))]
        fullest = max(np.bincount(ids % N).max() for ids in each)
        assert fullest <= sizes[-1]  # one round
        sent.append(once + in_round[int(np.searchsorted(sizes, fullest))])
        least.append(np.mean([np.sum(ids % N != k) for k, ids in enumerate(each)]) * width * 8)
    return np.mean(sent), np.mean(least)


@pytest.mark.nightly
def test_tables_share_messages_and_a_lookup_may_depend_on_another():
    """Tables of other numbers of rows, equally many ids or not, and ids that are rows of a table:
    the shared step's numbers."""
    rng = np.random.default_rng(5)
    sizes = {"a": 64, "b": 40, "c": 16, "wide": 24}
    params = {
        name: rng.normal(size=(count, 8 if name == "wide" else WIDTH)).astype(np.float32)
        for name, count in sizes.items()
    }
    draw = {name: rng.integers(-2, count, (STEPS, 32)) for name, count in sizes.items()}
    draw["few"] = rng.integers(0, 16, (STEPS, 8))

    def loss(params, ids):
        a, b, wide = (params[name][ids[name]] for name in ("a", "b", "wide"))
        next_ids = jnp.abs(a[:, 0] * 10).astype(jnp.int32) % 16
        c = params["c"][ids["c"]] + params["c"][next_ids]
        few = params["b"][ids["few"]]
        return jnp.mean((a + b * c + wide[:, :4]) ** 2) + jnp.mean(few**2)

    data = [{k: ids[i].astype(np.int32) for k, ids in draw.items()} for i in range(STEPS)]
    tx, options = optfn.adam(0.05, lazy=True), {"tables": ".*", "mesh": data_mesh(N)}
    each = [
        run(optfn.make_train_step(loss, tx, shard_tables=divided, **options), data, params)
        for divided in (False, True)
    ]
    chex.assert_trees_all_close(*(to_logical(found[0].params) for found in each), atol=1e-5)


@pytest.mark.nightly
@pytest.mark.optimized
def test_ids_by_frequency_send_little_more_than_the_rows_that_are_needed():
    """Zipf's law, exponent 1.05, on 262,144 rows: 1.6 times the ideal, hashed or not."""
    rows = 1 << 18
    cumulative = np.cumsum(np.arange(1, rows + 1) ** -1.05)

    def by_frequency(rng):
        return np.searchsorted(cumulative, cumulative[-1] * rng.random((N, 4096 // N)))

    step = compiled(optfn.adam(0.01, lazy=True), rows)
    assert step.memory_analysis().temp_size_in_bytes <= 4e6  # a device has 8.4e6 bytes of rows
    assert not re.search(r"(all-gather|reduce-scatter)", step.as_text())
    for draw in (by_frequency, lambda rng: optfn.sparse.hash_ids(by_frequency(rng), rows)):
        sent, least = bytes_of_batches(step, draw)
        assert sent <= 1.6 * least


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"tables": None}, ValueError, "shard_tables=True needs tables"),
        ({"mesh": None}, ValueError, "needs mesh"),
        ({"shard_tables": 1}, TypeError, "shard_tables must be"),
        ({"packed": True}, ValueError, "tables='t' cannot be combined with packed=True"),
        ({"local_steps": 2}, ValueError,
         "local_steps=2 cannot be combined with params or state divided over all of data_axis"),
    ],
)  # fmt: skip
def test_bad_arguments(options, error, words):
    options = {"mesh": data_mesh(N), "tables": "t", "shard_tables": True} | options
    with pytest.raises(error, match=words):
        optfn.make_train_step(loss_fn, optfn.sgd(0.1), **options)


def test_tables_that_do_not_fit():
    with pytest.raises(
        ValueError, match=r"dimension 0 of leaf 't', which has shape \(63, 4\).*Add rows"
    ):
        sharded(optfn.sgd(0.1)).init(PARAMS | {"t": PARAMS["t"][:-1]})
    with pytest.raises(ValueError, match="'u' matches no leaf"):
        sharded(optfn.sgd(0.1), tables="u").init(PARAMS)
    step = sharded(optfn.sgd(0.1), lambda p, b: jnp.sum(p["t"]))
    with pytest.raises(TypeError, match="table 't' can only be looked up"):
        step(step.init(PARAMS), batches("uniform")[0])


def test_narrow_ids_read_the_rows_of_a_table_with_as_many_rows_as_they_count():
    step = optfn.make_train_step(
        lambda p, ids: jnp.sum(p["t"][ids]), optfn.sgd(0.1), mesh=data_mesh(2), tables="t",
        shard_tables=True,
    )  # fmt: skip
    table = np.arange(512, dtype=np.float32).reshape(256, 2)
    stored = step.init({"t": table}).params["t"]
    for dtype in (np.uint8, np.int8):
        ids = np.array([3, 100], dtype)
        np.testing.assert_array_equal(stored[ids], table[ids])


def test_a_batch_without_ids_changes_no_row():
    step = optfn.make_train_step(
        lambda p, ids: jnp.sum(p["t"][ids]) + jnp.sum(p["w"]), optfn.sgd(0.1), mesh=data_mesh(2),
        tables="t", shard_tables=True,
    )  # fmt: skip
    table = np.ones((8, 2), np.float32)
    state, _ = step(step.init({"t": table, "w": jnp.ones(2)}), np.zeros((8, 0), np.int32))
    np.testing.assert_array_equal(state.params["t"], table)
