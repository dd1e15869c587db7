"""Row-sparse gradients: equal to the dense ones, and never as large as the table."""

import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import registry
from catalogue import OPTIMIZERS
from grids import nightly, suite
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from problems import steps
from recorded import CASES, arrays, build, translate
from references import RULES

import optfn
from optfn import sparse
from optfn.core import leafwise
from optfn.tables import rows
from optfn.transforms.catch_up_adam import caught_up

ROWS, WIDTH = 40, 3


def normal(seed, *shape):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def make_params():
    return {"table": normal(0, ROWS, WIDTH), "w": normal(1, WIDTH, 2), "step": np.arange(3)}


def loss_fn(params, ids, target):
    """Lookups of several shapes, inside jit and vmap as well."""
    table = params["table"]
    one = table[ids] @ params["w"]
    two = jax.vmap(lambda i: table[i] ** 2, in_axes=1)(ids)
    three = jax.jit(lambda table, i: jnp.tanh(table[i]))(table, ids[0, 0])
    return jnp.mean((one - target) ** 2) + jnp.mean(two) * jnp.sum(three)


DENSE = jax.jit(jax.value_and_grad(loss_fn, allow_int=True))
IDS = np.array([[1, 2, 2, 7], [-1, 39, 2, 0]])
TARGET = normal(2, 2, 4, 2)


def densified(grads):
    return leafwise.densify_rows(grads)


SPARSE_GRADIENT = jax.jit(sparse.value_and_grad(loss_fn, "table"))


def test_equal_to_the_dense_gradient():
    value, grads = SPARSE_GRADIENT(make_params(), IDS, TARGET)
    want, dense = DENSE(make_params(), IDS, TARGET)
    assert isinstance(grads["table"], sparse.Rows)
    assert grads["table"].indices.shape == (17,) and grads["table"].values.shape == (17, WIDTH)
    assert grads["step"].dtype == jax.dtypes.float0
    np.testing.assert_allclose(value, want, rtol=1e-6)
    chex.assert_trees_all_close(
        {k: densified(grads)[k] for k in ("table", "w")},
        {k: dense[k] for k in ("table", "w")},
        rtol=1e-5,
        atol=1e-7,
    )


def test_aux_keywords_and_a_table_that_is_not_looked_up():
    def loss(params, *, ids):
        return jnp.sum(params["a"][ids]), ids + 1

    params = {"a": normal(0, 5, 2), "b": normal(1, 6, 2)}
    fn = jax.jit(sparse.value_and_grad(loss, "a|b", has_aux=True))
    (value, aux), grads = fn(params, ids=np.array([4]))
    assert float(value) == pytest.approx(float(params["a"][4].sum()))
    assert aux.tolist() == [5]
    np.testing.assert_array_equal(grads["b"].dense(), np.zeros((6, 2)))


FORMS = {
    "an array of ids": lambda t, ids: t[ids],
    "ids of two axes": lambda t, ids: t[ids.reshape(2, -1)],
    "an id": lambda t, ids: jnp.stack([t[ids[k]] for k in range(ids.size)]),
    "a Python id": lambda t, ids: jnp.stack([t[k] for k in (7, -9, 5, -6, 0, -1)]),
    "NumPy's ids": lambda t, ids: t[np.array([7, -9, 5, -6, 0, -1])],
    "vmap of an id": lambda t, ids: jax.vmap(lambda i: t[i])(ids),
    "vmap of vmap": lambda t, ids: jax.vmap(jax.vmap(lambda i: t[i]))(ids.reshape(2, -1)),
    "vmap of an array": lambda t, ids: jax.vmap(lambda i: t[i])(ids.reshape(2, -1)),
    "jit of an id": lambda t, ids: jax.jit(lambda t, i: t[i])(t, ids[0]),
    "short ids": lambda t, ids: t[ids.astype(jnp.int8)] + t[ids[1].astype(jnp.int8)],
    "unsigned ids": lambda t, ids: t[jnp.abs(ids).astype(jnp.uint8)],
    "all axes": lambda t, ids: t[ids, :],
    "take": lambda t, ids: jnp.nan_to_num(jnp.take(t, ids, axis=0)),
    "take of clipped ids": lambda t, ids: jnp.take(t, ids, axis=0, mode="clip"),
    "take of wrapped ids": lambda t, ids: jnp.take(t, ids, axis=0, mode="wrap"),
    "vmap of take": lambda t, ids: jax.vmap(lambda i: jnp.take(t, i, axis=0, fill_value=1))(ids),
    "at": lambda t, ids: t.at[ids].get(mode="fill", fill_value=2),
    "slices": lambda t, ids: jnp.stack([jax.lax.dynamic_slice(t, (k, 0), (1, WIDTH)) for k in ids]),
    "a cast": lambda t, ids: t.astype(jnp.float16)[ids].astype(jnp.float32),
    "two casts": lambda t, ids: t.astype("float16").astype(jnp.float32)[ids] + t[ids],
    "one of two": lambda t, ids: t[ids] + jax.lax.stop_gradient(t)[ids[::-1]],
    "checkpoint": lambda t, ids: jax.checkpoint(lambda t, i: jnp.sin(t[i]))(t, ids),
    "checkpoints": lambda t, ids: jax.checkpoint(jax.vmap(jax.checkpoint(lambda i: t[i])))(ids),
    "a dead use": lambda t, ids: (t.sum(), t[ids])[1],
}


