"""A pipeline whose weights are divided over further axes, tensor parallel or data."""

import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from grids import nightly
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from problems import mean_square

from optfn.distributed import copy_to, pipeline_value_and_grad, sum_over

RNG = np.random.default_rng(0)
WIDTH, HIDDEN, STAGES = 8, 16, 2
X, Y = (RNG.normal(size=(16, WIDTH)).astype(np.float32) for _ in range(2))
SPECS = {"in": P("data", "model"), "out": P("model", "data"), "scale": P()}


def stacked(stages):
    rng = np.random.default_rng(1)
    shapes = {"in": (WIDTH, HIDDEN), "out": (HIDDEN, WIDTH)}
    params = {k: 0.3 * rng.normal(size=(stages, *s)).astype(np.float32) for k, s in shapes.items()}
    return params | {"scale": np.ones((stages, WIDTH), np.float32)}


def whole_stage(params, x):
    return x * params["scale"] + jnp.tanh(x @ params["in"]) @ params["out"]


def divided_stage(params, x):
    hidden = jnp.tanh(copy_to(x, "model") @ params["in"])
    return x * params["scale"] + sum_over(hidden @ params["out"], "model")


def mesh_of(explicit=False):
    kind = AxisType.Explicit if explicit else AxisType.Auto
    devices = np.array(jax.devices()[:8]).reshape(2, 2, 2)
    return Mesh(devices, ("stage", "data", "model"), axis_types=(kind,) * 3)


def on_one_device(params, batch):
    x, target = batch
    for s in range(len(params["in"])):
        x = whole_stage(jax.tree.map(lambda w, s=s: w[s], params), x)
    return mean_square(x, target)


def make(mesh, specs=SPECS, **options):
    return pipeline_value_and_grad(
        divided_stage, mean_square, mesh=mesh, num_microbatches=4, data_axis="data",
        param_specs=specs, **options,
    )  # fmt: skip


def placed(params, mesh, specs=SPECS):
    return {
        k: jax.device_put(x, NamedSharding(mesh, P("stage", *specs[k]))) for k, x in params.items()
    }


@pytest.mark.parametrize(
    ("schedule", "virtual", "explicit"),
    [("zb", 1, False), ("1f1b", 1, True), nightly("1f1b", 2, False)],
)
def test_loss_and_gradients_are_those_of_one_device(schedule, virtual, explicit):
    mesh, params = mesh_of(explicit), stacked(STAGES * virtual)
    f = make(mesh, schedule=schedule, virtual_stages=virtual)
    given = placed(params, mesh) if virtual == 1 else params
    loss, grads = f(given, X, Y)
    want, expected = jax.jit(jax.value_and_grad(on_one_device))(params, (X, Y))
    np.testing.assert_allclose(loss, want, rtol=1e-6)
    chex.assert_trees_all_close(
        jax.device_get(grads), jax.device_get(expected), rtol=1e-4, atol=1e-6
    )
    if virtual == 1:
        assert grads["in"].addressable_shards[0].data.shape == (1, WIDTH // 2, HIDDEN // 2)


@pytest.mark.optimized
def test_nothing_is_gathered_inside_the_loops():
    mesh = mesh_of()
    f = jax.jit(make(mesh))
    text = f.lower(placed(stacked(STAGES), mesh), X, Y).compile().as_text()
    bodies = re.findall(r"^%?\S*(?:body|region)\S* .*?^}", text, re.MULTILINE | re.DOTALL)
    assert any("collective-permute" in body for body in bodies)
    assert not any(re.search(r"all-gather|reduce-scatter", body) for body in bodies)
    assert len(re.findall(r" all-gather(?:-start)?\(", text)) >= 1
    assert len(re.findall(r" reduce-scatter(?:-start)?\(", text)) >= 1


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"specs": {"in": P("stage")}}, ValueError,
         "'stage' at 'in' must be an axis of the mesh other"),
        ({"specs": {"in": P("x")}}, ValueError, "'x' at 'in' must be an axis of the mesh other"),
        ({"specs": {"in": "model"}}, TypeError, "must consist of PartitionSpecs; got 'model'"),
    ],
)  # fmt: skip
def test_bad_specs(options, error, words):
    with pytest.raises(error, match=words):
        make(mesh_of(), **options)


