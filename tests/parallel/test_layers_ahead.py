"""The leaves that a layer uses first are gathered a layer ahead, and the plan counts them."""

from types import SimpleNamespace
from unittest.mock import Mock

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from arrays import normal
from jax import lax
from jax.sharding import Mesh

import optfn
from benchmarks import wire
from optfn.compilers.options import has_gathers_ahead, has_one_collective
from optfn.distributed import data_mesh, plan_memory, scan_layers
from optfn.jaxprs import recomputed_scan
from optfn.jaxprs.first_gather import find_first_gathers
from optfn.jaxprs.sharded_param import ShardedParam
from optfn.parallel.scans import LeafShard

N, WIDTH = 8, 160
NAMES = ("a", "b", "c", "d", "e", "f", "g", "h")
FIRST = "c"


def layer(w, x):
    """A layer that uses leaf c before the others, which follow in their order."""
    for name in (FIRST, *(name for name in NAMES if name != FIRST)):
        x = jnp.tanh(x @ w[name])
    return x


def stack(layers):
    return {name: normal([3, i], layers, WIDTH, WIDTH, scale=0.2) for i, name in enumerate(NAMES)}


def loss(w, x):
    return jnp.mean(scan_layers(layer, w, x) ** 2)


def loss_in_reverse(w, x):
    body = jax.checkpoint(lambda x, w: (layer(w, x), None))
    return jnp.mean(lax.scan(body, x, w, reverse=True)[0] ** 2)


def loss_unrolled(w, x):
    body = jax.checkpoint(lambda x, w: (layer(w, x), None))
    return jnp.mean(lax.scan(body, x, w, unroll=2)[0] ** 2)


def loss_of_cast(w, x):
    half = jnp.bfloat16
    y = scan_layers(lambda w, x: layer(jax.tree.map(lambda w: w.astype(half), w), x), w, x)
    return jnp.mean(y.astype(jnp.float32) ** 2)


class Shard:
    """A whole array in place of a shard."""

    is_gathered_ahead = True
    is_sent_alone = False

    def __init__(self, array):
        self.array = array

    def gather(self, dtype=None):
        return self.array if dtype is None else self.array.astype(dtype)

    def divide_layers(self):
        return self

    def layer(self, array):
        return Shard(array)


jax.tree_util.register_pytree_node(Shard, lambda x: ((x.array,), None), lambda _, x: Shard(*x))


EIGHT = (8,) * 8


def find(use, widths=EIGHT):
    """Return positions and dtypes of the first gathers of use(params of a layer)."""
    stacks = [ShardedParam(Shard(jnp.zeros((2, 8, width)))) for width in widths]

    def run(operands):
        return [operands[0] + sum(jnp.sum(x) for x in use(operands[1:]))]

    return [gather[:2] for gather in find_first_gathers(run, [jnp.zeros(())], stacks)]


def test_the_first_gathers_are_found():
    half = jnp.bfloat16
    order = (2, 0, 1, *range(3, 8))
    assert find(lambda w: [w[i].gather() for i in order]) == [(2, None), (0, None)]
    order = (1, 0, *range(2, 8))
    assert find(lambda w: [w[i].shard.gather(half) for i in order]) == [(1, half), (0, half)]


@pytest.mark.parametrize(
    ("use", "widths", "count"),
    [
        (lambda w: [x.gather() for x in w], (8,) * 12, 2),
        (lambda w: [x.gather() for x in w], (8,) * 7, 1),  # two have more than a quarter
        (lambda w: [x.gather() for x in w], (9, 6, 6, 6, 6), 0),
        (lambda w: [x.gather() for x in w[:3]], EIGHT, 0),
        (
            lambda w: [w[0].gather(), w[0].shard.gather(jnp.bfloat16), *(x.gather() for x in w)],
            EIGHT,
            0,
        ),
        (lambda w: [w[0].shard.divide_layers().array, *(x.gather() for x in w)], EIGHT, 0),
        (
            lambda w: [w[0].gather(), w[1].shard.divide_layers().array, *(x.gather() for x in w)],
            EIGHT,
            1,
        ),
        (lambda w: [], (8,), 0),
    ],
    ids=["many", "two large", "large", "few", "two dtypes", "scanned", "second scanned", "none"],
)
def test_gathers_are_ahead_where_they_pay(use, widths, count):
    assert len(find(use, widths)) == count


