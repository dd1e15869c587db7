"""Work divided by matrix: each device keeps and updates some of the layers, whole matrices."""

import itertools
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from grids import nightly, suite
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from problems import state_after

import optfn
from benchmarks import wire
from optfn.distributed import data_mesh, plan_memory, scan_layers, sharded

RNG = np.random.default_rng(0)
MATRICES = "layers/(in|out)"


def model(layers=8, width=16):
    rng = np.random.default_rng(1)

    def normal(*shape):
        return (rng.normal(size=shape) / np.sqrt(shape[-2])).astype(np.float32)

    return {
        "embed": normal(32, width),
        "layers": optfn.Stacked(
            {
                "in": normal(layers, width, 2 * width),
                "out": normal(layers, 2 * width, width),
                "b": np.zeros((layers, width), np.float32),
            }
        ),
    }


def layer(params, x):
    return x + jnp.tanh(x @ params["in"]) @ params["out"] + params["b"]


def scanned(params, x):
    return jnp.mean(scan_layers(layer, params["layers"], x @ params["embed"]) ** 2)


def muon(**options):
    return optfn.muon(
        0.02,
        matrices=MATRICES,
        others=optfn.adamw(1e-3),
        weight_decay=0.1,
        grad_clip=optfn.clip_by_global_norm(0.1),
        **options,
    )


def run(step, params):
    return state_after(step, step.init(params), BATCHES)


def away(found, alone):
    """Return the largest difference of two elements."""

    def of(a, b):
        return np.abs(np.asarray(a) - np.asarray(b)).max()

    return max(jax.tree.leaves(jax.tree.map(of, found, alone)))


class SoapState(NamedTuple):
    left: Any
    right: Any
    m: Any
    v: Any


def soap(rate=0.01):
    """A small SOAP: Adam in the bases of the eigenvectors of Σ g·gᵀ and Σ gᵀ·g, by one QR each."""

    def of_matrices(fn, *trees):
        return jax.tree.map(
            lambda *x: jax.vmap(fn)(*x) if x[0].ndim == 3 else jnp.stack(x)[0], *trees
        )

    def init(params):
        eyes = [of_matrices(lambda p, axis=axis: jnp.eye(p.shape[axis]), params) for axis in (0, 1)]
        return SoapState(*eyes, *[jax.tree.map(jnp.zeros_like, params)] * 2)

    def basis(q, gram):
        return jnp.linalg.qr(0.5 * q + gram @ q)[0]

    def update(updates, state, params=None):
        left = of_matrices(lambda q, g: basis(q, g @ g.T), state.left, updates)
        right = of_matrices(lambda q, g: basis(q, g.T @ g), state.right, updates)
        turned = of_matrices(lambda g, a, b: a.T @ g @ b, updates, left, right)
        m = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, state.m, turned)
        v = jax.tree.map(lambda v, g: 0.9 * v + 0.1 * g**2, state.v, turned)
        direction = jax.tree.map(lambda m, v: m / (jnp.sqrt(v) + 1e-3), m, v)
        back = of_matrices(lambda u, a, b: a @ u @ b.T, direction, left, right)
        return jax.tree.map(lambda u: -rate * u, back), SoapState(left, right, m, v)

    return optax.GradientTransformation(init, update)


BATCHES = RNG.normal(size=(3, 16, 32)).astype(np.float32)


def in_lists(tx):
    """Keep the state of soap as a list of arrays for each leaf, as Kron of psgd-jax does."""

    def init(params):
        return {"factors": jax.tree.map(lambda *x: [*x], *tx.init(params))}

    def update(updates, state, params=None):
        each, four = jax.tree.structure(updates), jax.tree.structure([0] * 4)
        before = SoapState(*jax.tree.transpose(each, four, state["factors"]))
        updates, after = tx.update(updates, before, params)
        return updates, {"factors": jax.tree.map(lambda *x: [*x], *after)}

    return optax.GradientTransformation(init, update)


PADDED = sharded("state", whole=MATRICES)  # 6 layers on 4 devices are padded to 8


