"""The exchange of gradients against its equations, for all kinds of leaves."""

import functools
import math
import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import reference_exchange as reference
from arrays import normal
from exchanges import BATCH, MODEL, Threshold, first, gradients, loss_fn, lowered_collectives, zeros
from grids import nightly, suite
from jax.sharding import PartitionSpec as P
from problems import state_after
from simulation import N, stacked
from simulation import simulated_update as simulated

import optfn
from optfn.compression.exchange import ExchangeState
from optfn.distributed import (
    data_mesh,
    exchange,
    init_state,
    power_sgd,
    quantize,
    state_specs,
    top_k,
)
from optfn.sparse import Rows


def test_a_mapping_of_patterns():
    """The first match counts; None and no match are dense; wide leaves are too."""
    choice = {"table": None, r".*e": quantize(1), "w|x": top_k(0.1)}
    params = {k: np.zeros((30, 50), np.float32) for k in ("table", "we", "w", "rest", "x")}
    tx = exchange(choice)
    state = tx.init(params)
    kept = {k for k, x in state.residual.value.items() if hasattr(x, "shape")}
    assert kept == {"we", "w", "x"}
    g = {k: normal(i, N, 30, 50) for i, k in enumerate(params)}
    direction, _ = simulated(tx)(g, stacked(state))
    for k in ("table", "rest"):
        np.testing.assert_allclose(direction[k][0], g[k].mean(axis=0), atol=1e-6)
    signs = functools.partial(reference.quantize, bits=1)
    for k, send in (("we", signs), ("w", functools.partial(reference.top_k, density=0.1))):
        want = np.mean([send(x) for x in g[k]], axis=0)
        np.testing.assert_allclose(direction[k][0], want, atol=1e-6)
    with pytest.raises(ValueError, match=r"compressor: the pattern 'q' matches no leaf.*'rest'"):
        exchange({"q": top_k(0.1)}).init(params)
    with jax.enable_x64(True):
        state = exchange(top_k(0.1), min_size=1).init({"wide": jnp.zeros(9, jnp.float64)})
    assert not jax.tree.leaves(state.residual)


def test_rows_are_exchanged_as_rows():
    tx = exchange(quantize(1), min_size=1)
    params = {"t": np.zeros((8, 3), np.float32), "w": np.zeros(40, np.float32)}
    state, g = tx.init(params), normal(0, 2, 40)

    def update(index, values, g, state):
        return tx.update({"t": Rows(index, values, 8), "w": g}, state, params)

    index, values = np.array([[1, 5], [5, 8]], np.int32), normal(1, 2, 2, 3)
    values[1, 1] = 0
    run = jax.jit(jax.vmap(update, axis_name="data"))
    direction, state = run(index, values, g, stacked(state, 2))
    rows = first(direction)["t"]
    assert isinstance(rows, Rows) and rows.values.shape == (4, 3)
    want = np.zeros((8, 3), np.float32)
    want[1], want[5] = values[0, 0] / 2, (values[0, 1] + values[1, 0]) / 2
    np.testing.assert_allclose(rows.dense(), want, atol=1e-6)
    assert not state.residual.value["t"].any() and state.residual.value["w"].any()
    values[0, 0, 0] = np.inf
    direction, after = run(index, values, g, state)
    assert not direction["t"].values.any() and not direction["w"].any()
    chex.assert_trees_all_equal(after.residual, state.residual)


@pytest.mark.parametrize(
    ("compressor", "bad", "leaf"), [(power_sgd(2), np.inf, "b"), nightly(top_k(0.1), np.nan, "w")]
)
def test_an_update_that_is_not_finite(compressor, bad, leaf):
    """Of one worker: zeros on all, residuals and compressors' states stay, the next one goes on."""
    tx = exchange(compressor)
    update, state = simulated(tx), stacked(tx.init(zeros()))
    _, state = update(gradients(0), state)
    g = gradients(1)
    g[leaf][2].flat[3] = bad
    direction, after = update(g, state)
    assert all((x == 0).all() for x in jax.tree.leaves(direction))
    chex.assert_trees_all_equal(after, state)
    direction, _ = update(gradients(2), after)
    assert all(x.any() for x in jax.tree.leaves(direction))


@pytest.mark.filterwarnings("ignore:.*all workers have the same gradient")
def test_what_has_accumulated_beyond_float32():
    """A residual is never infinite, so that it does not become NaN."""
    tx = exchange(top_k(0.5), min_size=1)
    state, update = stacked(tx.init(np.zeros(2)), 2), simulated(tx)
    for g in (3e38, 3e38, 3e38, 1.0, 1.0):
        _, state = update(jnp.full((2, 2), g), state)
        chex.assert_tree_all_finite(state)


