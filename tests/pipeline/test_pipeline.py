"""The pipeline against the unpipelined model, by jax.value_and_grad."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from arrays import normal
from grids import nightly
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from problems import block, mean_square

import optfn
from optfn.distributed import (
    PipelineParams,
    pipeline_value_and_grad,
    plan,
    stack_stages,
    unstack_stages,
)
from optfn.loss.jaxprs.primitives import walk
from optfn.pipeline.plan import SCHEDULES

WIDTH, BATCH = 6, 24


def mesh_of(p, data=1, *, explicit=False):
    shape, names = ((data, p), ("data", "stage")) if data > 1 else ((p,), ("stage",))
    devices = jax.devices()[: p * data]
    if explicit:
        return jax.make_mesh(shape, names, devices=devices)
    return Mesh(np.array(devices).reshape(shape), names)


def blocks(n, seed=0):
    return [
        {
            "in": normal([seed, i, 0], WIDTH, 9, scale=0.4),
            "bias": normal([seed, i, 1], 9, scale=0.1),
            "out": normal([seed, i, 2], 9, WIDTH, scale=0.4),
        }
        for i in range(n)
    ]


def batch(seed=7, size=BATCH):
    return normal([seed, 0], size, WIDTH), normal([seed, 1], size, WIDTH)


def whole(stage_fn, loss_fn, params, x, target):
    """The reference: all stages on one device."""

    def loss(params):
        y = x
        for w in params:
            y = stage_fn(w, y)
        return loss_fn(y, target)

    return jax.jit(jax.value_and_grad(loss))(params)


def make(stage_fn=block, loss_fn=mean_square, *, p=2, **options):
    options = {"mesh": mesh_of(p), "num_microbatches": 2} | options
    return pipeline_value_and_grad(stage_fn, loss_fn, **options)


def unstacked(grads):
    return unstack_stages(jax.device_get(grads))


@functools.cache
def reference(stages):
    with jax.enable_x64(True):
        exact = whole(block, mean_square, *jax.tree.map(np.float64, (blocks(stages), *batch())))
        return jax.tree.map(np.asarray, exact)


def assert_close(got, want, tolerance=1e-6):
    """Compare loss and gradients, leaf by leaf, relative to the norm of the leaf."""
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for (path, a), b in zip(jax.tree.leaves_with_path(got), jax.tree.leaves(want), strict=True):
        name = jax.tree_util.keystr(path)
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        assert a.shape == b.shape, name
        assert np.isfinite(a).all(), name
        assert np.linalg.norm(a - b) <= tolerance * np.linalg.norm(b), name


@pytest.mark.parametrize(
    ("p", "v", "m", "schedule", "stash"),
    [
        (2, 2, 4, "1f1b", "residual"),
        (2, 2, 4, "gpipe", "residual"),
        (2, 2, 4, "zb", "residual"),
        (1, 1, 2, "1f1b", "input"),
        nightly(4, 1, 3, "1f1b", "residual"),
        nightly(4, 1, 3, "gpipe", "input"),
        nightly(4, 1, 3, "zb", "input"),
        nightly(1, 1, 2, "zb", "residual"),
        nightly(2, 3, 2, "1f1b", "input"),
    ],
)
def test_exact_over_the_grid(p, v, m, schedule, stash):
    # Half of the grid on each kind of mesh.
    mesh = mesh_of(p, explicit=(schedule == "gpipe") == (stash == "input"))
    options = {"schedule": schedule, "virtual_stages": v, "stash": stash}
    fn = make(mesh=mesh, num_microbatches=m, **options)
    # In float64 hardly any rounding hides what the schedule itself does.
    with jax.enable_x64(True):
        params, x, target = jax.tree.map(np.float64, (blocks(p * v), *batch()))
        loss, grads = fn(stack_stages(params), x, target)
        assert_close((loss, unstacked(grads)), reference(p * v), tolerance=1e-13)


def test_params_placed_by_stage_stay_where_they_are():
    """Folded and placed, gradients and optimizer state are sharded as the params are."""
    mesh = mesh_of(2)
    params = stack_stages(blocks(4), virtual_stages=2, mesh=mesh)
    fn = make(num_microbatches=4, virtual_stages=2)
    tx = optfn.adam(1e-2)

    @jax.jit
    def step(params, state, x, target):
        loss, grads = fn(params, x, target)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss, grads

    state = tx.init(params)
    new, state, loss, grads = step(params, state, *batch())
    assert_close((loss, unstacked(grads)), reference(4))
    moments = [x for x in jax.tree.leaves(state) if x.ndim >= 2]
    assert len(moments) == 6
    for x in [*jax.tree.leaves((params, grads, new)), *moments]:
        assert x.sharding.spec[:2] == (None, "stage"), x.sharding


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_stage_that_is_nan_on_zeros(schedule):
    """The bubble computes with zeros; its results may not reach the loss or the gradients."""

    def normalized(w, x):
        return x / jnp.linalg.norm(x, axis=-1, keepdims=True) @ w

    params = [
        np.eye(WIDTH, dtype=np.float32) + normal(i, WIDTH, WIDTH, scale=0.1) for i in range(3)
    ]
    fn = make(normalized, p=3, num_microbatches=4, schedule=schedule, stash="residual")
    loss, grads = fn(stack_stages(params), *batch())
    assert_close((loss, unstacked(grads)), whole(normalized, mean_square, params, *batch()))


@functools.cache
def temporaries(schedule, stash, m):
    """Bytes of temporaries per device, for microbatches of one size."""
    shape = jax.ShapeDtypeStruct
    widths = {"in": (16, 64), "bias": (64,), "out": (64, 16)}
    params = {name: shape((4, *width), "f") for name, width in widths.items()}
    x = shape((m * 128, 16), "f")
    fn = make(p=4, num_microbatches=m, schedule=schedule, stash=stash)
    compiled = jax.jit(fn).lower(params, x, x).compile()
    return compiled.memory_analysis().temp_size_in_bytes


@pytest.mark.nightly
@pytest.mark.optimized
@pytest.mark.parametrize("stash", ["input", "residual"])
def test_memory_of_1f1b_is_flat(stash):
    assert temporaries("1f1b", stash, 64) <= 1.02 * temporaries("1f1b", stash, 16)
    assert temporaries("1f1b", stash, 64) <= 0.2 * temporaries("gpipe", "residual", 64)


@pytest.mark.optimized
def test_memory_of_zero_bubble_is_flat():
    assert temporaries("zb", "residual", 64) <= 1.02 * temporaries("zb", "residual", 16)


def phases_of(p, v, m, stage_fn=block, params=None, **options):
    """Return the scans over the ticks, without compiling anything."""
    fn = make(stage_fn, p=p, num_microbatches=m, virtual_stages=v, **options)
    x = jax.ShapeDtypeStruct((m, WIDTH), jnp.float32)
    params = jax.eval_shape(stack_stages, params or blocks(p * v))
    found = walk(jax.make_jaxpr(fn)(params, x, x).jaxpr)
    (mapped,) = (e for e in found if e.primitive.name == "shard_map")
    return [e for e in mapped.params["jaxpr"].eqns if e.primitive.name == "scan"]


def products(phase):
    """Return how many matrix products a tick of the phase makes."""
    found = walk(phase.params["jaxpr"].jaxpr)
    return sum(equation.primitive.name == "dot_general" for equation in found)


@pytest.mark.parametrize(
    ("p", "v", "m", "schedule"),
    [
        (4, 1, 3, "1f1b"),
        (2, 2, 8, "1f1b"),
        (2, 2, 8, "gpipe"),
        (4, 1, 8, "zb"),
        (2, 2, 8, "zb"),
        (1, 1, 5, "1f1b"),
    ],
)
def test_ticks_are_those_of_the_plan(p, v, m, schedule):
    lengths = [e.params["length"] for e in phases_of(p, v, m, schedule=schedule)]
    theory = plan(p, m, v, schedule)
    assert lengths == [phase.stop - phase.start for phase in theory.phases]
    closed = {
        "1f1b": [v * p - 1, m * v - v * p + p, v * p - 1],
        "gpipe": [m * v + p - 1] * 2,
        "zb": [v * p - 1, p - 1, m * v - v * p + 1, v * p - 1],
    }[schedule]
    assert lengths == [n for n in closed if n]
    assert theory.ticks == sum(lengths)
    if schedule == "zb":
        assert theory.units == 3 * m * v + 2 * (p - 1)
        assert theory.bubble == 2 * (p - 1) / (3 * v * m)
    else:
        assert theory.ticks == (
            2 * (m * v + p - 1) if schedule == "gpipe" else m * v + v * p + p - 2
        )
        assert theory.bubble == (p - 1) / (v * m)


def deep(w, x):
    """Two layers in a scan, each of them in a jitted function."""
    return jax.lax.scan(lambda x, w: (jax.jit(block)(w, x), None), x, w)[0]


@pytest.mark.parametrize(
    ("schedule", "stash", "work"),
    [
        # a forward has 2, the cotangent of the input 2, the gradient of the weights 2
        ("1f1b", "residual", [2, 6, 4]),
        ("1f1b", "input", [2, 8, 6]),
        ("gpipe", "residual", [2, 4]),
        ("zb", "residual", [2, 4, 6, 4]),
        ("zb", "input", [2, 6, 8, 6]),
    ],
)
def test_work_of_a_tick(schedule, stash, work):
    """Only stash="input" computes a forward twice; zb splits a backward in halves."""
    params = [stack_stages(blocks(2, seed=i)) for i in range(3)]
    phases = phases_of(3, 1, 6, deep, params, schedule=schedule, stash=stash)
    assert list(map(products, phases)) == work


def test_residuals_of_the_weights_alone_are_not_saved():
    """Every microbatch would save the same transposes and casts."""

    def stage(w, x):
        return x + jnp.tanh(x.astype(jnp.bfloat16) @ w.astype(jnp.bfloat16).T).astype(x.dtype)

    params = [normal(i, WIDTH, WIDTH) for i in range(2)]
    first, *_ = phases_of(2, 1, 8, stage, params, stash="residual")
    saved = [a.aval.shape for a in first.outvars if a.aval.shape[:1] == (3,)]
    assert saved
    assert all(shape == (3, 1, WIDTH) for shape in saved)


def test_zero_bubble_splits_scans():
    """Scans inside scans, weights that all iterations share, and an effect."""

    def stage(w, x):
        def iteration(x, w_in):
            x = jax.lax.scan(lambda x, _: (block(w_in, x), None), x, None, length=2)[0]
            return jnp.tanh(x @ w["all"]), x.mean(axis=1, keepdims=True)

        x, means = jax.lax.scan(iteration, x, w["each"], reverse=True)
        jax.debug.callback(lambda _: None, x[0, 0])
        return x + means.sum(axis=0)

    params = [
        {"each": stack_stages(blocks(2, seed=i)), "all": normal(i, WIDTH, WIDTH, scale=0.4)}
        for i in range(2)
    ]
    fn = make(stage, num_microbatches=4, schedule="zb")
    loss, grads = fn(stack_stages(params), *batch())
    want = whole(stage, mean_square, params, *batch())
    # Eight nonlinear layers lie between input and loss.
    assert_close((loss, unstacked(grads)), want, 5e-6)


def test_plan_is_consistent():
    """Work follows its dependencies, one item of a kind per tick, and ring buffers suffice."""
    shapes = [(4, 8, 1), (4, 3, 1), (3, 6, 2), (2, 4, 3)]
    for (p, m, v), schedule in itertools.product(shapes, SCHEDULES):
        theory = plan(p, m, v, schedule)
        cells = list(theory.cells())
        when = {(c.work, c.microbatch, c.chunk * p + c.stage): c.tick for c in cells}
        assert len(when) == len(cells) == (3 if schedule == "zb" else 2) * p * m * v
        assert len({(c.work, c.stage, c.tick) for c in cells}) == len(cells)
        assert max(when.values()) == theory.ticks - 1
        last = p * v - 1
        for (work, j, s), tick in when.items():
            if work == "F":
                assert s == 0 or tick == when["F", j, s - 1] + 1
            if work == "B":
                assert tick == when["B", j, s + 1] + 1 if s < last else tick >= when["F", j, s]
            if work == "W":
                assert tick >= when["B", j, s]
        saved = [
            sum(
                when["F", j, s] <= tick <= when["B", j, s]
                for j in range(m)
                for s in range(0, p * v, p)
            )
            for tick in range(theory.ticks)
        ]
        assert max(saved) <= theory.stash_slots


def test_plan_counts_and_draws():
    assert plan(4, 64).stash == 7
    assert plan(4, 64, 2).stash == 15
    assert plan(4, 64, schedule="gpipe").stash == 64
    assert plan(4, 64, schedule="zb").stash == 7 + 4
    assert plan(4, 64, activation_bytes=1000).stash == 7000
    assert repr(plan(4, 8)) == "plan(4, 8)"
    for made in (plan(4, 8, 2, "zb"), plan(2, 3, schedule="gpipe", activation_bytes=9)):
        assert eval(repr(made)) == made
    assert repr(plan(4, 8, 2, "zb")) == "plan(4, 8, virtual_stages=2, schedule='zb')"
    assert "7,000 bytes" in str(plan(4, 64, activation_bytes=1000))
    lines = str(plan(4, 8)).splitlines()
    assert len(lines) == 5
    assert all(f"F{j}" in line and f"B{j}" in line for line in lines[1:] for j in range(8))
    # 3 ticks of forwards, 8 of both, 3 of backwards
    assert len(lines[1].split()) == 2 + 3 + 16 + 3


def chain_of_heterogeneous_stages():
    """Tokens and a mask → embedding → bfloat16 in between → another width and length → logits."""

    def embed(w, x):
        return {"h": w["table"][x["tokens"]], "mask": x["mask"]}

    def narrow(w, x):
        h = jnp.tanh(x["h"] @ w["kernel"]) * x["mask"][..., None]
        return {"h": h.astype(jnp.bfloat16), "mask": x["mask"]}

    def pool(w, x):
        h = x["h"].astype(jnp.float32)
        return h.reshape(h.shape[0], -1) @ w[0] + w[1], x["mask"].sum(axis=1)

    def head(w, x):
        h, length = x
        return h @ w["logits"] / length[:, None]

    params = [
        {"table": normal(1, 11, 8), "unused": np.arange(3)},
        {"kernel": normal(2, 8, 3)},
        (normal(3, 15, 7), normal(4, 7)),
        {"logits": normal(5, 7, 11)},
    ]
    tokens = np.random.default_rng(6).integers(0, 11, size=(16, 5))
    mask = np.arange(5) <= np.arange(16)[:, None] % 5
    target = np.random.default_rng(8).integers(0, 11, size=16)
    return [embed, narrow, pool, head], params, {"tokens": tokens, "mask": mask}, target


def cross_entropy(logits, labels):
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


@functools.cache
def chain_on_one_device():
    fns, params, x, target = chain_of_heterogeneous_stages()

    def loss_of(params):
        y = x
        for fn, w in zip(fns, params, strict=True):
            y = fn(w, y)
        return cross_entropy(y, target)

    loss, grads = jax.jit(jax.value_and_grad(loss_of, allow_int=True))(params)
    del grads[0]["unused"]
    return loss, grads


@pytest.mark.parametrize(
    ("p", "v", "schedule", "stash", "explicit"),
    [
        (4, 1, "1f1b", "input", True),
        nightly(2, 2, "1f1b", "residual", False),
        (4, 1, "zb", "residual", False),
    ],
)
def test_a_list_of_heterogeneous_stages(p, v, schedule, stash, explicit):
    fns, params, x, target = chain_of_heterogeneous_stages()
    mesh = mesh_of(p, explicit=explicit)
    if explicit:
        params = jax.device_put(params, NamedSharding(mesh, P()))
    options = {"schedule": schedule, "virtual_stages": v, "stash": stash}
    fn = make(fns, cross_entropy, mesh=mesh, num_microbatches=4, **options)
    loss, grads = fn(params, x, target)
    assert grads[0].pop("unused").dtype == jax.dtypes.float0
    assert_close((loss, grads), chain_on_one_device())


def test_tied_weights_in_heterogeneous_stages():
    """The embedding is read by the first stage and, transposed, by the last."""

    def embed(w, tokens, *, shared):
        return shared["embedding"][tokens] + w

    def head(w, x, *, shared):
        return x * w @ shared["embedding"].T

    fns = [embed, block, head]
    shared = {"embedding": normal(1, 11, WIDTH)}
    params = PipelineParams([normal(2, WIDTH), blocks(1)[0], normal(3, WIDTH)], shared)
    tokens, target = np.random.default_rng(4).integers(0, 11, size=(2, 12))
    fn = make(fns, cross_entropy, p=3, num_microbatches=3)
    got = fn(params, tokens, target)

    def loss_of(params):
        (first, second, third), shared = params
        y = block(second, embed(first, tokens, shared=shared))
        return cross_entropy(head(third, y, shared=shared), target)

    assert_close(got, jax.jit(jax.value_and_grad(loss_of))(params))


def test_weights_shared_by_homogeneous_stages_and_the_loss():
    def stage(w, x, shared):
        return block(w, x) * shared["scale"]

    def loss_fn(y, target, shared):
        return mean_square(y @ shared["head"], target)

    shared = {"scale": normal(1, WIDTH), "head": normal(2, WIDTH, WIDTH)}
    fn = make(stage, loss_fn, num_microbatches=3, schedule="zb")
    loss, (stages, tied) = fn(PipelineParams(stack_stages(blocks(2)), shared), *batch())

    def loss_of(stages, shared):
        y, target = batch()
        for w in stages:
            y = stage(w, y, shared)
        return loss_fn(y, target, shared)

    want = jax.jit(jax.value_and_grad(loss_of, (0, 1)))(blocks(2), shared)
    assert_close((loss, (unstack_stages(stages), tied)), want)


def dropout(w, x, rng):
    return block(w, x * jax.random.bernoulli(rng, 0.7, x.shape))


def dropout_reference(params, x, target, rng, microbatches):
    def loss_of(params):
        total = 0.0
        parts = zip(np.split(x, microbatches), np.split(target, microbatches), strict=True)
        for j, (y, t) in enumerate(parts):
            for s, w in enumerate(params):
                y = dropout(w, y, jax.random.fold_in(jax.random.fold_in(rng, j), s))
            total += mean_square(y, t) / microbatches
        return total

    return jax.jit(jax.value_and_grad(loss_of))(params)


@pytest.mark.parametrize(
    ("schedule", "stash", "data", "remat", "typed"),
    [("1f1b", "input", 2, False, True), nightly("zb", "residual", 1, True, False)],
)
def test_dropout_has_a_key_per_microbatch_and_stage(schedule, stash, data, remat, typed):
    rng = jax.random.key(3) if typed else jax.random.PRNGKey(3)
    stage_fn, data_axis = (jax.checkpoint(dropout) if remat else dropout), None
    if data > 1:
        data_axis = "data"
    options = {"schedule": schedule, "stash": stash, "data_axis": data_axis}
    fn = make(stage_fn, mesh=mesh_of(2, data), **options)
    loss, grads = fn(stack_stages(blocks(2)), *batch(), rng=rng)
    want = dropout_reference(blocks(2), *batch(), rng, 2 * data)
    assert_close((loss, unstacked(grads)), want)


@pytest.mark.parametrize(("schedule", "stash"), [("1f1b", "input"), nightly("zb", "residual")])
def test_trees_between_stages(schedule, stash):
    """Floats, integers and leaves that no stage changes are passed on; None is no leaf."""

    def stage(w, x):
        h = jnp.where(x["keep"][:, None], block(w, x["h"]), x["h"])
        return {"h": h, "sum": x["sum"] + h.sum(axis=-1), "keep": x["keep"], "none": None}

    def loss_fn(y, target):
        return mean_square(y["h"], target["h"]) + jnp.mean(y["sum"] ** 2 * target["weight"])

    h, goal = batch()
    x = {"h": h, "sum": np.zeros(BATCH, np.float32), "keep": np.arange(BATCH) % 3 > 0, "none": None}
    target = {"h": goal, "weight": np.arange(BATCH) % 5}
    fn = make(stage, loss_fn, p=4, num_microbatches=4, schedule=schedule, stash=stash)
    loss, grads = fn(stack_stages(blocks(4)), x, target)
    assert_close((loss, unstacked(grads)), whole(stage, loss_fn, blocks(4), x, target))


def test_low_precision_params_get_gradients_in_their_dtype_summed_in_float32():
    params = [jax.tree.map(lambda x: x.astype(jnp.bfloat16), w) for w in blocks(2)]
    x, target = (a.astype(jnp.bfloat16) for a in batch(size=64))
    fn = make(num_microbatches=64)
    loss, grads = fn(stack_stages(params), x, target)
    assert loss.dtype == jnp.bfloat16
    assert {g.dtype for g in jax.tree.leaves(grads)} == {jnp.dtype(jnp.bfloat16)}
    wide = [jax.tree.map(lambda x: x.astype(jnp.float32), w) for w in params]
    want = whole(block, mean_square, wide, x.astype(jnp.float32), target.astype(jnp.float32))
    assert_close((loss, unstacked(grads)), want, 0.02)


def test_work_is_replicated_over_other_axes():
    mesh = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("other", "stage"))
    loss, grads = make(mesh=mesh)(stack_stages(blocks(2)), *batch())
    assert_close((loss, unstacked(grads)), reference(2))


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"axis_name": "model"}, ValueError, "axis_name must be an axis of the mesh.*'stage'"),
        ({"data_axis": "data"}, ValueError, "data_axis must be an axis of the mesh"),
        ({"data_axis": "stage"}, ValueError, "data_axis and axis_name must be different"),
        ({"mesh": 4}, TypeError, "mesh must be a jax.sharding.Mesh"),
        ({"schedule": "2f2b"}, ValueError,
         "schedule must be one of '1f1b', 'gpipe', 'zb'; got '2f2b'"),
        ({"stash": "outputs"}, ValueError, "stash must be one of 'input', 'residual'"),
        ({"grad_reduce": "sum"}, ValueError, "grad_reduce must be one of 'mean'; got 'sum'"),
        ({"grad_reduce": None}, ValueError, "grad_reduce must be one of 'mean'; got None"),
        ({"num_microbatches": 0}, ValueError, "num_microbatches must be >= 1"),
        ({"num_microbatches": 2.0}, TypeError, "num_microbatches must be a Python integer"),
        ({"virtual_stages": 2, "num_microbatches": 3}, ValueError,
         "num_microbatches.*virtual_stages"),
        ({"stage_fn": [block] * 3}, ValueError,
         "stage_fn must be a list of 2 functions, for 2 devices"),
        ({"stage_fn": "block"}, TypeError, "stage_fn must be a function"),
        ({"loss_fn": None}, TypeError, "loss_fn must be a function"),
    ],
)  # fmt: skip
def test_wrong_arguments(options, error, words):
    with pytest.raises(error, match=words):
        make(**options)


@pytest.mark.parametrize(
    ("options", "stages", "size", "error", "words"),
    [
        ({}, 3, 24, ValueError, "params: leaf 'bias' must have the 2 stages as its leading axis"),
        ({}, 2, 25, ValueError, "inputs: a batch of 25 cannot be split into num_microbatches=2"),
        ({"stage_fn": lambda w, x: x @ w["in"]}, 2, 24, ValueError, "stage_fn.*list of functions"),
        ({"stage_fn": lambda w, x: x.astype("bfloat16")}, 2, 24, ValueError, "stage_fn.*bfloat16"),
        ({"stage_fn": lambda w, x: (x, x)}, 2, 24, ValueError, "stage_fn takes.*returns"),
        ({"loss_fn": lambda y, t: (y - t) ** 2}, 2, 24, ValueError, "loss_fn must return a scalar"),
        ({"loss_fn": lambda y, t: (0.0, y)}, 2, 24, ValueError, "loss_fn must return a scalar"),
        ({"loss_fn": lambda y, t: jnp.int32(1)}, 2, 24, TypeError, "loss_fn must return a real"),
        ({"stage_fn": [block, block]}, 2, 24, TypeError, "params must be a list"),
    ],
)
def test_wrong_data(options, stages, size, error, words):
    with pytest.raises(error, match=words):
        make(**options)(stack_stages(blocks(stages)), *batch(size=size))


def test_wrong_calls():
    params, (x, target) = stack_stages(blocks(2)), batch()
    with pytest.raises(ValueError, match="targets: every array must have the batch"):
        make()(params, x, target[:5])
    with pytest.raises(ValueError, match="inputs must contain"):
        make()(params, {}, target)
    with pytest.raises(ValueError, match="rng was passed"):
        make()(params, x, target, rng=jax.random.key(0))
    with pytest.raises(ValueError, match="shared was passed"):
        make()(PipelineParams(params, {}), x, target)
    with pytest.raises(ValueError, match="params must be a list of 2 stages"):
        make([block, block])(blocks(3), x, target)
    with pytest.raises(ValueError, match=r"params.1.: leaf 'in'.*list of functions"):
        stack_stages([{"in": np.zeros(3)}, {"in": np.zeros(4)}])
    with pytest.raises(ValueError, match=r"stack_stages: params.1. must have the tree structure"):
        stack_stages([{"in": np.zeros(3)}, {"out": np.zeros(3)}])
    with pytest.raises(ValueError, match="params: 4 stages do not fit axis 'stage', which has 2"):
        stack_stages(blocks(4), mesh=mesh_of(2))
    with pytest.raises(ValueError, match="stacked: "):
        unstack_stages({"a": np.zeros((2, 3)), "b": np.zeros((3, 3))})
    with pytest.raises(ValueError, match="schedule must be one of"):
        plan(2, 2, schedule="interleaved")


@pytest.mark.parametrize(
    ("schedule", "stash"), [("1f1b", "input"), ("zb", "residual"), ("gpipe", "residual")]
)
def test_a_microbatch_of_padding_that_is_nan_in_the_stages_adds_nothing(schedule, stash):
    rng = np.random.default_rng(0)
    weights = [rng.normal(size=(3, 3)).astype(np.float32) for _ in range(2)]
    inputs, targets = (rng.normal(size=(8, 3)).astype(np.float32) for _ in range(2))
    mask = np.float32([1, 1, 1, 1, 0, 0, 0, 0])

    def stage(w, x):
        h, k = x["h"] @ w, x["mask"]
        return {"h": h - (h * k[:, None]).sum(0) / k.sum(), "mask": k}

    def loss_fn(y, target):
        t, k = target
        return optfn.Mean(jnp.sum(k[:, None] * (y["h"] - t) ** 2), jnp.sum(k))

    def whole(weights):
        y = {"h": inputs[:4], "mask": mask[:4]}
        for w in weights:
            y = stage(w, y)
        mean = loss_fn(y, (targets[:4], mask[:4]))
        return mean.total / mean.weight

    mesh = Mesh(np.array(jax.devices()[:2]), ("stage",))
    value_and_grad = pipeline_value_and_grad(
        stage, loss_fn, mesh=mesh, num_microbatches=2, schedule=schedule, stash=stash
    )
    batch = {"h": inputs, "mask": mask}, (targets, mask)
    mean, grads = jax.jit(value_and_grad)(stack_stages(weights), *batch)
    expected = jax.grad(whole)(weights)
    np.testing.assert_allclose(mean.total / mean.weight, whole(weights), rtol=1e-5)
    np.testing.assert_allclose(jax.tree.leaves(grads)[0], np.stack(expected), rtol=1e-4, atol=1e-5)
