"""Bad arguments: the error names the argument, what came and what is needed."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optfn
from optfn import core
from optfn.interop import packages
from optfn.optimizers.assembly import optimizer

S = optfn.schedules
D = optfn.distributed
NAN = float("nan")

W = {"w": jnp.ones(2)}


def loss(params, batch):
    return jnp.sum(params["w"] * batch)


def step(**options):
    return optfn.make_train_step(loss, optfn.sgd(0.1), **options)


def dgc(**options):
    return optfn.dgc_momentum(0.1, 0.9, rampup_begin_step=0, **options)


AVERAGED = optfn.chain(optfn.sgd(0.1), optfn.exponential_moving_average())
CASES = [
    (lambda: optfn.sgd(-0.1), ValueError, r"learning_rate must be >= 0.*-0\.1"),
    (lambda: optfn.sgd(NAN), ValueError, "learning_rate.*nan"),
    (lambda: optfn.sgd(float("inf")), ValueError, "learning_rate.*inf"),
    (lambda: optfn.sgd("0.1"), TypeError, "learning_rate must be a number.*'0.1' of type str"),
    (lambda: optfn.sgd(None), TypeError, "learning_rate must be a number.*None"),
    (lambda: optfn.sgd(True), TypeError, "learning_rate.*bool"),
    (lambda: optfn.sgd(jnp.ones(3)), ValueError, r"learning_rate must be a scalar.*\(3,\)"),
    (lambda: optfn.sgd(jnp.asarray(1j)), TypeError, "learning_rate.*complex64"),
    (lambda: optfn.sgd(0.1, grad_clip=1.0), TypeError,
     r"grad_clip must be .*, not the number 1\.0.* optfn\.clip_by_global_norm\(1\.0\)\?"),
    (lambda: optfn.sgd(0.1, regularization=0.1), TypeError,
     r"regularization must be.*mean optfn\.l2_decay\(0\.1\)\?"),
    (lambda: optfn.ParamAttr(regularization=1e-4), TypeError, r"optfn\.l2_decay\(0\.0001\)\?"),
    (lambda: optfn.sgd(0.1, grad_clip="x"), TypeError, "grad_clip must be a gradient.*got 'x'"),
    (
        lambda: optfn.add_decayed_weights(lambda t: "x").update(
            W, optfn.add_decayed_weights(lambda t: 1.0).init(W), W
        ),
        TypeError,
        "weight_decay: the schedule must return a number; got 'x'",
    ),
    (lambda: optfn.momentum(0.1, 1.5), ValueError, r"momentum must be in \[0, 1\]; got 1\.5"),
    (lambda: optfn.momentum(0.1, 0.9, nesterov=1), TypeError, "nesterov must be True or False"),
    (lambda: optfn.lars(0.1, 0.9, lars_coeff=0), ValueError, "lars_coeff must be > 0"),
    (lambda: optfn.lars(0.1, 0.9, lars_weight_decay=-1), ValueError, "lars_weight_decay"),
    (lambda: optfn.lars(0.1, 0.9, exclude=3), TypeError, "exclude must be a regular expression"),
    (lambda: optfn.lars(0.1, 0.9, exclude="("), ValueError, "exclude: '.' is not a regular"),
    (lambda: optfn.asgd(0.1, batch_num=0), ValueError, "batch_num must be >= 1; got 0"),
    (lambda: optfn.asgd(0.1, batch_num=2.0), TypeError, "batch_num must be a Python integer"),
    (lambda: optfn.asgd(0.1, batch_num=jnp.asarray(2)), TypeError, "static argument"),
    (lambda: optfn.adagrad(0.1, eps=-1e-6), ValueError, "eps must be >= 0"),
    (lambda: optfn.adadelta(0.1, eps=0.0), ValueError, "eps must be > 0"),
    (lambda: optfn.adam(0.1, eps=0.0, lazy="exact"), ValueError, "eps must be > 0"),
    (lambda: optfn.adam(0.1, eps=0.0, moment_dtype="int8"), ValueError, "eps must be > 0"),
    (lambda: optfn.adagrad(0.1, initial_accumulator_value=-1.0), ValueError, "initial_acc"),
    (lambda: optfn.decayed_adagrad(0.1, decay=1.5), ValueError, r"decay must be in \[0, 1\)"),
    (lambda: optfn.adadelta(0.1, rho=-0.1), ValueError, r"rho must be in \[0, 1\)"),
    (lambda: optfn.rmsprop(0.1, centered="yes"), TypeError, "centered must be True or False"),
    (lambda: optfn.adam(0.1, b1=1.0), ValueError, r"b1 must be in \[0, 1\)"),
    (lambda: optfn.adam(0.1, b2=-0.5), ValueError, "b2"),
    (lambda: optfn.adam(0.1, eps=NAN), ValueError, "eps.*nan"),
    (lambda: optfn.adamw(0.1, weight_decay=-1), ValueError, "weight_decay must be >= 0"),
    (lambda: optfn.adamax(0.1, eps=-1), ValueError, "eps must be >= 0"),
    (lambda: optfn.ftrl(0.1, l1=-1), ValueError, "l1 must be >= 0"),
    (lambda: optfn.ftrl(0.1, l2=NAN), ValueError, "l2"),
    (lambda: optfn.ftrl(0.1, lr_power=0.5), ValueError, "lr_power must be <= 0"),
    (lambda: optfn.ftrl(0.1, lazy="exact"), TypeError, "lazy must be True or False; got 'exact'"),
    (lambda: optfn.lamb(0.1, weight_decay="x"), TypeError, "weight_decay"),
    (lambda: optfn.muon(0.1, momentum=1.5), ValueError, r"momentum must be in \[0, 1\]; got 1\.5"),
    (lambda: optfn.muon(0.1, eps=0), ValueError, "eps must be > 0"),
    (lambda: optfn.muon(0.1, matrices=3), TypeError, "matrices must be a regular expression"),
    (lambda: optfn.muon(0.1, scale="x"), ValueError, "scale must be one of 'jordan', 'moonlight'"),
    (lambda: optfn.muon(0.1, coefficients="x"), ValueError, "coefficients must be one of 'jordan'"),
    (lambda: optfn.muon(0.1, coefficients=(1, 2)), ValueError, r"three numbers.*got \(1, 2\)"),
    (lambda: optfn.muon(0.1, coefficients=[(1, 2, 3), (1, 2)]), ValueError, "for each step; got"),
    (lambda: optfn.muon(0.1, compute_dtype="int8"), ValueError,
     "compute_dtype must be one of None"),
    (lambda: optfn.muon(0.1, others=0.1), TypeError, r"mean optfn\.adamw\(0\.1\)"),
    (lambda: optfn.momentum(0.1, 0.9, moment_dtype="f"), ValueError, "'bfloat16', 'int8'; got 'f'"),
    (lambda: optfn.rmsprop(0.1, centered=True, moment_dtype="int8"), ValueError,
     "centered=True needs float32 moments; got moment_dtype='int8'"),
    (lambda: optfn.lamb(0.1, eps=0.0, moment_dtype="int8"), ValueError, "eps must be > 0"),
    (lambda: optfn.l1_decay(-1.0), ValueError, "coeff must be >= 0"),
    (lambda: optfn.l2_decay([1.0]), TypeError, "coeff must be a number"),
    (lambda: optfn.clip_by_value(0.0), ValueError, "max_value must be > 0"),
    (lambda: optfn.clip_by_value(1.0, 2.0), ValueError, "min_value must be <= max_value"),
    (lambda: optfn.clip_by_norm(0.0), ValueError, "max_norm must be > 0"),
    (lambda: optfn.clip_by_global_norm(-1.0), ValueError, r"max_norm must be > 0; got -1\.0"),
    (lambda: optfn.clip_by_global_norm(NAN), ValueError, "max_norm must be > 0; got nan"),
    (lambda: S.noam(0, 10), ValueError, "d_model must be > 0"),
    (lambda: S.exponential(0.1, 0, 0.5), ValueError, "decay_steps must be >= 1"),
    (lambda: S.exponential(0.1, 10, 0.0), ValueError, "decay_rate must be > 0"),
    (lambda: S.polynomial(0.1, 10, power=0), ValueError, "power must be > 0"),
    (lambda: S.piecewise([5, 10], [0.1, 0.2]), ValueError, "2 values and 2 boundaries"),
    (lambda: S.piecewise([10, 5], [1, 2, 3]), ValueError, "boundaries must increase"),
    (lambda: S.piecewise([5], [0.1, -0.1]), ValueError, r"values\[1\] must be >= 0"),
    (lambda: S.cosine(0.1, 0, 10), ValueError, "step_each_epoch"),
    (lambda: S.linear_warmup("x", 10, 0, 0.1), TypeError, "learning_rate"),
    (lambda: S.warmup_cosine(0.1, 10, 10), ValueError, "more than warmup_steps, 10.*got 10"),
    (lambda: S.warmup_cosine(-0.1, 10, 20), ValueError, "peak must be >= 0"),
    (lambda: S.warmup_stable_decay(0.1, 1, -1, 1), ValueError, "stable_steps must be >= 0"),
    (lambda: S.warmup_stable_decay(0.1, 1, 1, 0), ValueError, "decay_steps must be >= 1"),
    (lambda: S.one_cycle(0.1, 0), ValueError, "total_steps must be >= 1"),
    (lambda: S.one_cycle(0.1, 9, anneal="cos"), ValueError, "anneal must be one of 'cosine', 'lin"),
    (lambda: S.one_cycle(0.1, 9, pct_start=1.5), ValueError, r"pct_start must be in \[0, 1\]; got"),
    (lambda: S.one_cycle(0.1, 9, pct_start=0.6, three_phase=True), ValueError,
     r"pct_start must be in \[0, 0\.5\] with three_phase=True; got 0\.6"),
    (lambda: S.multi_step(0.1, [3, 3]), ValueError, "milestones must increase"),
    (lambda: S.lambda_decay(0.1, 0.5), TypeError, "lr_lambda must be a function"),
    (lambda: S.reduce_on_plateau(0.1, mode="up"), ValueError, "mode must be"),
    (lambda: S.reduce_on_plateau(0.1, threshold_mode="x"), ValueError, "threshold_mode"),
    (lambda: S.reduce_on_plateau(0.1, decay_rate=1.0), ValueError, "decay_rate"),
    (lambda: S.reduce_on_plateau(0.1, patience=-1), ValueError, "patience must be >= 0"),
    (lambda: optfn.get_learning_rate(optax.sgd(1).init(W)), ValueError, "has no learning rate"),
    (lambda: optfn.ParamAttr(learning_rate=-1.0), ValueError, "learning_rate must be >= 0"),
    (lambda: optfn.ParamAttr(learning_rate=jnp.ones(())), TypeError, "Python number"),
    (lambda: optfn.ParamAttr(weight_decay=-1.0), ValueError, "weight_decay must be >= 0"),
    (lambda: optfn.ParamAttr(weight_decay=None), TypeError, "weight_decay must be a Python number"),
    (lambda: optfn.ParamAttr(need_clip=1), TypeError, "need_clip must be True or False"),
    (lambda: optfn.ParamAttr(trainable=None), TypeError, "trainable must be True or False"),
    (lambda: optfn.accumulate(optfn.sgd(0.1), 0), ValueError, "every must be >= 1"),
    (lambda: optfn.accumulate(3, 2), TypeError, "accumulate: tx must be a gradient"),
    (lambda: optfn.skip_spikes(optfn.sgd(0.1), 1.0), ValueError, "factor"),
    (lambda: optfn.skip_spikes(optfn.sgd(0.1), NAN), ValueError, "factor"),
    (lambda: optfn.skip_nonfinite("adam"), TypeError, "skip_nonfinite: tx .* got 'adam'"),
    (lambda: optfn.record_metrics(None), TypeError, "record_metrics: tx .* got None"),
    (lambda: optfn.summary(3, W), TypeError, "summary: tx must be .* got 3 of type int"),
    (lambda: optfn.load_state_dict(3, 3), TypeError, "load_state_dict: mapping .* got 3"),
    (lambda: optfn.sgd(0.1, multi_precision=16), TypeError, "True, False, 32 or 24; got 16"),
    (lambda: optfn.sgd(0.1, multi_precision="32"), TypeError, "32 or 24; got '32'"),
    (lambda: optfn.master_weights(3), TypeError, "master_weights: tx must be a gradient"),
    (lambda: optfn.master_weights(optfn.sgd(0.1), "float99"), ValueError, "dtype.*'float99'"),
    (lambda: optfn.master_weights(optfn.sgd(0.1), bits=8), ValueError, "bits must be one of"),
    (lambda: optfn.master_weights(optfn.sgd(0.1), jnp.float64, bits=32), ValueError,
     "bits=32 needs float32 masters"),
    (lambda: optfn.adam(0.1, multi_precision=24).init({"w": jnp.ones(2, jnp.float16)}), ValueError,
     "bits=24 needs bfloat16 parameters.*leaf 'w' is float16"),
    # Else they would be float32, and the master of a float32 leaf the parameter itself.
    (lambda: optfn.master_weights(optfn.sgd(0.1), jnp.float64).init(W), ValueError,
     "dtype float64 needs jax_enable_x64"),
    (lambda: optfn.averaged_params(AVERAGED.init(W), {"w": jnp.ones(3)}), ValueError,
     r"'w' has shape \(3,\), but its average has \(2,\)"),
    (lambda: optfn.sgd(lambda step: jnp.ones(2)).init(W), ValueError, r"scalar.*\(2,\)"),
    (lambda: optfn.apply_updates(W, {"w": jnp.ones(3)}), ValueError, r"'w' has shape \(3,\)"),
    (lambda: optfn.apply_updates(W, {"w": None}), ValueError, "'w' is missing"),
    (lambda: optfn.apply_updates(W, {"v": W["w"]}), ValueError, "missing 'w'; not expected 'v'"),
    (lambda: optfn.apply_updates(W, {"w": jnp.ones(2, jnp.complex64)}), TypeError,
     "'w' is complex; the parameter has dtype float32"),
    (lambda: optfn.chain(), ValueError, "chain needs at least one gradient transformation"),
    (lambda: optfn.chain(optfn.sgd(0.1), 3), TypeError, "chain: part 1 must be a gradient.*got 3"),
    (lambda: optfn.sgd(0.1, param_attrs=jnp.ones(2)), TypeError, "param_attrs must be a mapping"),
    (lambda: optfn.sgd(0.1, param_attrs=()), TypeError, "param_attrs must be a mapping"),
    (lambda: optfn.adam(lazy=jnp.ones(2)), ValueError, "lazy must be False, True or"),
    (lambda: optfn.master_weights(optfn.sgd(0.1), None), ValueError, "dtype must be.*None"),
    (lambda: dgc(axis_name=None), TypeError, "axis_name must be the name of a mesh axis.*None"),
    (lambda: dgc(axis_name=0), TypeError, "axis_name must be the name of a mesh axis.*0"),
    (lambda: dgc(reduce_axis_name={}), TypeError, "reduce_axis_name must be the name"),
    (lambda: optfn.skip_nonfinite(optfn.sgd(1), axis_name=NAN), TypeError, "axis_name.*nan"),
    (lambda: optfn.record_metrics(optfn.sgd(1), axis_name=[1.0]), TypeError, "axis_name.*1.0"),
    (lambda: step(data_axis=None), TypeError, "data_axis must be the name of a mesh axis"),
    (lambda: D.init_state(optfn.sgd(1), {}, None), TypeError, "mesh must be a jax.sharding.Mesh"),
    (lambda: D.init_state(3, W, D.data_mesh(1)), TypeError, "init_state: tx must be a gradient"),
    (lambda: D.state_specs(None, W), TypeError, "state_specs: tx must be a gradient.*None"),
    (lambda: D.state_specs(dgc(), W, axis_name=3), TypeError, "axis_name must be the name"),
    (lambda: D.data_mesh(devices="x"), TypeError, "devices must be a sequence of jax.Device"),
    (lambda: D.data_mesh(devices=[]), TypeError, "devices must be a sequence of jax.Device"),
    (lambda: D.data_mesh(axis_name=None), TypeError, "axis_name must be the name"),
    (lambda: step(value_and_grad=3), TypeError, "value_and_grad must be a function.*got 3"),
    (lambda: step(recompute=3), TypeError,
     "recompute must be a non-empty sequence of names; got 3"),
    (lambda: step(recompute=()), TypeError,
     "recompute must be a non-empty sequence of names; got "),
    (lambda: optfn.pack(optfn.pack(W)), TypeError, "already packed"),
    (lambda: step().init({"w": "x"}), TypeError, "parameter 'w' must be a floating-point array"),
    (lambda: step().init({"w": jnp.arange(3)}), TypeError, "must contain a floating-point array"),
    (lambda: step()(None, 1.0), TypeError, "state must be a TrainState.*got None"),
    (lambda: step()(step(packed=True).init(W), 1.0), TypeError, "packed=False.*packed params"),
    (lambda: step(packed=True)(step().init(W), 1.0), TypeError, "packed=True.*a tree of params"),
    (lambda: optfn.sgd(lambda t: None).init(W), TypeError, "learning_rate: the schedule.*None"),
    (lambda: optfn.sgd(lambda t: "x").init(W), TypeError, "learning_rate: the schedule.*'x'"),
    (lambda: optfn.save_checkpoint("x", None), TypeError, "state must be a TrainState.*None"),
    (lambda: optfn.save_checkpoint("", step().init(W)), TypeError, "must be a path; got ''"),
    (lambda: optfn.restore_checkpoint(3, W), TypeError, "must be a path; got 3"),
    (lambda: optfn.minimize(loss, optfn.sgd(1), W, 3), TypeError, "batches must be an iterable"),
    (lambda: optfn.minimize(loss, optfn.sgd(1), W, {"x": 1}), TypeError, "one batch: put it into"),
    (lambda: optfn.minimize(loss, optfn.sgd(1), W, iter), TypeError, "iterable.*: call it"),
    (lambda: step(rng=0), TypeError, r"loss_fn is called with \(params, batch, key\).*\(params, b"),
    (lambda: step(model_state=True), TypeError, r"called with \(params, model_state, batch\)"),
    (lambda: optfn.make_train_step(lambda w, x, key: 0.0, optfn.sgd(1)), TypeError,
     r"loss_fn is called with \(params, batch\); it takes \(w, x, key\): missing.*'key'"),
    (lambda: step(value_and_grad=lambda params: params), TypeError,
     r"value_and_grad is called with \(params, batch\); it takes \(params\)"),
    (lambda: optfn.minimize(loss, optfn.sgd(1), W, [1.0], callback=lambda n, metrics: None),
     TypeError, r"callback is called with \(step, state, metrics\); it takes \(n, metrics\)"),
    (lambda: optfn.minimize(loss, optfn.sgd(1), W, [1.0], evaluate=loss), TypeError,
     r"evaluate is called with \(params\); it takes \(params, batch\)"),
    (lambda: optfn.minimize(loss, optfn.sgd(1), W, [1.0], checkpoint=__file__), NotADirectoryError,
     "checkpoint must be a directory; .*test_arguments.py is a file"),
    (lambda: optfn.make_train_step(3, optfn.sgd(0.1)), TypeError, "loss_fn must be a function"),
    (lambda: optfn.make_train_step(abs, 0.1), TypeError, "tx must be a gradient transformation"),
    (lambda: optfn.make_train_step(abs, [W] * 99), TypeError, "got .{,101} of type list$"),
    (lambda: optfn.state_dict(optfn.sgd(0.1)), TypeError, r"state_dict takes.*got sgd\(0.1\)"),
    (lambda: D.scan_layers(W, abs, 1.0), TypeError, "scan_layers: fn must be a function"),
    (lambda: D.scan_layers(abs, [W, W], 1.0), TypeError, "stacked is a list of 2.*Stacked"),
    (lambda: step(tables="w", shard_tables=True), ValueError, "shard_tables=True needs.*mesh"),
]  # fmt: skip


@pytest.mark.parametrize(("make", "error", "words"), CASES)
def test_bad_arguments(make, error, words):
    with pytest.raises(error, match=words):
        make()


@pytest.mark.parametrize(
    ("loss", "error", "words"),
    [
        (None, TypeError, "must return a real scalar as the loss; got None"),
        ("x", TypeError, "must return a real scalar as the loss; got 'x'"),
        (jnp.ones(3), ValueError, r"must return a scalar; got an array of shape \(3,\)"),
        (jnp.int32(1), TypeError, "must return a real number; got dtype int32"),
    ],
)
def test_what_a_loss_must_be(loss, error, words):
    """From loss_fn, and from a value_and_grad of one's own."""
    tx = optfn.sgd(0.1)
    one = optfn.make_train_step(lambda params, batch: loss, tx)
    other = optfn.make_train_step(None, tx, value_and_grad=lambda params, batch: (loss, params))
    for made in (one, other):
        with pytest.raises(error, match=words):
            made(made.init(W), 1.0)