def test_averaged_updates_and_axes_that_are_not_bound():
    tx, g = exchange(quantize(1)), {"w": jnp.ones(2000)}
    for made in (tx, exchange()):
        with pytest.raises(ValueError, match=r"exchange: the axis 'data' is not bound"):
            made.update(g, made.init(g))

    def body(x):
        return tx.update({"w": jax.lax.psum(x, "data")}, tx.init(g))[0]

    words = "exchange: the gradient of 'w' is already summed or averaged"
    with pytest.raises(ValueError, match=words):
        jax.shard_map(body, mesh=data_mesh(N), in_specs=P("data"), out_specs=P())(jnp.ones(8000))


def test_the_residual_of_other_params():
    tx = exchange(quantize(1))
    state = stacked(tx.init({"w": jnp.zeros(2000)}))
    words = r"exchange: .*'w' must have shape \(2001,\); got \(2000,\)"
    with pytest.raises(ValueError, match=words):
        simulated(tx)({"w": jnp.zeros((N, 2001))}, state)


def test_the_state_has_no_step_for_a_dense_mean():
    state = exchange({".*": None}).init(zeros())
    assert isinstance(state, ExchangeState) and not jax.tree.leaves(state.residual)


def test_the_plain_mean_is_the_step_of_today():
    """Bit for bit, in the dtype of the gradient, without any state."""
    model = jax.tree.map(jnp.asarray, MODEL | {"h": np.zeros(8, jnp.bfloat16)})

    def loss(params, batch):
        return loss_fn(params, batch) + jnp.sum(params["h"] * batch[0][:, :8].mean(0))

    results = []
    for tx in (optfn.chain(exchange(None), optfn.adamw(0.01)), optfn.chain(optfn.adamw(0.01))):
        step = optfn.make_train_step(loss, tx, mesh=data_mesh(N))
        state = state_after(step, step.init(model), [BATCH] * 3)
        results.append(jax.device_get(state.params))
    chex.assert_trees_all_equal(*results)
    tx = exchange()
    assert not jax.tree.leaves(tx.init(model))
    g = jax.tree.map(lambda p: jnp.ones((N, *p.shape), p.dtype), model)
    text = str(jax.make_jaxpr(jax.vmap(tx.update, axis_name="data"))(g, tx.init(model)))
    # Nothing but the conditions of branches, behind which small leaves are taken apart again.
    assert set(re.findall(r"convert_element_type\[new_dtype=(\w+)", text)) <= {"int32"}
    direction, _ = simulated(tx)(g, tx.init(model))
    assert direction["h"].dtype == jnp.bfloat16


@pytest.mark.nightly
def test_row_updates_are_those_of_arrays_bit_for_bit():
    """Entries that several workers send are added in the order of the workers; few are sent."""
    params = {"w": normal(0, 64, 128), "v": normal(1, 1100), "b": normal(2, 5)}
    tx = optfn.chain(exchange({"w": top_k(0.001), ".*": quantize(8)}), optfn.sgd(0.1))
    series = [{k: normal(10 + t, N, *x.shape) for k, x in params.items()} for t in range(4)]
    for g in series:
        g["w"][:, 3, 5:8] += 20  # all workers send it
    series[2]["v"][1, 0] = np.nan
    found, kinds = {}, set()
    for row_updates in (False, True):

        def update(g, state, p, row_updates=row_updates):
            updates, state = tx.update(g, state, p, row_updates=row_updates)
            kinds.add((row_updates, type(updates["w"]), type(updates["v"])))
            return optfn.apply_updates(p, updates), state

        run = jax.jit(jax.vmap(update, axis_name="data"))
        p, state = stacked(params), stacked(tx.init(params))
        for g in series:
            p, state = run(g, state, p)
        found[row_updates] = jax.device_get((p, state))
    assert {kind[1] for kind in kinds if kind[0]} == {Rows}
    assert all(kind[2] is not Rows and (kind[0] or kind[1] is not Rows) for kind in kinds)
    chex.assert_trees_all_equal(found[True], found[False])
    moved = np.flatnonzero(found[True][0]["w"][0] != params["w"])
    assert 3 <= moved.size <= 3 * N * 8 and int(found[True][1][0].step[0]) == 3


