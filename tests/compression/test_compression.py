"""Deep Gradient Compression against its float64 reference, and what it promises beyond numbers."""

import contextlib
import functools
import inspect
import warnings

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import reference_compression as reference
from arrays import normal
from grids import nightly, suite
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from simulation import follow, one_step, stacked

import optfn
from optfn.compression.bytes_sent import ramp_step
from optfn.compression.dgc import DeepGradientCompressionState
from optfn.distributed import deep_gradient_compression
from optfn.mesh.state.per_worker import PerWorker
from optfn.tables.rows import Rows

N = 4
LR = 0.1


def warned(options):
    """Expect the warning of `dgc_momentum` where it masks at a final density above 2 %."""
    if options.get("momentum_masking", True) and options["sparsity"][-1] < 0.98:
        return pytest.warns(UserWarning, match="little momentum remains")
    return contextlib.nullcontext()


OPTIONS = {
    "plain": {"rampup_begin_step": 0, "sparsity": (0.99,)},
    "nesterov": {"rampup_begin_step": 2, "sparsity": (0.98,), "nesterov": True},
    "ramp": {"rampup_begin_step": 2, "rampup_step": 6, "sparsity": (0.5, 0.9, 0.999)},
    "clip": {"rampup_begin_step": 1, "sparsity": (0.99,), "local_grad_clip_norm": 20.0},
    "decay": {"rampup_begin_step": 3, "sparsity": (0.95,), "l2": 0.05},
    "unmasked": {"rampup_begin_step": 1, "sparsity": (0.9,), "momentum_masking": False},
    "bfloat16": {"rampup_begin_step": 1, "sparsity": (0.99,), "wire": "bfloat16"},
    "all": {
        "rampup_begin_step": 2,
        "rampup_step": 4,
        "sparsity": (0.75, 0.99),
        "nesterov": True,
        "local_grad_clip_norm": 30.0,
        "l2": 0.01,
        "wire": "bfloat16",
    },
}


@pytest.mark.parametrize("name", suite(OPTIONS, "clip"))
def test_follows_the_reference(name):
    """Parameters, u, v and the sets that are sent, of each worker at each step."""
    options = dict(OPTIONS[name])
    params = {"w": normal(0, 40, 30), "b": normal(1, 6)}
    gradients = [{"w": normal(10 + t, N, 40, 30), "b": normal(50 + t, N, 6)} for t in range(10)]
    l2 = options.pop("l2", 0.0)
    penalty = optfn.l2_decay(l2) if l2 else None
    with warned(options):
        tx = optfn.dgc_momentum(LR, 0.9, min_size=100, regularization=penalty, **options)
    series = follow(tx, params, gradients)
    expected = {
        k: reference.leaf(
            params[k].reshape(-1),
            np.stack([g[k].reshape(N, -1) for g in gradients]),
            learning_rate=LR,
            momentum=0.9,
            l2=l2,
            compressed=k == "w",
            **options,
        )
        for k in params
    }
    close = functools.partial(np.testing.assert_allclose, rtol=2e-5, atol=2e-5)
    sends_all = options.get("momentum_masking", True) and options.get("wire") != "bfloat16"
    for t, (p, (state, _)) in enumerate(series):
        for worker in range(N):
            for k in params:
                close(p[k][worker].reshape(-1), expected[k]["p"][t])
            close(state.local_velocity.value["w"][worker], expected["w"]["u"][t][worker])
            close(state.residual.value["w"][worker], expected["w"]["v"][t][worker])
            if sends_all and t >= options["rampup_begin_step"]:
                np.testing.assert_array_equal(
                    state.residual.value["w"][worker] == 0, expected["w"]["sent"][t][worker]
                )
        close(state.velocity["b"][0], expected["b"]["u"][t][0])
    assert int(state.step[0]) == len(gradients) and int(state.num_workers[0]) == N