@pytest.mark.parametrize(
    "name",
    suite(
        FORMS, "vmap of vmap", "jit of an id", "short ids", "take of wrapped ids", "vmap of take",
        "at", "slices", "a cast", "one of two", "checkpoints",
    ),
)  # fmt: skip
def test_each_form_of_a_lookup_treats_ids_as_an_array_does(name):
    """Out of range at both ends, negative and ordinary; every row has a weight of its own."""
    ids = jnp.array([7, -9, 5, -6, 0, -1])  # of a table of five rows

    def loss(params, ids):
        found = FORMS[name](params["table"], ids)
        return jnp.sum(found * jnp.arange(1.0, found.size + 1).reshape(found.shape))

    params = {"table": normal(0, 5, WIDTH)}
    value, grads = jax.jit(sparse.value_and_grad(loss, "table"))(params, ids)
    want, dense = jax.jit(jax.value_and_grad(loss))(params, ids)
    assert float(value) == pytest.approx(float(want), rel=1e-5)
    rtol = 2e-3 if "cast" in name else 1e-6  # the dense gradient is added up in float16
    np.testing.assert_allclose(grads["table"].dense(), dense["table"], rtol=rtol)


def test_one_dimensional_and_wide_tables():
    def loss(params, ids):
        return jnp.sum(jnp.sin(params["bias"][ids])) + jnp.sum(params["wide"][ids] ** 2)

    params, ids = {"bias": normal(0, 9), "wide": normal(1, 9, 2, 3)}, np.array([[0, 8], [8, 8]])
    grads = jax.jit(sparse.value_and_grad(loss, ".*"))(params, ids)[1]
    want = jax.jit(jax.grad(loss))(params, ids)
    chex.assert_trees_all_close(densified(grads), want, rtol=1e-6)


MISUSES = {
    "method": (lambda t: t.sum(), "only be looked up.*reduce_sum; .*test_sparse.py:"),
    "numpy": (lambda t: np.asarray(t).sum(), "[Tt]racer"),
    "operator": (lambda t: (t * 2)[0].sum(), "only be looked up.*mul"),
    "matmul": (lambda t: jnp.sum(jnp.ones((1, ROWS)) @ t), "only be.*dot_general: a matrix"),
    "tied": (lambda t: jnp.sum(t[:1] @ t.T), "only be looked up.*transpose: a matrix product"),
    "tree": (lambda t: sum(jnp.sum(x) for x in jax.tree.leaves(t)), "only be.*reduce_sum"),
    "returned": (lambda t: t, "only be looked up.*returned"),
    "cast, returned": (lambda t: t.astype(jnp.bfloat16), "only be looked up.*returned"),
    "cast, used": (lambda t: t.astype(jnp.bfloat16).sum(), "only be looked up.*reduce_sum"),
    "truth": (lambda t: 1.0 if t[0, 0] else 0.0, "[Tt]racer"),
    "slice": (lambda t: t[:3].sum(), "only be.*slice of other parts than whole rows"),
    "entries": (lambda t: t[jnp.arange(2), 1].sum(), "only be.*gather of other parts than whole"),
    "float": (lambda t: t[jnp.ones(2)].sum(), "float32"),
    "scan": (
        lambda t: jax.lax.scan(lambda c, i: (c + t[i].sum(), None), 0.0, jnp.arange(3))[0],
        "inside the body of scan.*test_sparse.py:.*Look the rows up before it",
    ),
    "cond": (
        lambda t: jax.lax.cond(jnp.sum(jnp.ones(2)) > 0, lambda: t[0].sum(), lambda: 0.0),
        "inside the body of cond.*Look the rows up before it",
    ),
    "checkpoint": (lambda t: jax.checkpoint(lambda t: t.sum())(t), "only be.*reduce_sum"),
}