@pytest.mark.parametrize(
    ("result", "error", "words"),
    [
        (None, TypeError, "must return a pair"),
        ((1.0,), TypeError, "must return a pair"),
        ((1.0, {"w": "x"}), TypeError, "gradient 'w' must be a floating-point array; got 'x'"),
        ((1.0, {"v": jnp.ones(2)}), ValueError, "missing 'w'; not expected 'v'"),
    ],
)
def test_what_a_value_and_grad_must_be(result, error, words):
    made = optfn.make_train_step(None, optfn.sgd(0.1), value_and_grad=lambda params, x: result)
    with pytest.raises(error, match=words):
        made(made.init(W), 1.0)


def test_a_value_and_grad_may_give_python_numbers():
    def value_and_grad(params, batch):
        return 1.0, {"w": 1.0}

    made = optfn.make_train_step(None, optfn.sgd(0.1), value_and_grad=value_and_grad)
    state, metrics = made(made.init({"w": 2.0}), 1.0)
    assert float(state.params["w"]) == pytest.approx(1.9)
    assert float(metrics["loss"]) == 1.0


@pytest.mark.parametrize(
    "tx",
    [
        optfn.adamw(0.1, exclude="bias"),
        optfn.lamb(0.1, exclude="bias"),
        optfn.lars(0.1, 0.9, exclude="bias"),
        optfn.add_decayed_weights(lambda step: 0.1, exclude="bias"),
    ],
    ids=["adamw", "lamb", "lars", "add_decayed_weights"],
)
def test_pattern_that_matches_nothing_lists_the_paths(tx):
    params = {"a": {"w": jnp.ones(2)}, "b": jnp.ones(2)}
    with pytest.raises(ValueError, match=r"exclude.*'bias' matches no leaf.*'a/w', 'b'"):
        tx.init(params)
    tx.init({})


