"""Deep Gradient Compression against its float64 reference, and what it promises beyond numbers."""

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
from grids import nightly
from jax.sharding import PartitionSpec as P
from recorded import arrays, leaves
from simulation import follow, simulated, stacked

import optfn
from optfn.compression.bytes_sent import ramp_step
from optfn.distributed import deep_gradient_compression
from optfn.loss.jaxprs.primitives import walk
from optfn.tables.rows import Rows

N = 4
LR = 0.1


def test_follows_the_reference():
    """Parameters, u and v of each worker at each step, with values in bfloat16 on the wire."""
    options = {
        "rampup_begin_step": 2,
        "rampup_step": 4,
        "sparsity": (0.75, 0.99),
        "nesterov": True,
        "local_grad_clip_norm": 30.0,
        "wire": "bfloat16",
    }
    params = {"w": normal(0, 40, 30), "b": normal(1, 6)}
    gradients = [{"w": normal(10 + t, N, 40, 30), "b": normal(50 + t, N, 6)} for t in range(10)]
    tx = optfn.dgc_momentum(LR, 0.9, min_size=100, regularization=optfn.l2_decay(0.01), **options)
    series = follow(tx, params, gradients)
    expected = {
        k: reference.leaf(
            params[k].reshape(-1),
            np.stack([g[k].reshape(N, -1) for g in gradients]),
            learning_rate=LR,
            momentum=0.9,
            l2=0.01,
            compressed=k == "w",
            **options,
        )
        for k in params
    }
    close = functools.partial(np.testing.assert_allclose, rtol=2e-5, atol=2e-5)
    for t, (p, (state, _)) in enumerate(series):
        for worker in range(N):
            for k in params:
                close(p[k][worker].reshape(-1), expected[k]["p"][t])
            close(state.local_velocity.value["w"][worker], expected["w"]["u"][t][worker])
            close(state.residual.value["w"][worker], expected["w"]["v"][t][worker])
        close(state.velocity["b"][0], expected["b"]["u"][t][0])
    assert int(state.step[0]) == len(gradients) and int(state.num_workers[0]) == N


@pytest.mark.nightly
@pytest.mark.parametrize(("begin", "sparsity"), [(0, (0.99,)), (2, (0.5, 0.9, 0.999))])
def test_row_updates_are_the_dense_ones(begin, sparsity):
    """Rows where there is no ramp, arrays where there is one: params go the same way."""
    params, gradients = {"w": normal(0, 50, 40), "b": normal(1, 7)}, []
    for i in range(4):
        gradients.append({"w": normal(10 + i, N, 50, 40), "b": normal(20 + i, N, 7)})
    gradients[2]["w"][1, 3, 3] = np.nan  # skipped: rows that add nothing
    ramp = {"rampup_begin_step": begin, "rampup_step": 6, "sparsity": sparsity}
    tx = optfn.dgc_momentum(0.1, 0.9, min_size=100, **ramp)
    kinds = set()

    def update(grads, state, params):
        updates, state = tx.update(grads, state, params, row_updates=True)
        kinds.add(type(updates["w"]))
        return updates, state

    found = follow(optax.GradientTransformationExtraArgs(tx.init, update), params, gradients)
    assert (kinds == {Rows}) == (begin == 0)
    chex.assert_trees_all_close(found, follow(tx, params, gradients), rtol=1e-6, atol=1e-6)