@pytest.mark.parametrize("name", MISUSES)
def test_other_uses_of_a_table_are_errors(name):
    use, message = MISUSES[name]
    with pytest.raises(TypeError, match=message) as error:
        sparse.value_and_grad(lambda p: use(p["table"]), "table")(make_params())
    assert name in ("numpy", "truth", "float") or "'table'" in str(error.value)


def test_tables_must_be_tables():
    for pattern, params, error, message in [
        ("t", {"t": jnp.arange(3)}, TypeError, "table 't' must be a floating-point array; got int"),
        ("t", {"t": jnp.ones(())}, TypeError, "table 't' must have rows"),
        ("t", {"t": jnp.ones((0, 2))}, TypeError, "table 't' must have rows"),
        ("u", {"t": jnp.ones((2, 2))}, ValueError, "the pattern 'u' matches no leaf"),
    ]:
        with pytest.raises(error, match=message):
            sparse.value_and_grad(lambda p: 0.0, pattern)(params)
    with pytest.raises(TypeError, match="tables must be a pattern"):
        sparse.value_and_grad(lambda p: 0.0, None)


def some_rows(seed=5, dtype=jnp.float32):
    """Repeated, unsorted, one padded."""
    indices = jnp.array([7, 2, 7, 39, ROWS, 0, 2, 7], jnp.int32)
    return sparse.Rows(indices, normal(seed, 8, WIDTH).astype(dtype), ROWS)


def test_a_table_whose_rows_int32_cannot_number_is_refused():
    table = {"t": jax.ShapeDtypeStruct((2**31, 1), jnp.float32)}
    ids, values = (jax.ShapeDtypeStruct((3, *x), d) for x, d in (((), jnp.int32), ((1,), float)))
    grad = optfn.sparse.value_and_grad(lambda p, i: jnp.sum(p["t"][i]), "t")
    with pytest.raises(ValueError, match="table 't' has 2,147,483,648 rows"):
        jax.eval_shape(grad, table, ids)
    rows = optfn.sparse.Rows
    clip = optfn.clip_by_global_norm(1.0)
    with pytest.raises(ValueError, match=r"gradient of .t. has 2,147,483,648 rows.*at most"):
        jax.eval_shape(lambda v: clip.update({"t": rows(jnp.arange(3), v, 2**31)}, ()), values)


def test_merging_adds_repeated_rows_up():
    r = some_rows()
    once = r.merge()
    assert once.indices.tolist() == [0, 2, 7, 39, ROWS, ROWS, ROWS, ROWS]
    want = np.zeros((ROWS + 1, WIDTH))
    np.add.at(want, np.asarray(r.indices), np.asarray(r.values, np.float64))
    np.testing.assert_allclose(once.dense(), want[:ROWS], rtol=1e-6)
    np.testing.assert_allclose(r.dense(), want[:ROWS], rtol=1e-6)
    empty = sparse.Rows(jnp.zeros(0, jnp.int32), jnp.zeros((0, WIDTH)), ROWS)
    assert empty.merge().indices.shape == (0,)


def test_params_plus_rows():
    p, r = normal(0, ROWS, WIDTH), some_rows()
    want = np.asarray(p) + np.asarray(r.dense())
    for found in (
        p + r,
        r + p,
        np.asarray(p) + r,
        optax.apply_updates({"t": p}, {"t": r})["t"],
        optfn.apply_updates({"t": p}, {"t": r})["t"],
    ):
        np.testing.assert_allclose(found, want, rtol=1e-6)
    # Narrow parameters: the sum of repeated rows is rounded once.
    narrow = p.astype(jnp.bfloat16)
    found = optfn.apply_updates({"t": narrow}, {"t": r})["t"]
    want = (narrow.astype(jnp.float32) + r.dense()).astype(jnp.bfloat16)
    np.testing.assert_array_equal(found, want)