def test_pattern_function_must_give_a_bool():
    params = {"w": jnp.ones(2)}
    tx = optfn.lamb(0.1, exclude=lambda path: path)
    with pytest.raises(TypeError, match=r"exclude must return True or False.*'w'"):
        tx.update(params, tx.init(params), params)


def test_apply_updates_adds_integers_to_floats():
    """As optax does; a transform of one's own may give integer zeros for a leaf that stays."""
    moved = optfn.apply_updates({"w": jnp.full(2, 1.5)}, {"w": jnp.array([0, 1])})
    assert moved["w"].tolist() == [1.5, 2.5]
    assert moved["w"].dtype == jnp.float32


def test_a_float0_update_changes_nothing():
    """As optax.set_to_zero gives it for an integer leaf."""
    params = {"w": jnp.ones(2), "n": jnp.arange(2)}
    grads = jax.grad(lambda p: p["w"].sum(), allow_int=True)(params)
    new = optfn.apply_updates(params, grads)
    assert new["n"].tolist() == [0, 1] and new["n"].dtype == jnp.int32


def test_a_schedule_with_a_python_condition_is_told_how_to_write_it():
    tx = optfn.sgd(lambda i: 0.1 if i < 5 else 0.01)
    made = optfn.make_train_step(loss, tx)
    with pytest.raises(jax.errors.TracerBoolConversionError) as raised:
        made(made.init(W), 1.0)
    (note,) = [x for x in raised.value.__notes__ if "schedule" in x]
    assert note.startswith("learning_rate is a schedule of the step, which JAX traces")
    assert "jnp.where(step < 10, a, b)" in note


