"""FLOPs of a step's model, by hand and from its equations, whatever trains it."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import Mesh

import optfn
from optfn.distributed import data_mesh, scan_layers, sharded
from optfn.loss.jaxprs.flops import UncountableError, count_model_flops
from optfn.run.speed import count_step_flops

BATCH, LENGTH, WIDTH, LAYERS, WORDS = 8, 16, 32, 3, 64
SHAPES = {"qkv": (WIDTH, 3 * WIDTH), "out": (WIDTH, WIDTH), "up": (WIDTH, 4 * WIDTH),
          "down": (4 * WIDTH, WIDTH)}  # fmt: skip
RNG = np.random.default_rng(0)
BATCH_OF_TOKENS = RNG.integers(WORDS, size=(BATCH, LENGTH))


def normal(*shape):
    return jnp.asarray(RNG.normal(size=shape) / 8, jnp.float32)


PARAMS = {
    "layers": {name: normal(LAYERS, *shape) for name, shape in SHAPES.items()},
    "embedding": normal(WORDS, WIDTH),
    "head": normal(WIDTH, WORDS),
}


def layer(w, x):
    q, k, v = (y.reshape(*y.shape[:2], 4, -1) for y in jnp.split(x @ w["qkv"], 3, -1))
    scores = jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", q, k))
    x = x + jnp.einsum("bhqk,bkhd->bqhd", scores, v).reshape(x.shape) @ w["out"]
    return x + jax.nn.gelu(x @ w["up"]) @ w["down"]


def transformer(params, tokens, layer=layer):
    x = params["embedding"][tokens]
    x = scan_layers(layer, params["layers"], x)
    return jnp.mean(checkpoint_name(x, "last") @ params["head"])


def flops_of_transformer():
    """Three products of each weight and of both products of attention: forward, and two back."""
    tokens = BATCH * LENGTH
    weights = LAYERS * (3 + 1 + 4 + 4) * WIDTH**2 + WIDTH * WORDS
    return 3 * (2 * tokens * weights + LAYERS * 4 * tokens * LENGTH * WIDTH)


TWO_LEVELS = Mesh(np.reshape(jax.devices()[:4], (2, 2)), ("data", "fast"))
WAYS = {
    "one device": {},
    "FSDP": {"mesh": 8, "shard": "params"},
    "two levels": {
        "mesh": TWO_LEVELS,
        "data_axis": TWO_LEVELS.axis_names,
        "shard": sharded("params", axis="fast"),
    },
    "the compiler": {"mesh": 8, "shard": "params", "partitioner": "compiler"},
    "microbatches": {"microbatches": 4},
    "recomputed layers": {"loss": functools.partial(transformer, layer=jax.checkpoint(layer))},
    "recomputed names": {"recompute": ("last",)},
    "an optimizer with products": {"tx": optfn.muon(0.1)},
    "local steps": {"mesh": 2, "local_steps": 4},
}


@pytest.mark.parametrize("way", WAYS)
def test_a_scanned_transformer_has_the_same_flops_everywhere(way):
    options = dict(WAYS[way])
    loss, tx = options.pop("loss", transformer), options.pop("tx", optfn.sgd(0.1))
    if isinstance(devices := options.get("mesh"), int):
        options["mesh"] = data_mesh(devices)
    step = optfn.make_train_step(loss, tx, **options)
    state = step.init(PARAMS)
    assert count_step_flops(step, state, BATCH_OF_TOKENS) == flops_of_transformer()


def mlp(params, x):
    return jnp.mean(jax.nn.relu(x @ params[0]) @ params[1])


def test_a_perceptron_has_five_products():
    """The data needs no gradient."""
    step = optfn.make_train_step(mlp, optfn.adam(1e-3))
    state = step.init((normal(16, 32), normal(32, 8)))
    assert count_step_flops(step, state, np.ones((4, 16), np.float32)) == (
        2 * 2 * 4 * 16 * 32 + 3 * 2 * 4 * 32 * 8
    )


def test_nothing_is_traced_again():
    traced = []

    def loss(params, x):
        traced.append(1)
        return mlp(params, x)

    step = optfn.make_train_step(loss, optfn.adam(1e-3))
    x = np.ones((4, 16), np.float32)
    state, _ = step(step.init((normal(16, 32), normal(32, 8))), x)
    before = len(traced)
    assert count_step_flops(step, state, x) and len(traced) == before


def test_the_flops_of_a_value_and_grad_are_not_known():
    """A pipeline computes in its bubbles."""
    step = optfn.make_train_step(None, optfn.sgd(0.1), value_and_grad=jax.value_and_grad(mlp))
    state = step.init((normal(16, 32), normal(32, 8)))
    assert count_step_flops(step, state, np.ones((4, 16), np.float32)) is None


def count(fn, *shapes):
    shapes = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    return count_model_flops(jax.make_jaxpr(fn)(*shapes).jaxpr, "optimizer_update")


def convolve(x, kernel, **options):
    return lax.conv_general_dilated(
        x, kernel, padding="VALID", dimension_numbers=("NHWC", "HWIO", "NHWC"), **options
    )


IMAGES, KERNEL = (2, 9, 9, 4), (3, 3, 4, 8)
FORWARD = 2 * 2 * 4 * 4 * 9 * 4 * 8  # 4 × 4 places of a kernel of 9


def test_both_gradients_of_a_strided_convolution_cost_what_the_convolution_does():
    stride = functools.partial(convolve, window_strides=(2, 2))
    assert count(stride, IMAGES, KERNEL) == FORWARD
    loss = jax.grad(lambda x, kernel: jnp.sum(stride(x, kernel) ** 2), (0, 1))
    assert count(loss, IMAGES, KERNEL) == 3 * FORWARD


def test_groups_divide_the_channels():
    grouped = functools.partial(convolve, window_strides=(2, 2), feature_group_count=4)
    assert count(grouped, IMAGES, (3, 3, 1, 8)) == FORWARD / 4
    loss = jax.grad(lambda x, kernel: jnp.sum(grouped(x, kernel) ** 2), (0, 1))
    assert count(loss, IMAGES, (3, 3, 1, 8)) == 3 * FORWARD / 4


def test_experts_cost_their_own_rows():
    def experts(x, w):
        return jnp.sum(lax.ragged_dot(x, w, jnp.array([3, 5])) ** 2)

    assert count(jax.grad(experts, (0, 1)), (8, 16), (2, 16, 32)) == 3 * 2 * 8 * 16 * 32


@pytest.mark.parametrize(
    "fn",
    [
        lambda x: lax.while_loop(lambda y: jnp.sum(y) < 9, lambda y: y @ y, x),
        lambda x: lax.cond(jnp.sum(x) > 0, lambda y: y @ y, lambda y: y, x),
    ],
    ids=["a loop", "a branch"],
)
def test_what_the_data_decides_has_no_flops(fn):
    with pytest.raises(UncountableError):
        count(fn, (4, 4))


def test_what_the_data_decides_may_have_no_products():
    def fn(x):
        x = lax.while_loop(lambda y: jnp.sum(y) < 9, lambda y: 2 * y, x)
        return lax.cond(jnp.sum(x) > 0, lambda y: y @ y, lambda y: y.T @ y, x)

    assert count(fn, (4, 4)) == 2 * 4**3