def test_a_compressor_of_ones_own():
    tx = exchange({"w": Threshold(1.5), ".*": quantize(1)}, min_size=100)
    state, update, g = stacked(tx.init(zeros())), simulated(tx), gradients(0)
    direction, state = update(g, state)
    size = np.abs(g["w"]).mean(axis=(1, 2), keepdims=True)
    sent = np.where(np.abs(g["w"]) > 1.5 * size, np.sign(g["w"]) * 2 * size, 0)
    np.testing.assert_allclose(direction["w"][0], sent.mean(axis=0), atol=1e-5)
    kept = state.residual.value["w"].reshape(g["w"].shape)
    np.testing.assert_allclose(kept, g["w"] - sent, atol=1e-5)
    assert state.compressor["w"]["calls"].tolist() == [1] * N
    mapping = optfn.state_dict(first(state))
    assert "exchange/compressor/w/calls" in mapping


class Together:
    """Sends matrices as they are, by the optional methods alone: `encode`, `decode` would raise."""

    def init(self, shape):
        return ()

    def encode(self, x, state):
        raise AssertionError("encode")

    def decode(self, packet, shape):
        raise AssertionError("decode")

    def num_bytes(self, shape):
        return 4 * math.prod(shape)

    def accepts(self, shape):
        return len(shape) == 2

    def encode_all(self, xs, states):
        return [(2 * x, state) for x, state in zip(xs, states, strict=True)]

    def add_to(self, total, packet, scale):
        return total + scale * packet / 2


class Summed(Together):
    """Sends matrices through an all-reduce, half of each; `encode_all`, `add_to` would raise."""

    is_reduced = True
    encode_all = add_to = None

    @staticmethod
    def reduced(leaves, axis_name):
        return [
            leaf._replace(
                direction=jax.lax.pmean(leaf.residual / 2, axis_name), residual=leaf.residual / 2
            )
            for leaf in leaves
        ]