def test_rows_of_a_reshaped_array_in_parts():
    """Entries of a matrix, in two parts that are added one after the other."""
    p = jnp.asarray(normal(0, 5, 8))
    indices = jnp.array([1, 9, 39, 40, 1, 2, 9, 40], jnp.int32)  # 40 is padding
    r = sparse.Rows(indices, jnp.asarray(normal(1, 8)), 40, parts=2).reshape((5, 8))
    want = np.append(np.asarray(p), 0.0)
    np.add.at(want, np.asarray(indices), np.asarray(r.values))
    assert (r.shape, r.ndim) == ((5, 8), 2)
    for found in (p + r, r.merge() + p, optfn.apply_updates(p, r), p + (r + r) - r.dense()):
        np.testing.assert_allclose(found, want[:40].reshape(5, 8), rtol=1e-5, atol=1e-6)
    once = r.merge()
    np.testing.assert_array_equal(rows.take_rows(p, once)[:4], np.ravel(p)[[1, 2, 9, 39]])
    np.testing.assert_array_equal(rows.put_rows(p, rows.take_rows(p, once), once), p)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((jnp.ones(2), jnp.ones((2, 3)), 9), TypeError, "indices must be int32; got dtype float32"),
        ((jnp.zeros(2, jnp.int32), jnp.ones((3, 3)), 9), ValueError, r"\(2,\) and \(3, 3\)"),
        ((jnp.zeros((2, 1), jnp.int32), jnp.ones((2, 3)), 9), ValueError, r"\(2, 1\) and \(2, 3\)"),
        ((jnp.zeros(2, jnp.int32), jnp.ones((2, 3), jnp.int32), 9), TypeError, "floating point"),
        (([0, 1], np.ones((2, 3)), -1), ValueError, "num_rows must be >= 0; got -1"),
        (([0, 1], np.ones((2, 3)), 2.5), TypeError, "num_rows must be a Python integer"),
    ],
)
def test_rows_are_checked_when_they_are_made(arguments, error, message):
    with pytest.raises(error, match=message):
        sparse.Rows(*arguments)


@pytest.mark.parametrize(
    ("num_rows", "width", "message"),
    [(ROWS + 1, WIDTH, r"is Rows of shape \(41, 3\)"), (ROWS, WIDTH + 1, r"of shape \(40, 4\)")],
)
def test_rows_of_another_table_are_errors_that_name_the_leaf(num_rows, width, message):
    grad = sparse.Rows(jnp.zeros(2, jnp.int32), jnp.ones((2, width)), num_rows)
    tx, params = optfn.adam(0.1, lazy=True), {"table": jnp.ones((ROWS, WIDTH))}
    words = f"'table' .*{message} and dtype float32; the parameter has .* \\(40, 3\\)"
    with pytest.raises(ValueError, match=words):
        tx.update({"table": grad}, tx.init(params), params)


def test_scaled_indices_are_refused():
    """What multiplies every array, such as a scale of optax, makes floats of the indices."""
    rows = sparse.Rows(jnp.zeros(2, jnp.int32), jnp.ones((2, WIDTH)), ROWS)
    scaled = jax.tree.map(lambda x: 0.5 * x, rows)
    tx, params = optfn.adam(0.1, lazy=True), {"table": jnp.ones((ROWS, WIDTH))}
    with pytest.raises(TypeError, match="'table' has indices of dtype float32; they must be int32"):
        tx.update({"table": scaled}, tx.init(params), params)


@pytest.mark.parametrize(
    "factory", [optfn.sgd, optfn.adam, lambda rate, **k: optfn.lars(rate, 0.9, **k)]
)
def test_indices_that_a_clip_of_optax_scales_are_refused(factory):
    rows = sparse.Rows(jnp.array([0, 2]), jnp.ones((2, WIDTH)), ROWS)
    tx, params = factory(0.1, grad_clip=optax.scale(0.5)), {"table": jnp.ones((ROWS, WIDTH))}
    with pytest.raises(TypeError, match=r"grad_clip takes no row-sparse.*'table'.*densify"):
        tx.update({"table": rows}, tx.init(params), params)


def gradients(seed):
    """A mixed tree: rows for the table, and the same densified."""
    grads = {"table": some_rows(seed), "w": normal(seed + 50, WIDTH, 2)}
    return grads, densified(grads)


def warned(tx, params, grads):
    with pytest.warns(UserWarning, match="becomes dense; it costs the whole table 'table'"):
        jax.eval_shape(lambda: tx.update(grads, tx.init(params), params))


