"""What `record_metrics` reports."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from problems import tree

import optfn


def test_metrics_are_norms_factor_and_rate():
    tx = optfn.record_metrics(optfn.sgd(0.1, grad_clip=optfn.clip_by_global_norm(0.5)))
    params, grads = tree(0), tree(1)
    state = tx.init(params)
    assert float(optfn.metrics(state)["learning_rate"]) == pytest.approx(0.1)
    _, state = tx.update(grads, state, params)

    def norm(t):
        return np.linalg.norm(np.concatenate([np.ravel(x) for x in jax.tree.leaves(t)]))

    want = {
        "grad_norm": norm(grads),
        "update_norm": 0.05,
        "param_norm": norm(params),
        "clip_factor": 0.5 / norm(grads),
        "learning_rate": 0.1,
    }
    got = optfn.metrics(state)
    assert set(got) == set(want)
    for name, value in want.items():
        np.testing.assert_allclose(got[name], value, rtol=1e-5, err_msg=name)
    with pytest.raises(ValueError, match="it has 0"):
        optfn.metrics(state.inner_state)


@pytest.mark.parametrize("packed", [False, True])
def test_metrics_by_patterns_of_paths(packed):
    """Against NumPy; a frozen leaf has no update, and its parameters count."""
    tx = optfn.record_metrics(
        optfn.sgd(0.1, param_attrs={"a/b": optfn.ParamAttr(trainable=False)}),
        per=("a/.*", "c", "a/b"),
    )
    params, grads = tree(0), tree(1)
    form = optfn.pack if packed else lambda x: x
    state = tx.init(form(params))
    assert set(optfn.metrics(state)) > {"grad_norm/a/.*", "update_ratio/c"}
    _, state = jax.jit(tx.update)(form(grads), state, form(params))
    got = optfn.metrics(state)

    def norm(*arrays):
        return np.sqrt(sum(np.sum(np.float64(x) ** 2) for x in arrays))

    a, g = params["a"], grads["a"]
    want = {
        "grad_norm/a/.*": norm(g["w"], g["b"]),
        "update_norm/a/.*": 0.1 * norm(g["w"]),
        "param_norm/a/.*": norm(a["w"], a["b"]),
        "update_ratio/a/.*": 0.1 * norm(g["w"]) / norm(a["w"], a["b"]),
        "grad_norm/c": norm(grads["c"]),
        "update_norm/c": 0.1 * norm(grads["c"]),
        "param_norm/c": norm(params["c"]),
        "update_ratio/c": 0.1 * norm(grads["c"]) / norm(params["c"]),
        "update_norm/a/b": 0.0,
        "param_norm/a/b": norm(a["b"]),
    }
    for name, value in want.items():
        np.testing.assert_allclose(got[name], value, rtol=1e-5, err_msg=name)
    plain = optfn.record_metrics(tx.call[1][0])
    assert set(optfn.metrics(plain.init(params))) == {k for k in got if "/" not in k}
    loaded = optfn.load_state_dict(plain.init(params), optfn.state_dict(state))  # only a report
    assert optfn.metrics(loaded)["grad_norm"] == got["grad_norm"]


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


def test_a_training_step_reports_the_norms_of_patterns_over_workers():
    """Of the mean gradient, the same on two devices as on one."""
    tx = optfn.record_metrics(optfn.sgd(0.1), per="c")
    reported = []
    for options in ({}, {"mesh": optfn.distributed.data_mesh(2)}):
        step = optfn.make_train_step(
            lambda p, x: jnp.mean(x) * sum(jnp.sum(v**2) for v in jax.tree.leaves(p)), tx, **options
        )
        _, metrics = step(step.init(tree(0)), np.arange(4.0, dtype=np.float32))
        reported.append(float(metrics["grad_norm/c"]))
    np.testing.assert_allclose(reported, 3.0 * np.linalg.norm(tree(0)["c"]), rtol=1e-5)


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