def test_before_the_ramp_it_is_momentum():
    """The dense phase is the momentum optimizer on the mean gradient, and u is its velocity."""
    params = {"w": normal(0, 20, 20)}
    gradients = [{"w": normal(t, N, 20, 20)} for t in range(5)]
    for nesterov in (False, True):
        dgc = optfn.dgc_momentum(LR, 0.9, rampup_begin_step=9, nesterov=nesterov, min_size=1)
        series = follow(dgc, params, gradients)
        tx = optfn.momentum(LR, 0.9, nesterov=nesterov)
        p, state = params, tx.init(params)
        for (own, (kept, _)), g in zip(series, gradients, strict=True):
            p, state = one_step(tx, p, state, {"w": np.mean(g["w"], axis=0)})
            np.testing.assert_allclose(own["w"][1], p["w"], rtol=1e-6, atol=1e-6)
            velocity = state[0].velocity["w"].reshape(-1)
            np.testing.assert_allclose(
                kept.local_velocity.value["w"][2], velocity, rtol=1e-5, atol=1e-6
            )


@pytest.mark.parametrize(
    "name", ["plain", nightly("unmasked"), nightly("ramp"), nightly("bfloat16")]
)
def test_row_updates_are_the_dense_ones(name):
    """Rows where there is no ramp, arrays where there is one: params go the same way."""
    options = OPTIONS[name] | ({"rampup_begin_step": 0} if name != "ramp" else {})
    params, gradients = {"w": normal(0, 50, 40), "b": normal(1, 7)}, []
    for i in range(4):
        gradients.append({"w": normal(10 + i, N, 50, 40), "b": normal(20 + i, N, 7)})
    gradients[2]["w"][1, 3, 3] = np.nan  # skipped: rows that add nothing
    tx = optfn.dgc_momentum(0.1, 0.9, min_size=100, **options)
    kinds = set()

    def update(grads, state, params):
        updates, state = tx.update(grads, state, params, row_updates=True)
        kinds.add(type(updates["w"]))
        return updates, state

    found = follow(optax.GradientTransformationExtraArgs(tx.init, update), params, gradients)
    assert (kinds == {Rows}) == (name != "ramp")
    chex.assert_trees_all_close(found, follow(tx, params, gradients), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("wire", [nightly("float32"), "bfloat16"])
def test_nothing_is_lost(wire):
    """What a worker sent and what it keeps are bit for bit what it had accumulated."""
    n, k = 5000, 50
    tx = deep_gradient_compression(0.5, sparsity=(0.99,), min_size=1, wire=wire)
    state = stacked(tx.init(jnp.zeros(n)))
    update = jax.jit(jax.vmap(lambda g, s: tx.update(g, s), axis_name="data"))
    for t in range(4):
        g = normal(t, N, n)
        u, v = np.asarray(state.local_velocity.value), np.asarray(state.residual.value)
        direction, state = update(g, state)
        # 0.5·u is exact, so that a fused multiply-add rounds as NumPy does.
        accumulated = v + (np.float32(0.5) * u + g)
        kept = np.asarray(state.residual.value)
        sent = accumulated - kept
        assert ((sent != 0).sum(axis=1) == k).all()
        np.testing.assert_array_equal(sent.astype(np.float64) + kept, accumulated)
        assert (np.asarray(state.local_velocity.value)[sent != 0] == 0).all()
        total = np.zeros(n, np.float32)
        for own in sent:
            total += own
        np.testing.assert_array_equal(direction, np.stack([total / np.float32(N)] * N))
        if wire == "bfloat16":
            assert (sent.view(np.uint32) & 0xFFFF == 0).all()
            assert (kept[sent != 0] != 0).any()


def test_ramp_steps():
    """Each ramp step lasts rampup_step/len(sparsity) steps, the last for ever."""
    got = [int(ramp_step(jnp.int32(t), 10, 100, 5)) for t in (10, 29, 30, 89, 90, 110, 10**9)]
    assert got == [0, 0, 1, 3, 4, 4, 4]
    assert int(ramp_step(jnp.int32(7), 7, 1, 3)) == 0
    assert int(ramp_step(jnp.int32(8), 7, 1, 3)) == 2


def test_the_ramp_branches_under_vmap():
    """The workers of a simulation share phase and ramp step: only one of each is run."""
    params = {"w": jnp.zeros(900)}
    ramp = {"rampup_begin_step": 1, "rampup_step": 4, "sparsity": (0.5, 0.9, 0.99, 0.999)}
    tx = deep_gradient_compression(0.9, min_size=1, **ramp)
    run = jax.vmap(lambda g, s: tx.update(g, s), axis_name="data")
    program = jax.make_jaxpr(run)({"w": jnp.zeros((N, 900))}, stacked(tx.init(params)))
    found = [
        len(e.params["branches"]) for e in equations(program.jaxpr) if e.primitive.name == "cond"
    ]
    assert sorted(found)[-2:] == [3, 4]


def equations(program):
    """Yield the equations of a program, and of those within it."""
    for equation in program.eqns:
        yield equation
        for inner in jax.tree.leaves(tuple(equation.params.values()), is_leaf=is_program):
            if is_program(inner):
                yield from equations(getattr(inner, "jaxpr", inner))


def is_program(x):
    return hasattr(x, "jaxpr") or hasattr(x, "eqns")


# Where it runs


def on_mesh(tx, params, gradients, check_vma):
    """Return what `shard_map` makes of it: flat per-worker leaves over the axis."""
    mesh = optfn.distributed.data_mesh(N)
    state = tx.init(params)
    flat = functools.partial(jax.tree.map, lambda x: jnp.tile(x, N))
    own = {"local_velocity": flat(state[0].local_velocity), "residual": flat(state[0].residual)}
    state = (state[0]._replace(**own), *state[1:])
    spec = DeepGradientCompressionState(*[P()] * 4, P("data"), P("data"), P(), P())

    def body(params, state, grads):
        return one_step(tx, params, state, jax.tree.map(lambda x: x[0], grads))

    run = jax.jit(
        jax.shard_map(
            body,
            mesh=mesh,
            in_specs=(P(), (spec, P()), P("data")),
            out_specs=(P(), (spec, P())),
            check_vma=check_vma,
        )
    )
    for g in gradients:
        params, state = run(params, state, g)
    return params, state


def test_all_ways_to_run_agree():
    """vmap, pmap, shard_map with and without check_vma; an integer leaf is held."""
    params = {"w": normal(0, 30, 50), "b": normal(1, 7), "n": jnp.arange(3)}
    gradients = [
        {"w": normal(10 + t, N, 30, 50), "b": normal(50 + t, N, 7), "n": None} for t in range(6)
    ]
    options = {"rampup_begin_step": 1, "rampup_step": 4, "sparsity": (0.5, 0.99)}
    tx = optfn.dgc_momentum(LR, 0.9, min_size=100, nesterov=True, **options)
    want = jax.tree.map(lambda x: x[0], follow(tx, params, gradients)[-1][0])
    p, s = stacked(params), stacked(tx.init(params))
    step = jax.pmap(functools.partial(one_step, tx), axis_name="data")
    for g in gradients:
        p, s = step(p, s, g)
    for worker in range(N):  # replicas are the same bits
        chex.assert_trees_all_equal(*(jax.tree.map(lambda x, w=w: x[w], p) for w in (0, worker)))
    chex.assert_trees_all_close(jax.tree.map(lambda x: x[0], p), want, rtol=1e-5, atol=1e-6)
    for check_vma in (True, False):
        got, state = on_mesh(tx, params, gradients, check_vma)
        chex.assert_trees_all_close(jax.device_get(got), want, rtol=1e-5, atol=1e-6)
        assert state[0].residual.value["w"].shape == (N * 1500,)
        np.testing.assert_array_equal(got["n"], params["n"])


@pytest.mark.nightly
@pytest.mark.parametrize("check_vma", [True, False])
def test_several_axes(check_vma):
    """Workers along two axes; and a dense mean inside a host before the exchange across hosts."""
    mesh = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("host", "device"))
    grads, params = normal(0, 4, 600), jnp.zeros(600)

    def run(**options):
        tx = deep_gradient_compression(0.9, sparsity=(0.99,), min_size=1, **options)
        own = P(options["axis_name"])
        state = tx.init(params)
        workers = 2 if "reduce_axis_name" in options else 4
        tiled = PerWorker(jnp.zeros(600 * workers))
        state = state._replace(local_velocity=tiled, residual=tiled)
        spec = DeepGradientCompressionState(*[P()] * 4, own, own, P(), P())
        body = jax.shard_map(
            lambda g, s: tx.update(g[0], s),
            mesh=mesh,
            in_specs=(P(("host", "device")), spec),
            out_specs=(P(), spec),
            check_vma=check_vma,
        )
        return jax.jit(body)(grads, state)

    def simulated(grads):
        tx = deep_gradient_compression(0.9, sparsity=(0.99,), min_size=1)
        state = stacked(tx.init(params), len(grads))
        update = jax.vmap(lambda g, s: tx.update(g, s), axis_name="data")
        return jax.jit(update)(grads, state)[0][0]

    direction, state = run(axis_name=("host", "device"))
    np.testing.assert_allclose(direction, simulated(grads), rtol=1e-6, atol=1e-7)
    assert int(state.num_workers) == 4
    direction, state = run(axis_name="host", reduce_axis_name="device")
    np.testing.assert_allclose(
        direction, simulated(grads.reshape(2, 2, 600).mean(axis=1)), rtol=1e-6, atol=1e-7
    )
    assert int(state.num_workers) == 2