@pytest.mark.parametrize("name", [k for k, row in OPTIMIZERS.items() if row.makes_rows_dense])
def test_rules_that_move_all_rows_say_so(name):
    params = {"table": normal(0, ROWS, WIDTH), "w": normal(1, WIDTH, 2)}
    warned(registry.OPTIMIZERS[name].make(), params, gradients(1)[0])


def test_a_regularizer_makes_rows_dense_and_says_so():
    params = {"table": normal(0, ROWS, WIDTH), "w": normal(1, WIDTH, 2)}
    tx = optfn.adam(0.1, lazy=True, regularization=optfn.l2_decay(0.1))
    warned(tx, params, gradients(1)[0])


@pytest.mark.parametrize("options", [{"l1": 0.3, "l2": 0.1}, {"lr_power": -0.7}], ids=str)
def test_ftrl_touches_the_rows_present_only(options):
    """Four steps; a row without gradient keeps all of its numbers bit for bit."""
    rng, indices, here = np.random.default_rng(0), np.array([7, 2, 7, ROWS, 7], np.int32), [2, 7]
    start = rng.normal(size=(ROWS, WIDTH)).astype(np.float32)
    tx, params = optfn.ftrl(0.1, **options), {"t": start}
    state, update = tx.init(params), jax.jit(tx.update)
    p, kept = start.astype(np.float64), {}
    for t in range(4):
        values = rng.normal(size=(len(indices), WIDTH)).astype(np.float32)
        updates, state = update({"t": sparse.Rows(indices, values, ROWS)}, state, params)
        assert isinstance(updates["t"], sparse.Rows)
        params = optfn.apply_updates(params, updates)
        total = np.zeros((ROWS + 1, WIDTH))
        np.add.at(total, indices, values)
        p[here], kept = RULES["ftrl"](p[here], total[here], kept, t + 1, 0.1, **options)
    np.testing.assert_allclose(params["t"], p, rtol=1e-4, atol=1e-5)
    others = np.setdiff1d(np.arange(ROWS), here)
    np.testing.assert_array_equal(params["t"][others], start[others])
    for name, x in kept.items():
        found = optfn.state_dict(state)[f"ftrl_proximal/{name}/t"]
        np.testing.assert_allclose(found[here], x, rtol=1e-4, atol=1e-4)
        assert not found[others].any()


def test_a_dense_gradient_ignores_lazy():
    params, grads = {"t": normal(0, 4, 2)}, {"t": normal(1, 4, 2)}
    results = []
    for lazy in (False, True, "exact"):
        results.append(steps(optfn.adam(0.1, lazy=lazy), params, [grads] * 3)[-1].params)
    chex.assert_trees_all_close(results[0], results[1], rtol=0)
    chex.assert_trees_all_close(results[0], results[2], rtol=1e-6)


@pytest.mark.parametrize("eps_hat", [nightly(False), True])
def test_exact_lazy_catches_up_with_dense_adam(eps_hat):
    """Moments equal at read-out; parameters of rows just touched within 1 % of the way."""
    steps, rate = 400, 0.01
    rng = np.random.default_rng(1)
    # Rows of unlike frequency; the last steps touch all.
    indices = np.minimum(rng.geometric(0.08, (steps, 4)) - 1, ROWS)
    indices = np.concatenate([np.pad(indices, ((0, 0), (0, ROWS - 4)), constant_values=ROWS)])
    indices[-1] = np.arange(ROWS)
    values = rng.normal(size=(steps, ROWS, WIDTH)) + 0.5
    start = {"t": jnp.zeros((ROWS, WIDTH))}

    def run(lazy):
        tx = optfn.adam(rate, lazy=lazy, eps_hat=eps_hat)

        def step(carry, g):
            p, state = carry
            updates, state = tx.update({"t": sparse.Rows(g[0], g[1], ROWS)}, state, p)
            return (optfn.apply_updates(p, updates), state), None

        xs = (jnp.asarray(indices, jnp.int32), jnp.asarray(values, jnp.float32))
        return jax.jit(lambda: jax.lax.scan(step, (start, tx.init(start)), xs)[0])()

    (dense, dense_state), (exact, exact_state) = run(False), run("exact")
    plain, _ = run(True)
    moments = caught_up(exact_state[0])
    np.testing.assert_allclose(moments.mu["t"], dense_state[0].mu["t"], rtol=1e-3, atol=1e-6)
    np.testing.assert_allclose(moments.nu["t"], dense_state[0].nu["t"], rtol=1e-3, atol=1e-6)
    way = float(jnp.abs(dense["t"]).max())
    assert float(jnp.abs(exact["t"] - dense["t"]).max()) < 0.01 * way
    assert float(jnp.abs(plain["t"] - dense["t"]).max()) > 0.1 * way