def test_a_list_of_arrays_for_each_leaf_is_padded_and_divided_as_the_leaf_is():
    """So preconditioners, which have other shapes than their layers, lie with them."""
    params, tx = model(6), in_lists(soap())
    alone = run(optfn.make_train_step(scanned, tx), params)
    state = run(optfn.make_train_step(scanned, tx, mesh=data_mesh(4), shard=PADDED), params)
    assert away(state.params, alone.params) <= 1e-6 < 1e-2 < away(alone.params, params)
    factors = state.opt_state["factors"]["layers"].layers
    for name, (rows, columns) in {"in": (16, 32), "out": (32, 16)}.items():
        shapes = [(rows, rows), (columns, columns), *[(rows, columns)] * 2]
        arrays = jax.tree.leaves(factors[name])
        assert [x.shape for x in arrays] == [(8, *shape) for shape in shapes]
        parts = [x.addressable_shards[0].data.shape for x in arrays]
        assert parts == [(2, *shape) for shape in shapes]
    assert [x.shape for x in factors["b"]] == [(6, 16)] * 4


@pytest.mark.parametrize("kind", ["state", nightly("params")])
def test_padding_is_seen_by_no_one(kind):
    """In names, shapes and numbers the state is that of one device."""
    tx = optfn.chain(muon(), optfn.exponential_moving_average(0.9))
    alone = run(optfn.make_train_step(scanned, tx), model(6))
    shard = sharded(kind, whole=MATRICES)
    state = run(optfn.make_train_step(scanned, tx, mesh=data_mesh(4), shard=shard), model(6))
    held = [x.shape[0] for x in jax.tree.leaves(state.opt_state) if x.ndim == 3]
    assert held == [8] * 4  # velocities and averages
    assert away(state.params, alone.params) <= 1e-6
    want, found = optfn.state_dict(alone.opt_state), optfn.state_dict(state.opt_state)
    assert list(found) == list(want)
    for name, x in want.items():
        np.testing.assert_allclose(found[name], x, atol=1e-6)
    want = optfn.averaged_params(alone.opt_state, alone.params)
    assert away(optfn.averaged_params(state.opt_state, state.params), want) <= 1e-6


@pytest.mark.parametrize("options", [nightly({}), {"mesh": data_mesh(2), "shard": "state"}])
def test_a_padded_state_loads_on_other_devices_and_back(options):
    tx = muon(moment_dtype="int8")
    padded = optfn.make_train_step(scanned, tx, mesh=data_mesh(4), shard=PADDED)
    other = optfn.make_train_step(scanned, tx, **options)
    state = run(padded, model(6))
    saved = optfn.state_dict(state.opt_state)
    moved = optfn.load_state_dict(other.init(model(6)).opt_state, saved)
    back = optfn.load_state_dict(padded.init(model(6)).opt_state, optfn.state_dict(moved))
    chex.assert_trees_all_equal(jax.device_get(back), jax.device_get(state.opt_state))
    for a, b in zip(jax.tree.leaves(back), jax.tree.leaves(state.opt_state), strict=True):
        assert a.sharding == b.sharding


def linear(params, x):
    """A loss whose gradients cost next to nothing."""
    return sum(jnp.mean(p * x.mean()) for p in jax.tree.leaves(params))


def compiled(tx, params, loss=linear, x=BATCHES[0], **options):
    step = optfn.make_train_step(loss, tx, **options)
    return step.compiled.lower(step.init(params), x).compile()