def test_an_axis_that_is_not_bound():
    tx = optfn.dgc_momentum(LR, 0.9, rampup_begin_step=0)
    params = jnp.zeros(20000)
    with pytest.raises(ValueError, match=r"axis 'data' is not bound.*shard_map, pmap or vmap"):
        tx.update(params, tx.init(params), params)


def test_averaged_gradients_are_refused():
    """Under check_vma JAX sums the gradient of replicated parameters by itself."""
    tx = deep_gradient_compression(0.9, min_size=1)
    params, x = {"w": jnp.ones(8)}, normal(0, N, 8)
    state, mesh = tx.init(params), optfn.distributed.data_mesh(N)

    def run(prepare):
        def body(params, x):
            g = jax.grad(lambda p: jnp.sum(p["w"] * x[0]))(prepare(params))
            return tx.update(g, state, params)[0]

        run = jax.shard_map(body, mesh=mesh, in_specs=(P(), P("data")), out_specs=P())
        return jax.jit(run)(params, x)

    with pytest.raises(
        ValueError, match=r"'w' is already summed or averaged.*pcast.*check_vma=False"
    ):
        run(lambda p: p)
    chex.assert_tree_all_finite(run(lambda p: jax.lax.pcast(p, "data", to="varying")))


# What is not compressed, and what is skipped