def test_lazy_takes_what_it_can_do():
    with pytest.raises(ValueError, match="lazy must be False, True or \"exact\"; got 'rows'"):
        optfn.adam(0.1, lazy="rows")
    with pytest.raises(ValueError, match="lazy=True needs float32 moments"):
        optfn.adam(0.1, lazy=True, moment_dtype="int8")
    with pytest.raises(ValueError, match="b1² must be < b2"):
        optfn.adam(0.1, 0.9, 0.5, lazy="exact")


SPARSE = [
    name
    for name, case in CASES.items()
    if case["family"] == "sparse" and "DO_NOT_USE" not in str(case["quirks"])
]


RECORDED = (
    "fluid18_sparse_sgd", "fluid18_sparse_adagrad", "fluid18_sparse_adam_lazy_nodup",
    "fluid18_sparse_lamb", "p26_sparse_momentum_k1", "p26_sparse_adagrad", "p33_sparse_adam_lazy",
    "p33_sparse_sgd",
)  # fmt: skip


@pytest.mark.filterwarnings("ignore:.*row-sparse gradient becomes dense")
@pytest.mark.parametrize("name", suite(SPARSE, *RECORDED))
def test_rows_follow_paddle(name):
    """Rows in, Paddle's trajectory out; of Adam, whose β powers Paddle runs ahead, the moments."""
    a, case = arrays(name), CASES[name]
    lazy = {"lazy": True} if case["hyper"].get("lazy_mode") else {}
    tx = build(translate(case), **lazy)
    params = {k.removeprefix("p0/"): v for k, v in a.items() if k.startswith("p0/")}
    dense = {k: a[f"g/{k}"] for k in params if k != "emb"}
    state = tx.init(params)
    step = jax.jit(tx.update)
    ahead = "beta_pow_one_step_ahead" in str(case["quirks"])
    for t in range(len(a["g/emb"])):
        g = {k: v[t] for k, v in dense.items()}
        rows_of_step = a["rows/emb"][t].astype(np.int32)
        g["emb"] = sparse.Rows(rows_of_step, a["values/emb"][t], len(params["emb"]))
        updates, state = step(g, state, params)
        params = optfn.apply_updates(params, updates)
        if not ahead:
            np.testing.assert_allclose(params["emb"], a["p/emb"][t], rtol=1e-3, atol=1e-5)
        for theirs, ours in {"moment1": "mu", "moment2": "nu"}.items():
            key = f"s/{theirs}/emb"
            if key in a:
                found = optfn.state_dict(state)[f"scale_by_adam/{ours}/emb"]
                np.testing.assert_allclose(found, a[key][t], rtol=1e-4, atol=1e-6, err_msg=f"{t}")


def big_loss(params, batch):
    x = params["table"][batch] @ params["w"]
    return jnp.mean(x**2)


@pytest.mark.optimized
@pytest.mark.parametrize(
    "make", [optfn.sgd, nightly(optfn.adagrad), optfn.adam, nightly(optfn.adamw), optfn.ftrl]
)
def test_a_step_makes_nothing_as_large_as_the_table(make):
    """The compiled step scatters into what is donated; its temporaries are of the batch's size."""
    size, batch = 20_000, 64
    params = {"table": jnp.ones((size, 32)), "w": jnp.ones((32, 4))}
    tx = make(0.1, lazy=True) if make in (optfn.adam, optfn.adamw) else make(0.1)
    step = optfn.make_train_step(big_loss, tx, tables="table")
    state = step.init(params)
    ids = jnp.arange(batch)
    compiled = step.compiled.lower(state, ids).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 20 * batch * 32 * 4
    entry = re.search(r"ENTRY .*?\n\}", compiled.as_text(), re.DOTALL).group()
    assert not re.findall(r"= f32\[20000,32\]\S* copy\(", entry)
    state, metrics = step(state, ids)
    assert np.isfinite(metrics["loss"])
    np.testing.assert_array_equal(state.params["table"][batch:], params["table"][batch:])
    assert not np.array_equal(state.params["table"][:batch], params["table"][:batch])


