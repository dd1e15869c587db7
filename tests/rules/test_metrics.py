"""What `record_metrics` reports."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from problems import tree

import optfn


def test_metrics_have_the_factor_of_the_clip_and_the_rate_at_first():
    tx = optfn.record_metrics(optfn.sgd(0.1, grad_clip=optfn.clip_by_global_norm(0.5)))
    params, grads = tree(0), tree(1)
    state = tx.init(params)
    assert float(optfn.metrics(state)["learning_rate"]) == pytest.approx(0.1)
    _, state = tx.update(grads, state, params)
    got = optfn.metrics(state)
    names = {"grad_norm", "update_norm", "param_norm", "clip_factor", "learning_rate"}
    assert set(got) == names
    norm = np.linalg.norm(np.concatenate([np.ravel(x) for x in jax.tree.leaves(grads)]))
    np.testing.assert_allclose(got["clip_factor"], 0.5 / norm, rtol=1e-5)
    with pytest.raises(ValueError, match="it has 0"):
        optfn.metrics(state.inner_state)


def test_metrics_by_patterns_are_only_a_report():
    """A state with them is loaded by a recorder without."""
    tx = optfn.record_metrics(optfn.sgd(0.1), per=("a/.*", "c"))
    plain, params = optfn.record_metrics(optfn.sgd(0.1)), tree(0)
    state = tx.init(params)
    assert set(optfn.metrics(state)) > {"grad_norm/a/.*", "update_ratio/c"}
    _, state = tx.update(tree(1), state, params)
    loaded = optfn.load_state_dict(plain.init(params), optfn.state_dict(state))
    assert optfn.metrics(loaded)["grad_norm"] == optfn.metrics(state)["grad_norm"]


@pytest.mark.parametrize(
    ("per", "error", "words"),
    [
        ("nothing", ValueError, "per: .*'nothing' matches no leaf|'nothing' matches no leaf"),
        (("a/.*", 3), TypeError, "per must be a regular expression of paths"),
        ("(", ValueError, "not a regular expression"),
    ],
)
def test_bad_patterns_of_metrics(per, error, words):
    with pytest.raises(error, match=words):
        optfn.record_metrics(optfn.sgd(0.1), per=per).init(tree(0))


def test_norms_are_taken_in_float32():
    """Also of narrow gradients: in float16 the squares of large ones are infinite."""
    for dtype, value in ((jnp.bfloat16, 0.7), (jnp.float16, 297.06)):
        tx, params = optfn.record_metrics(optfn.sgd(0.1)), {"w": jnp.ones(200, dtype)}
        grads = {"w": jnp.full(200, value, dtype)}
        _, state = tx.update(grads, tx.init(params), params)
        want = np.linalg.norm(np.asarray(grads["w"], np.float64))
        np.testing.assert_allclose(optfn.metrics(state)["grad_norm"], want, rtol=1e-6)


def test_one_recorder_inside_another_is_several():
    tx = optfn.record_metrics(optfn.skip_nonfinite(optfn.record_metrics(optfn.sgd(0.1))))
    with pytest.raises(ValueError, match="must have one record_metrics; it has 2"):
        optfn.metrics(tx.init({"w": jnp.ones(3)}))