@pytest.mark.parametrize("big", [2**31, -(2**31) - 1, 2**40])
def test_integers_that_jax_would_cut_are_refused(big):
    """2**40 would become 0 on the device, and row 0 of a table would be trained in its place."""
    made = step()
    ids = np.array([[1, big]])
    with pytest.raises(ValueError, match=f"leaf 'ids' of the batch has integers from .*{big}"):
        made(made.init(W), {"ids": ids})
    with pytest.raises(ValueError, match=r"^the batch has integers"):
        made(made.init(W), ids)
    with pytest.raises(ValueError, match="hash_ids"):
        optfn.over_batches(lambda w, x: 1.0, [{"ids": ids}])(W)
    fitting = np.array([2**31 - 1, -(2**31)])  # these and all smaller ones arrive as they are
    assert optfn.over_batches(lambda w, x: x.max(), [fitting])(W) == np.float32(2**31 - 1)
    assert fitting.dtype == np.int64


def test_a_result_that_lacks_aux_is_described_by_its_shape():
    made = step(has_aux=True)
    with pytest.raises(TypeError, match=r"must return \(loss, aux\); got an array of shape \(\)"):
        made(made.init(W), 1.0)


class OneMoment(NamedTuple):
    m: Any


@pytest.mark.parametrize("jitted", [False, True])
@pytest.mark.parametrize(
    ("rule", "words"),
    [
        (lambda g, m: (g.sum(), m), r"mine: .* update of shape \(\) for leaf 'w', .* \(4, 2\)"),
        (
            lambda g, m: (g, m.sum()),
            r"1 accumulator, of shape \(4, 2\); .* 2 arrays: \[\(4, 2\), \(\)\]",
        ),
        (lambda g, m: g, r"1 accumulator, of shape \(4, 2\); it returned 1 array: \[\(4, 2\)\]"),
        (lambda g, m: (g, m, m), r"it returned 3 arrays: \[\(4, 2\), \(4, 2\), \(4, 2\)\]"),
    ],
)
def test_the_results_of_a_rule_have_the_shapes_of_its_arguments(rule, words, jitted):
    @core.transform()
    def mine():
        return core.accumulating(rule, OneMoment)

    params, tx = {"w": np.ones((4, 2), np.float32)}, mine()
    update = jax.jit(tx.update) if jitted else tx.update
    with pytest.raises(ValueError, match=words):
        update(params, tx.init(params), params)