@pytest.mark.optimized
def test_on_a_mesh_rows_are_gathered_and_the_table_is_not():
    mesh = Mesh(np.array(jax.devices()[:4]), ("data",))
    params = {"table": normal(0, 5000, 8), "w": normal(1, 8, 4)}
    ids = jnp.asarray(np.random.default_rng(2).integers(0, 5000, 32))
    tx = optfn.adam(0.1, lazy=True, grad_clip=optfn.clip_by_global_norm(0.01))
    step = optfn.make_train_step(big_loss, tx, tables="table", mesh=mesh)
    text = step.compiled.lower(step.init(params), ids).compile().as_text()
    collectives = re.findall(r"= (\S+) (?:all-gather|all-reduce|all-to-all)\w*\(", text)
    assert collectives and not any("5000" in shape for shape in collectives)


def test_inside_shard_map():
    mesh = Mesh(np.array(jax.devices()[:2]), ("data",))
    params, ids = make_params(), np.stack([IDS, IDS + 1])

    def body(params, ids, target):
        params = jax.tree.map(lambda x: jax.lax.pcast(x, "data", to="varying"), params)
        _, grads = sparse.value_and_grad(loss_fn, "table")(params, ids[0], target)
        return grads["table"].dense()[None]

    found = jax.jit(
        jax.shard_map(
            body, mesh=mesh, in_specs=(P(), P("data"), P()), out_specs=P("data"), check_vma=True
        )
    )(params, ids, TARGET)
    for k in range(2):
        want = DENSE(params, ids[k], TARGET)[1]["table"]
        np.testing.assert_allclose(found[k], want, rtol=1e-5, atol=1e-6)


def test_densify_goes_before_the_transforms_of_optax():
    params, (sparse_grads, dense_grads) = {"table": normal(0, ROWS, WIDTH)}, gradients(3)
    sparse_grads.pop("w"), dense_grads.pop("w")
    tx = optfn.chain(sparse.densify(), optax.adam(0.1))
    update = jax.jit(tx.update)
    found, _ = update(sparse_grads, tx.init(params), params)
    want, _ = update(dense_grads, tx.init(params), params)
    chex.assert_trees_all_close(found, want, rtol=1e-5)


NEED_ARRAYS = {
    "alone": (lambda tx: tx, "tx takes no"),
    "in a chain": (lambda tx: optfn.chain(optfn.clip_by_norm(1.0), tx), "chain: part 1 takes no"),
    "guarded": (optfn.skip_nonfinite, "skip_nonfinite: tx takes no"),
    "measured": (optfn.record_metrics, "record_metrics: tx takes no"),
    "in a partition": (
        lambda tx: optax.partition({"a": tx, "b": optfn.sgd(0.1)}, {"table": "a", "w": "b"}),
        "tx takes no",
    ),
    "twice": (lambda tx: optax.MultiSteps(tx, 2), "tx takes no"),
}


def scheduled_sgd(rate):
    """A rule that would scale the indices of rows too, and give them back as int32 zeros."""
    return optax.sgd(optax.constant_schedule(rate))


@pytest.mark.parametrize(
    ("name", "make"),
    [
        *zip(NEED_ARRAYS, 2 * [optax.adam, optax.adamw, optax.adafactor], strict=True),
        *((name, scheduled_sgd) for name in NEED_ARRAYS),
    ],
)
def test_transforms_that_need_arrays_say_that_densify_makes_them(name, make):
    wrap, message = NEED_ARRAYS[name]
    params = {"table": normal(0, ROWS, WIDTH), "w": normal(1, WIDTH, 2)}

    def loss(params, ids):
        return jnp.sum((params["table"][ids] @ params["w"]) ** 2)

    step = optfn.make_train_step(loss, wrap(make(0.1)), tables="table")
    with pytest.raises(TypeError, match=message + r" row-sparse.*'table'.*sparse\.densify\(\)"):
        step(step.init(params), IDS)


LABELS = {"table": "a", "w": "b"}
AROUND_ROWS = {
    "identity": (lambda tx: optax.chain(optax.identity(), tx), lambda tx: tx),
    "mask": (lambda tx: optax.masked(tx, {"table": True, "w": True}), lambda tx: tx),
    "chain": (lambda tx: optax.chain(optfn.clip_by_norm(1.0), tx),) * 2,
    "labels": (lambda tx: optax.partition({"a": optfn.skip_nonfinite(tx), "b": tx}, LABELS),) * 2,
    "frozen": (lambda tx: optax.partition({"a": optax.set_to_zero(), "b": tx}, LABELS),) * 2,
}