@pytest.mark.parametrize(
    ("compressor", "share", "num_bytes"),
    [(Together(), 1.0, (4800, 4800)), (Summed(), 0.5, (0, 9600))],
)
def test_optional_methods_of_a_class_of_ones_own_are_called(compressor, share, num_bytes):
    """Also without BaseCompressor as the base."""
    shapes = {"w": (40, 30), "b": (1200,)}
    g = {k: normal(i, N, *shape) for i, (k, shape) in enumerate(shapes.items())}
    tx = exchange(compressor, min_size=100)
    state = stacked(tx.init({k: jnp.zeros(shape) for k, shape in shapes.items()}))
    direction, state = simulated(tx)(g, state)
    np.testing.assert_allclose(direction["w"][0], share * g["w"].mean(0), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(direction["b"][0], g["b"].mean(0), rtol=1e-5, atol=1e-6)
    kept = np.asarray(state.residual.value["w"]).reshape(g["w"].shape)
    np.testing.assert_allclose(kept, (1 - share) * g["w"], rtol=1e-6, atol=1e-6)
    assert isinstance(state.residual.value["b"], optax.MaskedNode)
    traffic = state.exchanged.traffic
    assert (traffic.gathered, traffic.reduced) == num_bytes


SENDING = [
    top_k(1 / 64, values="int2"),
    top_k(0.01),
    quantize(1),
    quantize(4, stochastic=True),
    power_sgd(2),
    Threshold(1.0),
]


@pytest.mark.parametrize(
    "compressor", suite(SENDING, top_k(1 / 64, values="int2"), quantize(1), power_sgd(2)), ids=repr
)
def test_bytes_on_the_network(compressor):
    """One all-gather of one worker's num_bytes, or two all-reduces of them; small leaves in one."""
    shapes = {"w": (64, 96), "v": (40, 50), "b": (30,), "c": (9,)}
    tx, params = exchange(compressor), {k: jnp.zeros(s) for k, s in shapes.items()}
    specs, mesh = state_specs(tx, params), data_mesh(N)
    run = jax.shard_map(
        lambda g, s: tx.update(jax.tree.map(lambda x: x[0], g), s),
        mesh=mesh,
        in_specs=(P("data"), specs),
        out_specs=(P(), specs),
        check_vma=False,
    )
    g = {k: jnp.zeros((N, *s)) for k, s in shapes.items()}
    text = jax.jit(run).lower(g, init_state(tx, params, mesh)).as_text()
    expected = sum(compressor.num_bytes(shapes[k]) for k in ("w", "v"))
    operands = lowered_collectives(text)
    flags, small = 8, 4 * 39
    if isinstance(compressor, Threshold):  # its codes are int8, its sizes float32
        assert sorted(operands["all_gather"]) == [8, expected - 8]
    elif compressor == power_sgd(2):
        assert "all_gather" not in operands and len(operands["all_reduce"]) == 4
        assert sum(operands["all_reduce"]) == expected + flags + small
        return
    else:
        assert operands["all_gather"] == [expected]
    assert sorted(operands["all_reduce"]) == [flags, small]


CALLS = [
    "exchange()",
    "exchange(top_k(0.05), error_feedback=0.95)",
    "exchange(top_k(0.015625, chunk=None, values='int2'), min_size=1)",
    "exchange({'table': None, '.*': quantize(1, chunk=512)})",
    "exchange(quantize(4, stochastic=True), error_feedback=0.0)",
    "chain(exchange(power_sgd(4), warmup_steps=100), adamw(0.001))",
]


@pytest.mark.parametrize("call", CALLS)
def test_a_repr_is_the_call(call):
    assert repr(eval(call, vars(optfn.distributed) | vars(optfn))) == call


def test_compressors_are_values():
    assert top_k(0.1) == top_k(0.1, chunk=4096) != top_k(0.2)
    assert len({quantize(1), quantize(1), quantize(bits=1), quantize(2)}) == 2
    assert quantize(4) != quantize(4, stochastic=True) != quantize(2, stochastic=True)
    assert power_sgd(2) == power_sgd(rank=2)


@pytest.mark.parametrize(
    ("make", "error", "match"),
    [
        (lambda: exchange(0.1), TypeError, r"compressor must be a compressor.*got 0\.1 of type fl"),
        (lambda: exchange(top_k), TypeError, "compressor must be a compressor such as top_k"),
        (lambda: exchange(Threshold), TypeError, "compressor must be a compressor"),
        (lambda: exchange({"w": 3}), TypeError, r"compressor\['w'\] must be a compressor"),
        (lambda: exchange({"(": None}), ValueError, r"compressor: '\(' is not a regular expr"),
        (lambda: exchange({3: None}), TypeError, "compressor: a pattern must be a regular"),
        (lambda: exchange(error_feedback=1.5), ValueError, r"error_feedback must be in \[0, 1\]"),
        (lambda: exchange(error_feedback="x"), TypeError, "error_feedback must be a number"),
        (lambda: exchange(axis_name=None), TypeError, "axis_name must be the name of a mesh axis"),
        (lambda: exchange(min_size=0), ValueError, "min_size must be >= 1; got 0"),
        (lambda: exchange(param_attrs=3), TypeError, "param_attrs must be a mapping"),
        (lambda: exchange(warmup_steps=-1), ValueError, "warmup_steps must be >= 0; got -1"),
        (lambda: exchange(top_k(0.1), route="ring"), ValueError, "route must be one of 'gather'"),
        (lambda: exchange({"w": power_sgd(2)}, route="parts"), ValueError,
         'route="parts" compressor must be'),
        (lambda: exchange(power_sgd(2), route="parts"), ValueError,
         r"power_sgd\(2\) cannot: it needs whole matrices"),
        (lambda: top_k(0.0), ValueError, r"density must be in \(0, 1\]; got 0\.0"),
        (lambda: top_k(1.5), ValueError, "density"),
        (lambda: top_k("x"), TypeError, "density must be a Python number"),
        (lambda: top_k(jnp.float32(0.1)), TypeError, "density must be a Python number"),
        (lambda: top_k(0.1, chunk=0), ValueError, "chunk must be >= 1; got 0"),
        (lambda: top_k(0.1, values="int4"), ValueError, "values must be one of 'float32', 'bf"),
        (lambda: quantize(3), ValueError, "bits must be one of 8, 4, 2, 1; got 3"),
        (lambda: quantize(1.0), TypeError, "bits must be a Python integer"),
        (lambda: quantize(1, chunk=1.5), TypeError, "chunk must be a Python integer"),
        (lambda: quantize(1, stochastic=1), TypeError, "stochastic must be"),
        (lambda: power_sgd(0), ValueError, "rank must be >= 1; got 0"),
    ],
)  # fmt: skip
def test_bad_arguments(make, error, match):
    with pytest.raises(error, match=match):
        make()


def test_complex_leaves_are_refused():
    with pytest.raises(TypeError, match="exchange is not defined for complex leaves"):
        exchange(top_k(0.1)).init({"z": jnp.zeros(3, jnp.complex64)})
