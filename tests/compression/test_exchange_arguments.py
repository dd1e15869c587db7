"""Compressors and exchanges as they are printed, and what they refuse."""

import jax.numpy as jnp
import pytest
from exchanges import Threshold

import optfn
from optfn.distributed import (
    exchange,
    power_sgd,
    quantize,
    top_k,
)

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
)
def test_bad_arguments(make, error, match):
    with pytest.raises(error, match=match):
        make()


def test_complex_leaves_are_refused():
    with pytest.raises(TypeError, match="exchange is not defined for complex leaves"):
        exchange(top_k(0.1)).init({"z": jnp.zeros(3, jnp.complex64)})