@pytest.mark.optimized
@pytest.mark.parametrize(
    ("layers", "devices", "kind"),
    suite(
        [*itertools.product([8], [4, 2, 8], ["state", "params"]), (6, 4, "state"), (7, 2, "state")],
        (8, 4, "state"),
    ),
)
def test_a_device_computes_and_sends_its_part(layers, devices, kind):
    """Padding costs no more than its share."""
    params, tx = model(layers, width=64), muon()
    share = -(-layers // devices) * devices / layers
    alone = compiled(tx, params).cost_analysis()["flops"]
    options = {"mesh": data_mesh(devices), "shard": sharded(kind, whole=MATRICES)}
    found = compiled(tx, params, **options)
    assert found.cost_analysis()["flops"] <= 1.05 * share / devices * alone
    of_zero_1 = 2 * (devices - 1) / devices * sum(p.nbytes for p in jax.tree.leaves(params))
    assert wire.bytes_sent(found, devices) <= 1.01 * share * of_zero_1


@pytest.mark.optimized
@pytest.mark.parametrize(
    ("layers", "microbatches", "kind"),
    suite(itertools.product([8, 6], [1, 2], ["state", "params"]), (6, 2, "state")),
)
def test_the_plan_is_what_the_compiled_step_holds_and_sends(kind, microbatches, layers):
    params, tx, mesh = model(layers, width=64), muon(), data_mesh(4)
    options = {"shard": sharded(kind, whole=MATRICES), "microbatches": microbatches}
    step = optfn.make_train_step(scanned, tx, mesh=mesh, **options)
    state = step.init(params)
    found = step.compiled.lower(state, BATCHES[0]).compile()
    plan = plan_memory(tx, params, mesh, **options)
    sent = wire.bytes_sent(found, 4)
    if (kind, microbatches, layers) == ("params", 2, 8):
        # XLA divides each layer once, in front of the loop over microbatches: the plan counts the
        # all-to-all in each of its two turns.
        moved = [x for name, x in params["layers"].layers.items() if name in ("in", "out")]
        sent += 3 / 4 / 4 * sum(x.nbytes for x in moved)
    assert plan.sent == pytest.approx(sent, rel=0.01)
    held = [
        sum(x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(part))
        for part in (state.params, state.opt_state)
    ]
    assert [plan.params, plan.state] == held
    table = optfn.summary(tx, params, mesh=mesh, shard=options["shard"])
    assert table.splitlines()[-1].endswith(f" {sum(held):,}")
    assert plan.gathered_in_update == ()


MATRIX_SHAPES = {"wide": (64, 128), "tall": (128, 64), "square": (64, 64)}


@pytest.mark.optimized
@pytest.mark.parametrize("kind", ["state", nightly("params")])
def test_a_plan_counts_what_products_of_the_update_send(kind):
    mesh = data_mesh(4)
    params = {name: np.ones(shape, np.float32) for name, shape in MATRIX_SHAPES.items()}

    def loss_fn(params, x):
        return sum(jnp.sum(p) for p in params.values()) * jnp.mean(x)

    for tx, gathered in ((optfn.muon(0.02), tuple(MATRIX_SHAPES)), (optfn.lamb(0.01), ())):
        plan = plan_memory(tx, params, mesh, shard=kind)
        step = optfn.make_train_step(loss_fn, tx, mesh=mesh, shard=kind)
        found = step.lower(params, np.ones(4, np.float32)).compile()
        assert set(plan.gathered_in_update) == set(gathered)
        assert plan.sent == pytest.approx(wire.bytes_sent(found, 4), rel=0.01)


OF_LIST = {"layers": [{"in": np.ones((16, 16), np.float32)}] * 4}


@pytest.mark.parametrize(
    ("params", "pattern", "words"),
    [
        (OF_LIST, "layers/.*", "'layers/0/in' of shape .16, 16., which is not stacked.*Stacked"),
        (None, "layers/b", "'layers/b' of shape .8, 16., which has 1 axes besides the 1 stacked"),
        (None, "layer", "whole: the pattern 'layer' matches no leaf"),
        (None, "embed", "'embed' of shape .32, 16., which is not stacked"),
    ],
)
def test_leaves_that_are_no_stacks_of_matrices_are_named(params, pattern, words):
    step = optfn.make_train_step(
        scanned, optfn.lamb(0.1), mesh=data_mesh(4), shard=sharded("state", whole=pattern)
    )
    with pytest.raises(ValueError, match=words):
        step.init(params or model())


def test_whole_with_what_it_cannot_be_with():
    with pytest.raises(ValueError, match=r'whole= needs the kind "state" or "params".*got \{'):
        sharded({"layers/in": P(None, "data")}, whole=MATRICES)
    with pytest.raises(ValueError, match=r"whole= needs the kind.*got None"):
        sharded(None, whole=MATRICES)
    with pytest.raises(TypeError, match="sharded: whole must be a regular expression"):
        sharded("state", whole=3)
    options = {"mesh": data_mesh(4), "shard": PADDED}
    with pytest.raises(ValueError, match=r"whole=\) cannot be combined with packed=True"):
        optfn.make_train_step(scanned, muon(), packed=True, **options)
    step = optfn.make_train_step(scanned, optfn.sgd(0.1), tables="layers/in", **options)
    with pytest.raises(ValueError, match=r"'layers/in' .* a table, whose rows are divided"):
        step.init(model())


def test_workers_apart_take_no_padding():
    mesh = Mesh(np.array(jax.devices()[:8]).reshape(2, 4), ("slow", "fast"))
    shard = sharded("state", axis="fast", whole=MATRICES)
    options = {"mesh": mesh, "data_axis": ("slow", "fast"), "shard": shard, "local_steps": 2}
    step = optfn.make_train_step(scanned, muon(), **options)
    with pytest.raises(
        ValueError, match="the 6 layers of leaf 'layers/in' must be divisible by the 4"
    ):
        step.init(model(6))
    alone = optfn.make_train_step(scanned, muon(), mesh=data_mesh(2), local_steps=2)
    state, want = run(step, model()), run(alone, model())
    assert away(state.params, want.params) <= 1e-6