def train(fn, layers, monkeypatch=None, **options):
    step = optfn.make_train_step(fn, optfn.sgd(0.1), mesh=data_mesh(N), shard="params", **options)
    if monkeypatch is not None:
        monkeypatch.setattr(recomputed_scan, "find_first_gathers", lambda *arguments: [])
    state = step.init(stack(layers))
    for i in range(2):
        state, metrics = step(state, normal(i, N, WIDTH))
    return jax.tree.map(np.asarray, state.params), float(metrics["loss"])


@pytest.mark.parametrize("layers", [1, 2, 3, 5])
@pytest.mark.parametrize("fn", [loss, loss_in_reverse, loss_of_cast])
def test_a_gather_ahead_changes_no_bit(fn, layers, monkeypatch):
    got = train(fn, layers)
    chex.assert_trees_all_equal(got, train(fn, layers, monkeypatch))


def test_a_barrier_ends_gathers_that_are_sent_alone(monkeypatch):
    """As on the TensorCore of a TPU: it changes no bit."""
    got, barriers = train(loss, 3), lowered(loss, 3).count("optimization_barrier")
    monkeypatch.setattr(LeafShard, "is_sent_alone", True)
    assert lowered(loss, 3).count("optimization_barrier") == barriers + 1
    chex.assert_trees_all_equal(train(loss, 3), got)


@pytest.mark.parametrize(
    ("platform", "kind", "is_ahead", "is_alone"),
    [
        ("gpu", "NVIDIA H100", True, False),
        ("tpu", "TPU v5 lite", True, True),
        ("tpu", "TPU v5", False, True),
        ("tpu", "TPU v4", False, True),
    ],
)
def test_chips_that_gather_ahead(platform, kind, is_ahead, is_alone):
    device = SimpleNamespace(platform=platform, device_kind=kind)
    mesh = Mock(spec=Mesh, devices=np.array([device]))
    assert (has_gathers_ahead(mesh), has_one_collective(mesh)) == (is_ahead, is_alone)


@pytest.mark.optimized
@pytest.mark.parametrize("layers", [2, 3, 5])
@pytest.mark.parametrize("fn", [loss, loss_in_reverse, loss_of_cast])
@pytest.mark.parametrize("microbatches", [1, 2])
def test_the_plan_is_what_a_gather_ahead_sends(fn, layers, microbatches):
    options = {"shard": "params", "microbatches": microbatches}
    step = optfn.make_train_step(fn, optfn.sgd(0.1), mesh=data_mesh(N), **options)
    x = normal(0, 2 * N, WIDTH)
    sent = wire.bytes_sent(step.lower(stack(layers), x).compile(), N)
    arguments = options | {"loss_fn": fn, "batch": x[:2]}
    plan = plan_memory(optfn.sgd(0.1), stack(layers), data_mesh(N), **arguments)
    assert plan.sent == pytest.approx(sent, rel=1e-3)


def test_the_leaves_ahead_are_gathered_before_the_loop():
    """They have a gather before the loop, and all leaves have one in each loop."""
    assert count_gathers(loss, 5) == 2 + len(NAMES) + len(NAMES)


def test_an_unrolled_scan_gathers_no_leaf_ahead(monkeypatch):
    """XLA gathers layers of one iteration together, and would leave out the last gather ahead."""
    count = count_gathers(loss_unrolled, 4)
    monkeypatch.setattr(recomputed_scan, "find_first_gathers", lambda *arguments: [])
    assert count == count_gathers(loss_unrolled, 4)


def count_gathers(fn, layers):
    return lowered(fn, layers).count("all_gather_dim")


def lowered(fn, layers):
    step = optfn.make_train_step(fn, optfn.sgd(0.1), mesh=data_mesh(N), shard="params")
    return step.lower(stack(layers), normal(0, N, WIDTH)).as_text()