def test_nothing_is_lost():
    """What a worker sent and what it keeps are bit for bit what it had accumulated."""
    n, k = 5000, 50
    tx = deep_gradient_compression(0.5, sparsity=(0.99,), min_size=1, wire="bfloat16")
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
        assert (sent.view(np.uint32) & 0xFFFF == 0).all()  # bfloat16
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
    found = [len(e.params["branches"]) for e in walk(program.jaxpr) if e.primitive.name == "cond"]
    assert sorted(found)[-2:] == [3, 4]


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
    with pytest.warns(UserWarning, match="little momentum remains"):
        tx = optfn.dgc_momentum(LR, 0.9, min_size=1, **options)
    g = {k: normal(10 + i, 3, N, 200) for i, k in enumerate(params)}
    p, _ = follow(tx, params, [{k: g[k][t] for k in g} for t in range(3)])[-1]
    np.testing.assert_array_equal(p["held"][0], params["held"])
    for k, rate, l2 in (("slow", LR / 2, 0.1), ("free", LR, 0.0), ("rest", LR, 0.1)):
        want = reference.leaf(params[k], g[k], learning_rate=rate, momentum=0.9, l2=l2, **ramp)
        np.testing.assert_allclose(p[k][0], want["p"][-1], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("bad", "begin"), [nightly(np.nan, 0), (np.inf, 9)])
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
def test_an_accumulator_that_overflows_is_emptied():
    """Finite gradients whose velocity is not: what was sent does not stay behind as a NaN."""
    tx = deep_gradient_compression(0.9, sparsity=(0.5,), min_size=1, wire="bfloat16")
    update = jax.jit(jax.vmap(lambda g, s: tx.update(g, s), axis_name="data"))
    state = stacked(tx.init(jnp.zeros(2)), 2)
    for _ in range(2):  # of two equal ones the first is sent, the second grows
        direction, state = update(jnp.full((2, 2), 3e38), state)
    assert np.isinf(direction[0, 1])
    for _ in range(2):  # the first one is sent in its turn
        direction, state = update(jnp.ones((2, 2)), state)
        assert all(np.isfinite(x).all() for x in jax.tree.leaves(state))
    assert np.isfinite(direction).all()


@pytest.mark.filterwarnings("ignore:Explicitly requested dtype float64")
def test_narrow_and_numpy_parameters():
    """u and v are float32 whatever the dtypes; updates come in that of the parameter."""
    params = {"narrow": jnp.ones(200, jnp.bfloat16), "host": np.ones(200)}
    tx = optfn.dgc_momentum(LR, 0.9, rampup_begin_step=0, sparsity=(0.98,), min_size=100)
    g = {"narrow": jnp.asarray(normal(0, N, 200), jnp.bfloat16), "host": normal(1, N, 200)}
    state = stacked(tx.init(params))
    run = jax.jit(jax.vmap(lambda g, s: tx.update(g, s, params), axis_name="data"))
    updates, new = run(g, state)
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


# Beside the recordings of Paddle's operators: float32 as users compile it


@pytest.mark.optimized
@pytest.mark.parametrize("nesterov", [False, nightly(True)])
def test_follows_paddles_momentum(nesterov):
    """Momentum on the mean before the ramp; after it what arrives is applied as it is."""
    name = "fluid18_dgc_momentum_op" + ("_nesterov" if nesterov else "")
    params = leaves(name, "p0")
    # Paddle's gradient is the sum of two workers'.
    sums = leaves(name, "g")
    with pytest.warns(UserWarning, match="little momentum remains"):
        tx = optfn.dgc_momentum(
            0.1, 0.9, rampup_begin_step=6, sparsity=(0.0,), nesterov=nesterov, min_size=1
        )
    step, p, s = simulated(tx), stacked(params, 2), stacked(tx.init(params), 2)
    for t in range(20):
        own = {k: np.stack([0.25 * g[t], 0.75 * g[t]]) for k, g in sums.items()}
        if t == 6:  # the operator leaves out what the workers accumulate before they send
            velocity = s[0].local_velocity
            s = (s[0]._replace(local_velocity=jax.tree.map(jnp.zeros_like, velocity)), s[1])
        if t >= 6 and nesterov:
            break  # there u = μ(u + g) is added to g on the worker
        p, s = step(p, s, own)
        for k in params:
            np.testing.assert_allclose(p[k][1], leaves(name, "p")[k][t], rtol=1e-5, atol=1e-6)
            if t < 6:
                want = arrays(name)[f"s/velocity/{k}"][t].reshape(-1)
                np.testing.assert_allclose(
                    s[0].local_velocity.value[k][0], want, rtol=1e-5, atol=1e-6
                )


@pytest.mark.optimized
def test_follows_paddles_clip():
    name = "fluid18_dgc_clip_by_norm_op"
    tx = deep_gradient_compression(0.0, sparsity=(0.0,), local_grad_clip_norm=1.0, min_size=1)
    update = jax.jit(jax.vmap(lambda g, s: tx.update(g, s)[0], axis_name="data"))
    for g, out in zip(leaves(name, "g")["x"], leaves(name, "out")["x"], strict=True):
        state = stacked(tx.init(jnp.asarray(g)), 1)
        np.testing.assert_allclose(update(g[None], state)[0], out, rtol=1e-5, atol=1e-6)
