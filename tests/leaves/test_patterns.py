"""Patterns that select leaves, and the one of those that people exempt from weight decay."""

import re
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import optfn
from optfn.leaves import patterns
from optfn.leaves.contents import leaves_with_names

nn = pytest.importorskip("flax.linen")
nnx = pytest.importorskip("flax.nnx")

CHOSEN = (
    "bias", "b", "scale", "layers/0/bias", "params/LayerNorm_0/scale", "blocks/norm1/weight",
    "ln_f/weight", "ln_1/scale", "model/layers/input_layernorm/weight", "h/0/ln_2/weight",
    "post_attention_layernorm/weight", "final_norm/weight", "bn1/weight", "RMSNorm_0/scale",
    "q_norm/weight", "block/BatchNorm_3/bias", "layer_norm/~/offset", "gamma", "norms/0",
    "layers/norm/w", "group_norm2/w", "self_attn/in_proj_bias", "rnn/bias_ih_l0", "bias_hh",
    "gru/bias_n", "norm_out/linear/bias", "norms/1/weight",
)  # fmt: skip
OTHERS = (
    "w", "layers/0/weight", "Dense_0/kernel", "embed/embedding", "normal/kernel", "normalizer/w",
    "balance/kernel", "lnx/w", "enormous/w", "wte/weight", "attention/query/kernel", "norma/w",
    "b/w", "transformer_blocks/0/norm1/linear/weight", "norm_out/linear/weight", "biased/w",
    "blocks/0/norm1/emb/timestep_embedder/linear_1/weight", "relative_bias/embedding",
)  # fmt: skip


@pytest.mark.parametrize("name", CHOSEN)
def test_names_of_norms_and_biases(name):
    assert re.fullmatch(optfn.NORMS_AND_BIASES, name)


@pytest.mark.parametrize("name", OTHERS)
def test_names_of_others(name):
    assert not re.fullmatch(optfn.NORMS_AND_BIASES, name)


def test_an_optimizer_shows_the_pattern_by_its_name():
    tx = optfn.adamw(0.1, exclude=optfn.NORMS_AND_BIASES)
    assert repr(tx) == "adamw(0.1, exclude=NORMS_AND_BIASES)"


class Block(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = x + nn.MultiHeadDotProductAttention(2)(nn.LayerNorm()(x))
        x = nn.BatchNorm(use_running_average=True)(x)
        return x + nn.Dense(8)(nn.RMSNorm()(x))


class Net(nnx.Module):
    def __init__(self):
        self.embed = nnx.Embed(4, 8, rngs=nnx.Rngs(0))
        self.norm = nnx.LayerNorm(8, rngs=nnx.Rngs(0))
        self.out = nnx.Linear(8, 4, rngs=nnx.Rngs(0))


def flax_model():
    return Block().init(jax.random.key(0), jnp.ones((2, 3, 8)))["params"]


def nnx_model():
    return nnx.state(Net(), nnx.Param)


@pytest.mark.parametrize("make", [flax_model, nnx_model])
def test_models_of_others(make):
    """The chosen leaves are those of one axis before layers are stacked; flax's projections of
    attention have a bias for each head."""
    params = make()
    want = {k for k, x in leaves_with_names(params) if np.ndim(x) == 1 or k.endswith("bias")}
    params = jax.tree.map(lambda x: jnp.stack([x, x]), params)
    assert want and patterns.match_names(optfn.NORMS_AND_BIASES, params, "exclude") == want


@pytest.mark.parametrize("packed", [False, True])
def test_a_pattern_is_compared_with_each_name_once(monkeypatch, packed):
    compared = []

    def fullmatch(pattern, name):
        compared.append((pattern, name))
        return re.fullmatch(pattern, name)

    def compiled(pattern):
        return SimpleNamespace(pattern=pattern, fullmatch=lambda name: fullmatch(pattern, name))

    params = {"a": jnp.ones(2), "b": {"a": jnp.ones(2), "c": jnp.ones(1)}}
    params = optfn.pack(params) if packed else params
    monkeypatch.setattr(patterns, "re", SimpleNamespace(compile=compiled, fullmatch=fullmatch))
    found = list(patterns.first_matches({"a": 1, ".*a": 2, ".*": 3}, params, "param_attrs"))
    assert found == [({"a"}, 1), ({"b/a"}, 2), ({"b/c"}, 3)]
    names = ["a", "b/a", "b/c"]
    assert sorted(compared) == sorted((p, name) for p in ("a", ".*a", ".*") for name in names)
    compared.clear()
    assert patterns.match_names("b/.*", params, "exclude") == {"b/a", "b/c"}
    assert sorted(compared) == [("b/.*", name) for name in names]