def test_attributes_of_parameters():
    """A held leaf stays; factors of the rate and own penalties reach compressed leaves."""
    params = {k: normal(i, 200) for i, k in enumerate(["held", "slow", "free", "rest"])}
    attrs = {
        "held": optfn.ParamAttr(trainable=False),
        "slow": optfn.ParamAttr(learning_rate=0.5),
        "free": optfn.ParamAttr(regularization=None),
    }
    ramp = {"rampup_begin_step": 0, "sparsity": (0.9,)}
    options = ramp | {"regularization": optfn.l2_decay(0.1), "param_attrs": attrs}
    with warned(options):
        tx = optfn.dgc_momentum(LR, 0.9, min_size=1, **options)
    g = {k: normal(10 + i, 3, N, 200) for i, k in enumerate(params)}
    p, _ = follow(tx, params, [{k: g[k][t] for k in g} for t in range(3)])[-1]
    np.testing.assert_array_equal(p["held"][0], params["held"])
    for k, rate, l2 in (("slow", LR / 2, 0.1), ("free", LR, 0.0), ("rest", LR, 0.1)):
        want = reference.leaf(params[k], g[k], learning_rate=rate, momentum=0.9, l2=l2, **ramp)
        np.testing.assert_allclose(p[k][0], want["p"][-1], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("bad", "begin"), [(np.nan, 0), nightly(np.nan, 9), (np.inf, 9), nightly(np.inf, 0)]
)
def test_a_gradient_that_is_not_finite_is_skipped_by_all(bad, begin):
    """One bad element on one worker: params and state, that of the penalty too, are unchanged, and
    the skip is counted."""
    params = {"w": normal(0, 300), "b": -np.zeros(3, np.float32)}
    g = {"w": normal(1, N, 300), "b": normal(2, N, 3)}
    spoiled = {k: x.copy() for k, x in g.items()}
    spoiled["w"][2, 7] = bad
    ramp = {"rampup_begin_step": begin, "sparsity": (0.98,)}
    counting = optax.scale_by_schedule(lambda step: 1.0 + step)  # a penalty that has a state
    tx = optfn.dgc_momentum(LR, 0.9, min_size=100, regularization=counting, **ramp)
    (p1, s1), (p2, s2), (p3, s3) = follow(tx, params, [g, spoiled, g])
    for before, after in ((p1, p2), (s1[0]._replace(skipped=0), s2[0]._replace(skipped=0))):
        chex.assert_trees_all_equal(before, after)
        chex.assert_trees_all_equal(*(jax.tree.map(np.signbit, x) for x in (before, after)))
    assert s2[0].skipped.tolist() == [1] * N
    clean_p, clean_s = follow(tx, params, [g, g])[-1]
    chex.assert_trees_all_equal(p3, clean_p)
    chex.assert_trees_all_equal(s3[0]._replace(skipped=0), clean_s[0]._replace(skipped=0))