def test_an_optimizer_has_the_arguments_of_all():
    with pytest.raises(TypeError, match=r"mine: .* needs param_attrs, multi_precision"):

        @optimizer
        def mine(learning_rate, *, grad_clip=None, regularization=None):
            return []


def test_an_optional_package_is_missing_or_fails_to_be_imported(tmp_path, monkeypatch):
    (tmp_path / "broken_package.py").write_text("import a_module_that_is_not_there")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match=r'no_package is not installed: .*"\.\[plot\]"'):
        packages.optional_module("no_package.inner", "plot")
    words = "broken_package is installed, but importing broken_package fails: No module named 'a_m"
    with pytest.raises(ImportError, match=words) as found:
        packages.optional_module("broken_package", "plot")
    # A divided state is then no file without a word.
    assert not isinstance(found.value, ModuleNotFoundError)


def test_the_state_of_a_frozen_leaf_is_no_state_for_a_trained_one():
    params = {"w": np.ones(3, np.float32), "b": np.ones(2, np.float32)}
    tx = optfn.scale_by_adam()
    state = tx.init(params)._replace(mu={"w": params["w"], "b": optax.MaskedNode()})
    with pytest.raises(ValueError, match="no array for leaf 'b', which was frozen"):
        tx.update(params, state, params)