@pytest.mark.parametrize("compile_update", [jax.jit, lambda update: update])
@pytest.mark.parametrize("name", AROUND_ROWS)
def test_what_optax_puts_around_rows_leaves_them_alone(name, compile_update):
    """And the update is that of the same arrays."""
    params = {"table": normal(0, ROWS, WIDTH), "w": normal(1, WIDTH, 2)}
    (rows, dense), found = gradients(3), []
    for make, grads in zip(AROUND_ROWS[name], (rows, dense), strict=True):
        tx = optfn.chain(make(optfn.adagrad(0.1)))
        updates, _ = compile_update(tx.update)(grads, tx.init(params), params)
        found.append(optfn.apply_updates(params, updates))
    chex.assert_trees_all_close(*found, rtol=1e-6)
    assert np.array_equal(found[0]["table"], params["table"]) == (name == "frozen")


def test_other_errors_of_a_third_party_stay_what_they_are():
    params, (sparse_grads, _) = {"table": normal(0, ROWS, WIDTH)}, gradients(3)
    sparse_grads.pop("w")
    tx = optfn.chain(optax.add_decayed_weights(0.1))
    with pytest.raises(ValueError, match="You are using a transformation that requires"):
        tx.update(sparse_grads, tx.init(params))


def test_recompute_leaves_the_lookups_out():
    from jax.ad_checkpoint import checkpoint_name

    def loss(params, ids):
        x = checkpoint_name(params["table"][ids] @ params["w"], "x")
        return jnp.sum(jnp.tanh(x) ** 2)

    params, ends = {"table": normal(0, ROWS, WIDTH), "w": normal(1, WIDTH, 2)}, []
    for options in ({}, {"recompute": ("x",)}):
        step = optfn.make_train_step(loss, optfn.adam(0.1), tables="table", **options)
        ends.append(step(step.init(params), IDS)[0].params)
    chex.assert_trees_all_close(*ends, rtol=1e-6)


def test_rows_add_up():
    a, b = some_rows(1), some_rows(2)
    np.testing.assert_allclose((a + b).dense(), a.dense() + b.dense(), rtol=1e-6)
    with pytest.raises(ValueError, match="cannot add rows of arrays of shapes"):
        a + sparse.Rows(a.indices, a.values, ROWS + 1)
    bad = jax.tree.map(lambda x: 0.5 * x, a)
    with pytest.raises(TypeError, match="update of 't' has indices of dtype float32"):
        optfn.apply_updates({"t": normal(0, ROWS, WIDTH)}, {"t": bad})


def test_a_table_of_one_number_under_vmap_adds_all_repeated_rows():
    """A scatter to a single element under vmap, whose indices are constants: openxla/xla 48716."""
    values = np.arange(1.0, 21.0, dtype=np.float32).reshape(5, 4)

    def to_dense(values):
        sent = sparse.Rows(jnp.zeros(4, jnp.int32), values, num_rows=1)
        tx = sparse.densify()
        return tx.update({"table": sent}, tx.init({"table": jnp.zeros(1)}))[0]["table"]

    for run in (jax.vmap(to_dense), jax.jit(jax.vmap(to_dense))):
        np.testing.assert_array_equal(run(values), values.sum(axis=1, keepdims=True))


@pytest.mark.parametrize("around", [lambda tx: tx, optfn.skip_nonfinite])
def test_a_lazy_rule_inside_of_an_accumulation_is_said(around):
    """Its gradients are dense, so it moves rows that no batch has read."""
    params = {"table": jnp.ones((6, 2))}

    def loss_fn(p, ids):
        return jnp.sum(p["table"][ids] ** 2)

    tx = around(optfn.accumulate(optfn.adam(0.1, lazy=True), 2))
    step = optfn.make_train_step(loss_fn, tx, tables="table")
    with pytest.warns(UserWarning, match=r"adam\(lazy=True\) has no effect inside accumulate"):
        step.init(params)


@pytest.mark.filterwarnings("error")
def test_ordinary_rules_for_tables_hear_nothing_of_it():
    params = {"table": jnp.ones((6, 2))}
    for tx in (
        optfn.skip_nonfinite(optfn.adam(0.1, lazy=True)),
        optfn.accumulate(optfn.adam(0.1), 2),
        optfn.chain(optfn.adam(0.1, lazy=True), optfn.exponential_moving_average(0.9)),
    ):
        optfn.make_train_step(lambda p, i: jnp.sum(p["table"][i]), tx, tables="table").init(params)