@pytest.mark.filterwarnings("ignore:.*all workers have the same gradient")
@pytest.mark.parametrize("wire", [nightly("float32"), "bfloat16"])
def test_an_accumulator_that_overflows_is_emptied(wire):
    """Finite gradients whose velocity is not: what was sent does not stay behind as a NaN."""
    tx = deep_gradient_compression(0.9, sparsity=(0.5,), min_size=1, wire=wire)
    update = jax.jit(jax.vmap(lambda g, s: tx.update(g, s), axis_name="data"))
    state = stacked(tx.init(jnp.zeros(2)), 2)
    for _ in range(2):  # of two equal ones the first is sent, the second grows
        direction, state = update(jnp.full((2, 2), 3e38), state)
    assert np.isinf(direction[0, 1])
    for _ in range(2):  # the first one is sent in its turn
        direction, state = update(jnp.ones((2, 2)), state)
        assert all(np.isfinite(x).all() for x in jax.tree.leaves(state))
    assert np.isfinite(direction).all()


@pytest.mark.nightly
@pytest.mark.parametrize("wire", ["float32", "bfloat16"])
def test_rows_of_float32_leaves_under_x64(wire):
    """Without a ramp received entries stay rows: a skipped step has rows of the same dtype."""
    x = np.asarray(normal(0, 8, 512))
    found = []
    for x64 in (False, True):
        with jax.enable_x64(x64):
            step = optfn.make_train_step(
                lambda p, x: jnp.mean((x @ p["w"] - 1) ** 2),
                optfn.dgc_momentum(0.1, 0.9, rampup_begin_step=0, wire=wire),
                mesh=optfn.distributed.data_mesh(8),
            )
            state = step.init({"w": np.zeros((512, 64), np.float32)})
            for _ in range(3):
                state, _ = step(state, np.asarray(x, np.float32))
            found.append(np.asarray(state.params["w"]))
    np.testing.assert_allclose(found[1], found[0], rtol=1e-5, atol=1e-6)


@pytest.mark.filterwarnings("ignore:Explicitly requested dtype float64")
def test_narrow_and_numpy_parameters():
    """u and v are float32 whatever the dtypes; updates come in that of the parameter."""
    params = {"narrow": jnp.ones(200, jnp.bfloat16), "host": np.ones(200)}
    tx = optfn.dgc_momentum(LR, 0.9, rampup_begin_step=0, sparsity=(0.98,), min_size=100)
    g = {"narrow": jnp.asarray(normal(0, N, 200), jnp.bfloat16), "host": normal(1, N, 200)}
    state = stacked(tx.init(params))
    updates, new = jax.vmap(lambda g, s: tx.update(g, s, params), axis_name="data")(g, state)
    chex.assert_trees_all_equal_dtypes(new, state)
    assert updates["narrow"].dtype == jnp.bfloat16 and updates["host"].dtype == jnp.float32
    u, v = new[0].local_velocity.value, new[0].residual.value
    assert v["narrow"].dtype == u["host"].dtype == jnp.float32
    own = np.asarray(g["narrow"], np.float64)
    want = reference.leaf(
        np.ones(200),
        own[None],
        learning_rate=LR,
        momentum=0.9,
        rampup_begin_step=0,
        sparsity=(0.98,),
    )
    np.testing.assert_allclose(1 + updates["narrow"][0], want["p"][0], rtol=0.01)
    np.testing.assert_array_equal(new[0].residual.value["narrow"] == 0, want["sent"][0])


def test_wider_leaves_are_dense():
    with jax.enable_x64(True):
        state = deep_gradient_compression(0.9, min_size=1).init(
            {"wide": jnp.zeros(9, jnp.float64), "narrow": jnp.zeros(9, jnp.bfloat16)}
        )
    assert state.velocity["wide"].dtype == np.float64
    assert state.residual.value["narrow"].dtype == np.float32
    assert {"wide"} == {k for k, x in state.velocity.items() if hasattr(x, "shape")}


