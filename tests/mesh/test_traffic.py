"""How many bytes a worker sends: the metric, its way into the history, and what is shown of it."""

import warnings

import jax.numpy as jnp
import numpy as np
import pytest

import optfn
from optfn.distributed import (
    data_mesh,
    deep_gradient_compression,
    exchange,
    power_sgd,
    quantize,
    top_k,
)
from optfn.run.progress import format_bytes

PARAMS = {"head": np.zeros((64, 32), np.float32), "bias": np.zeros(100, np.float32)}
HEAD, BIAS = 64 * 32, 100


def loss_fn(params, x):
    return jnp.mean((x @ params["head"]) ** 2) + jnp.mean(params["bias"] * x[0, 0])


def batches(number, examples):
    rng = np.random.default_rng(0)
    return [rng.standard_normal((examples, 64), np.float32) for _ in range(number)]


def ring(size):
    """Return what each of four workers sends in an all-reduce."""
    return 2 * 3 / 4 * size


def history(tx, number, **options):
    each = batches(number, 4 * options.get("local_steps", 1))
    steps = number * options.get("local_steps", 1)
    mesh = data_mesh(4)
    return optfn.minimize(loss_fn, tx, PARAMS, each, steps=steps, mesh=mesh, **options)[1]


def test_a_round_of_local_steps(capsys):
    """The first mean is dense; then a sign for each entry, and a scale for each chunk of 512."""
    outer = optfn.chain(exchange(quantize(1, chunk=512), warmup_steps=1), optfn.sgd(1.0))
    sent = history(optfn.sgd(0.1), 2, local_steps=2, outer=outer)["bytes_sent"]
    dense, signs = ring(4 * (HEAD + BIAS)), 3 * (HEAD / 8 + 4 * 4) + ring(4 * BIAS)
    np.testing.assert_allclose(sent, [dense, signs])
    first, last = capsys.readouterr().err.splitlines()
    assert first.endswith(f" sent {dense / 2000:.3g} kB/step")
    assert last.endswith(f" sent {signs / 2:.3g} B/step")


def test_accumulated_gradients_are_sent_once():
    """Packets are gathered, thin matrices go through a ring, and leaves of others do so too."""
    choice = {"head": power_sgd(2), "bias": top_k(0.1, chunk=50)}
    tx = optfn.accumulate(optfn.chain(exchange(choice, min_size=1), optfn.sgd(0.1)), 2)
    sent = history(tx, 4, progress=False)["bytes_sent"]
    # Of each chunk 5 entries, with indices of 6 bits and values of 32, in whole words.
    once = ring(4 * 2 * (64 + 32)) + 3 * 4 * np.ceil(10 * 38 / 32)
    np.testing.assert_allclose(sent, [0, once, 0, once])


def test_deep_gradient_compression():
    """Dense momentum, then a ramp whose first step would take more than an all-reduce."""
    options = {"rampup_begin_step": 2, "rampup_step": 2, "sparsity": (0.1, 0.99), "min_size": 1000}
    traffic = optfn.dgc_momentum(0.1, 0.9, **options).init(PARAMS)[0].exchanged.traffic
    sent = [float(traffic.bytes_sent(jnp.int32(step), jnp.int32(4))) for step in range(5)]
    dense = ring(4 * (HEAD + BIAS))
    packets = 3 * 8 * round(HEAD * 0.01) + ring(4 * BIAS)
    np.testing.assert_allclose(sent, [dense, dense, dense, packets, packets])


def test_leaves_of_bfloat16_are_sent_in_float32():
    params = {"head": PARAMS["head"].astype(jnp.bfloat16), "bias": PARAMS["bias"]}
    traffic = exchange({"bias": quantize(8)}, min_size=1).init(params).exchanged.traffic
    sent = float(traffic.bytes_sent(jnp.int32(0), jnp.int32(4)))
    assert sent == ring(4 * HEAD) + 3 * (BIAS + 4)


def test_nothing_is_said_where_it_is_not_known():
    """exchange(None) does not count its exchanges; an optimizer that does not exchange is quiet."""
    for tx in (optfn.chain(exchange(None), optfn.sgd(0.1)), optfn.sgd(0.1)):
        found = history(tx, 1, progress=False)
        assert found.keys() == {"loss", "learning_rate", "stopped"}


def test_sizes():
    assert [format_bytes(x) for x in (0.0, 17.0, 999.4, 1234.0, 5.678e6, 3e9, 4.5e12)] == [
        *("0 B", "17 B", "999 B", "1.23 kB", "5.68 MB", "3 GB", "4.5e+03 GB")
    ]


def test_a_compression_of_no_leaf_is_warned_of_once():
    """Also where it stands inside of others; not if one leaf is compressed."""
    options = {"rampup_begin_step": 0, "min_size": HEAD + 1}
    for tx in (
        optfn.dgc_momentum(0.1, 0.9, **options),
        optfn.skip_nonfinite(optfn.dgc_momentum(0.1, 0.9, **options)),
        optfn.chain(deep_gradient_compression(0.9, **options), optfn.sgd(0.1)),
    ):
        step = optfn.make_train_step(loss_fn, tx, mesh=data_mesh(4))
        with pytest.warns(
            UserWarning, match="every leaf has fewer elements than its min_s"
        ) as found:
            step.init(PARAMS)
        assert len([x for x in found if "min_size" in str(x.message)]) == 1
    tx = optfn.dgc_momentum(0.1, 0.9, rampup_begin_step=0, min_size=HEAD)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optfn.make_train_step(loss_fn, tx, mesh=data_mesh(4)).init(PARAMS)