def test_specs_that_do_not_fit_params():
    params = stacked(STAGES)
    for specs, words in (
        ({"in": P(), "out": P()}, "param_specs must be a tree of PartitionSpecs like"),
        (SPECS | {"scale": P(None, "model")}, r"has more entries than leaf 'scale'.*\(8,\)"),
    ):
        with pytest.raises(ValueError, match=words):
            make(mesh_of(), specs)(params, X, Y)
    narrow = {"in": params["in"][..., :3], "out": params["out"][:, :3], "scale": params["scale"]}
    words = r"of a stage: dimension 1 of leaf 'in', which has shape \(8, 3\), .* the 2 devices"
    with pytest.raises(ValueError, match=words):
        make(mesh_of())(narrow, X, Y)


# Heterogeneous stages: a list of functions, of other shapes and other leaves.

WIDE = 12
UNLIKE = [
    {"in": RNG.normal(size=(WIDTH, HIDDEN)), "out": RNG.normal(size=(HIDDEN, WIDE))},
    {"up": RNG.normal(size=(WIDE, WIDTH)), "bias": RNG.normal(size=WIDTH), "step": 3},
]
UNLIKE = jax.tree.map(lambda x: np.asarray(x, np.float32) * np.float32(0.3), UNLIKE)
UNLIKE[1]["step"] = np.int32(3)
UNLIKE_SPECS = [
    {"in": P("data", "model"), "out": P("model")},
    {"up": P(None, ("model", "data")), "bias": P("model"), "step": P()},
]


def first(params, x):
    return sum_over(jnp.tanh(copy_to(x, "model") @ params["in"]) @ params["out"], "model")


def second(params, x):
    part = jnp.tanh(copy_to(x, "model") @ params["up"] + params["bias"])
    own = jax.lax.axis_index("model") * part.shape[-1]
    whole = jnp.zeros((*part.shape[:-1], WIDTH), part.dtype)
    whole = jax.lax.dynamic_update_slice_in_dim(whole, part, own, part.ndim - 1)
    return sum_over(whole, "model")


def unlike_on_one_device(params, batch):
    (a, b), (x, target) = params, batch
    return mean_square(jnp.tanh(jnp.tanh(x @ a["in"]) @ a["out"] @ b["up"] + b["bias"]), target)


def placed_list(mesh):
    pairs = zip(UNLIKE, UNLIKE_SPECS, strict=True)
    return [
        {k: jax.device_put(x, NamedSharding(mesh, specs[k])) for k, x in params.items()}
        for params, specs in pairs
    ]


def make_unlike(mesh, specs=UNLIKE_SPECS, **options):
    return pipeline_value_and_grad(
        [first, second], mean_square, mesh=mesh, num_microbatches=4, data_axis="data",
        param_specs=specs, **options,
    )  # fmt: skip


@pytest.mark.parametrize(("schedule", "explicit"), [nightly("1f1b", False), ("zb", True)])
def test_heterogeneous_stages_keep_their_axes(schedule, explicit):
    mesh = mesh_of(explicit)
    loss, grads = make_unlike(mesh, schedule=schedule)(placed_list(mesh), X, Y)
    gradient = jax.jit(jax.value_and_grad(unlike_on_one_device, allow_int=True))
    want, expected = gradient(UNLIKE, (X, Y))
    np.testing.assert_allclose(loss, want, rtol=1e-6)
    for found, right, specs in zip(grads, expected, UNLIKE_SPECS, strict=True):
        assert found.keys() == right.keys()
        for name in found.keys() - {"step"}:
            np.testing.assert_allclose(found[name], right[name], rtol=1e-4, atol=1e-6)
            assert found[name].sharding.is_equivalent_to(
                NamedSharding(mesh, specs[name]), right[name].ndim
            )


def test_specs_that_do_not_fit_a_list():
    with pytest.raises(ValueError, match="param_specs must be a tree of PartitionSpecs like"):
        make_unlike(mesh_of(), UNLIKE_SPECS[:1])(UNLIKE, X, Y)
    specs = [UNLIKE_SPECS[0], UNLIKE_SPECS[1] | {"bias": P("model", "data")}]
    with pytest.raises(ValueError, match=r"has more entries than leaf '1/bias'.*\(8,\)"):
        make_unlike(mesh_of(), specs)(UNLIKE, X, Y)