def test_state_of_other_params():
    tx = deep_gradient_compression(0.9, min_size=1)
    state = stacked(tx.init({"w": jnp.zeros(5)}))
    run = jax.vmap(lambda g, s: tx.update(g, s), axis_name="data")
    with pytest.raises(ValueError, match=r"'w' must have shape \(6,\); got \(5,\).*init_state"):
        run({"w": jnp.zeros((N, 6))}, state)


def test_masking_at_a_high_density_warns():
    """Only where the last ramp step sends more than 2 %, and only with masking."""
    with pytest.warns(UserWarning, match=r"0\.1 of all entries.*momentum_masking=False"):
        optfn.dgc_momentum(LR, 0.9, rampup_begin_step=0, sparsity=(0.99, 0.9))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optfn.dgc_momentum(LR, 0.9, rampup_begin_step=0, sparsity=(0.5, 0.98))
        optfn.dgc_momentum(LR, 0.9, rampup_begin_step=0, sparsity=(0.5,), momentum_masking=False)


def test_the_signature_is_the_promised_one():
    got = inspect.signature(optfn.dgc_momentum).parameters
    promised = {
        "rampup_step": 1,
        "sparsity": (0.999,),
        "nesterov": False,
        "local_grad_clip_norm": None,
        "regularization": None,
        "axis_name": "data",
        "min_size": 16384,
        "momentum_masking": True,
        "wire": "float32",
        "param_attrs": None,
    }
    assert list(got)[:3] == ["learning_rate", "momentum", "rampup_begin_step"]
    assert all(p.kind is inspect.Parameter.KEYWORD_ONLY for p in list(got.values())[2:])
    assert promised == {k: got[k].default for k in promised}


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        ({"momentum": 1.0}, ValueError, r"momentum must be .*1\.0"),
        ({"sparsity": 0.9}, TypeError, r"sparsity must be a sequence.*got 0\.9"),
        ({"sparsity": ()}, TypeError, "sparsity must be a sequence"),
        ({"sparsity": (0.5, 1.0)}, ValueError, r"sparsity.*1\.0"),
        ({"sparsity": (jnp.float32(0.5),)}, TypeError, "sparsity must consist of Python numbers"),
        ({"rampup_step": 2**30, "sparsity": (0.5, 0.9)}, ValueError, "rampup_step times.*int32"),
        ({"rampup_step": 0}, ValueError, "rampup_step must be >= 1; got 0"),
        ({"rampup_begin_step": -1}, ValueError, "rampup_begin_step must be >= 0"),
        ({"wire": "int8"}, ValueError, "wire must be one of 'float32', 'bfloat16'; got 'int8'"),
        ({"local_grad_clip_norm": 0.0}, ValueError, "local_grad_clip_norm must be > 0"),
        ({"regularization": 0.1}, TypeError, "regularization must be a gradient transformation"),
        ({"min_size": 0}, ValueError, "min_size must be >= 1"),
    ],
)
def test_bad_arguments(options, error, match):
    with pytest.raises(error, match=match):
        deep_gradient_compression(**({"momentum": 0.9} | options))


def test_simulated_workers_lose_no_gradient():
    """Under vmap, what was sent and the residuals are the sum of all gradients."""
    workers, steps, rate = 4, 5, 1e-3
    g = np.random.default_rng(0).normal(size=(workers, 8, 128)).astype(np.float32)
    tx = optfn.dgc_momentum(
        rate, 0.0, rampup_begin_step=0, sparsity=[0.99], axis_name="data", min_size=16
    )
    params = {"w": jnp.zeros((8, 128))}
    state = jax.tree.map(lambda x: jnp.broadcast_to(x, (workers, *x.shape)), tx.init(params))
    update = jax.jit(jax.vmap(lambda g, s: tx.update({"w": g}, s, params), axis_name="data"))
    sent = np.zeros((8, 128))
    for _ in range(steps):
        updates, state = update(g, state)
        sent -= np.asarray(updates["w"][0], np.float64) / rate
    residual = np.float64(state[0].residual.value["w"]).mean(0).reshape(8, 128)
    np.testing.assert_allclose(sent + residual, steps * g.astype(np.float64).mean(0), atol=1e-3)
