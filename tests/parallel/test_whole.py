"""Work divided by matrix: each device keeps and updates some of the layers, whole matrices."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import optfn
from benchmarks import wire
from optfn.distributed import data_mesh, plan_memory, scan_layers, sharded

RNG = np.random.default_rng(0)
MATRICES = "layers/(in|out)"


def model(layers=8, width=16):
    def normal(*shape):
        return (RNG.normal(size=shape) / np.sqrt(shape[-2])).astype(np.float32)

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


def gathered(params, x):
    """The same loss, whose layers are all gathered before."""
    x = x @ params["embed"]
    layers = params["layers"].layers
    return jnp.mean(jax.lax.scan(lambda x, p: (layer(p, x), None), x, layers)[0] ** 2)


def muon(**options):
    return optfn.muon(
        0.02,
        matrices=MATRICES,
        others=optfn.adamw(1e-3),
        weight_decay=0.1,
        grad_clip=optfn.clip_by_global_norm(0.1),
        **options,
    )


def run(step, params, batches):
    state = step.init(params)
    for x in batches:
        state, _ = step(state, x)
    return state


def away(found, alone):
    """Return the largest difference of two elements."""

    def of(a, b):
        return np.abs(np.asarray(a) - np.asarray(b)).max()

    return max(jax.tree.leaves(jax.tree.map(of, found, alone)))


RULES = {
    "muon": muon,
    "lamb": lambda: optfn.lamb(0.01, grad_clip=optfn.clip_by_global_norm(0.1)),
    "lars": lambda: optfn.lars(0.1, 0.9, param_attrs={"embed": optfn.ParamAttr(trainable=False)}),
}
BATCHES = RNG.normal(size=(4, 16, 32)).astype(np.float32)


@pytest.mark.parametrize("kind", ["state", "params"])
@pytest.mark.parametrize("rule", RULES)
def test_the_trajectory_is_that_of_one_device(rule, kind):
    params, tx = model(), RULES[rule]()
    alone = run(optfn.make_train_step(scanned, tx), params, BATCHES)
    step = optfn.make_train_step(
        scanned, tx, mesh=data_mesh(4), shard=sharded(kind, whole=MATRICES)
    )
    state = run(step, params, BATCHES)
    assert away(state.params, alone.params) <= 1e-6 < 1e-2 < away(alone.params, params)
    assert step.compiled._cache_size() == 1


def linear(params, x):
    """A loss whose gradients cost next to nothing."""
    return sum(jnp.mean(p * x.mean()) for p in jax.tree.leaves(params))


def compiled(tx, params, loss=linear, x=BATCHES[0], **options):
    step = optfn.make_train_step(loss, tx, **options)
    return step.compiled.lower(step.init(params), x).compile()


def num_bytes(params):
    return sum(p.nbytes for p in jax.tree.leaves(params))


def zero_1(params, devices):
    return 2 * (devices - 1) / devices * num_bytes(params)


@pytest.mark.optimized
@pytest.mark.parametrize("kind", ["state", "params"])
@pytest.mark.parametrize("devices", [2, 4, 8])
def test_a_device_computes_and_sends_its_part(devices, kind):
    params, tx = model(width=64), muon()
    alone = compiled(tx, params).cost_analysis()["flops"]
    options = {"mesh": data_mesh(devices), "shard": sharded(kind, whole=MATRICES)}
    found = compiled(tx, params, **options)
    assert found.cost_analysis()["flops"] <= 1.05 / devices * alone
    assert wire.bytes_sent(found, devices) <= 1.01 * zero_1(params, devices)


@pytest.mark.optimized
@pytest.mark.parametrize("microbatches", [1, 2])
@pytest.mark.parametrize("kind", ["state", "params"])
def test_the_plan_is_what_the_compiled_step_sends(kind, microbatches):
    params, tx, mesh = model(width=64), muon(), data_mesh(4)
    options = {"shard": sharded(kind, whole=MATRICES), "microbatches": microbatches}
    found = compiled(tx, params, scanned, mesh=mesh, **options)
    plan = plan_memory(tx, params, mesh, **options)
    assert plan.sent == pytest.approx(wire.bytes_sent(found, 4), rel=0.01)
    assert plan.gathered_in_update == ()


@pytest.mark.optimized
@pytest.mark.parametrize("kind", ["state", "params"])
def test_a_plan_says_for_which_leaves_it_is_a_lower_bound(kind):
    params, mesh = model(width=64), data_mesh(4)
    plan = plan_memory(muon(), params, mesh, shard=kind)
    assert plan.gathered_in_update == ("layers/in", "layers/out")
    found = compiled(muon(), params, scanned, mesh=mesh, shard=kind)
    assert wire.bytes_sent(found, 4) > 3 * plan.sent
    for tx, shard in ((muon(), None), (optfn.lamb(0.01), kind)):
        plan = plan_memory(tx, params, mesh, shard=shard)
        found = compiled(tx, params, scanned, mesh=mesh, shard=shard)
        assert plan.gathered_in_update == ()
        assert plan.sent == pytest.approx(wire.bytes_sent(found, 4), rel=0.01)


def test_each_device_keeps_whole_matrices():
    step = optfn.make_train_step(
        scanned, muon(), mesh=data_mesh(4), shard=sharded("state", whole=MATRICES)
    )
    state = step.init(model())
    assert state.params["layers"]["in"].sharding.is_fully_replicated
    velocities = [
        x for x in jax.tree.leaves(state.opt_state) if x.shape in ((8, 16, 32), (8, 32, 16))
    ]
    assert len(velocities) == 2
    for x in velocities:
        assert x.addressable_shards[0].data.shape == (2, *x.shape[1:])


OF_LIST = {"layers": [{"in": np.ones((16, 16), np.float32)}] * 4}


@pytest.mark.parametrize(
    ("params", "pattern", "words"),
    [
        (OF_LIST, "layers/.*", "'layers/0/in' of shape .16, 16., which is not stacked.*Stacked"),
        (None, "layers/b", "'layers/b' of shape .8, 16., which has 1 axes beside the 1 stacked"),
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
    with pytest.raises(ValueError, match=r'whole needs the kind "state" or "params".*got \{'):
        sharded({"layers/in": P(None, "data")}, whole=MATRICES)
    with pytest.raises(ValueError, match=r"whole needs the kind.*got None"):
        sharded(None, whole=MATRICES)
    with pytest.raises(TypeError, match="sharded: whole must be a regular expression"):
        sharded("state", whole=3)
    shard = sharded("state", whole=MATRICES)
    options = {"mesh": data_mesh(4), "shard": shard}
    with pytest.raises(ValueError, match=r"whole=\) cannot be with packed=True"):
        optfn.make_train_step(scanned, muon(), packed=True, **options)
    step = optfn.make_train_step(scanned, optfn.sgd(0.1), tables="layers/in", **options)
    with pytest.raises(ValueError, match=r"'layers/in' .* a table, whose rows are divided"):
        step.init(model())
