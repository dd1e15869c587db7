"""A worker drops the constraints of a model along its own axes, and keeps those along others."""

import contextlib
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from arrays import weights
from grids import nightly, suite
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from sharded_models import WIDTH, constrain, custom_derivatives, plain_scan

import optfn
from optfn.distributed import data_mesh, plan_memory, sharded

EXAMPLES, STEPS = 32, 3
BATCH = weights(3, EXAMPLES, WIDTH)


def mesh_of(**shape):
    shape = shape or {"data": 4, "model": 2}
    return Mesh(np.array(jax.devices()).reshape(*shape.values()), tuple(shape))


def loss_of(apply):
    return lambda params, x: jnp.mean((apply(params, x) - 1.0) ** 2)


def train(loss, params, tx=None, batch=BATCH, steps=STEPS, **options):
    step = optfn.make_train_step(loss, optfn.adam(1e-2) if tx is None else tx, **options)
    state = step.init(params)
    for _ in range(steps):
        state, metrics = step(state, batch)
    return step, state, metrics


@functools.cache
def on_one_device():
    """Return a model with constraints; tests/zoo trains others in each way."""
    apply, params, specs_of = custom_derivatives()
    _, expected, metrics = train(loss_of(apply), jax.device_get(params))
    return apply, params, specs_of, jax.device_get(expected.params), metrics["loss"]


def assert_near(a, b, tolerance=2e-5):
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_allclose(np.float32(x), np.float32(y), rtol=tolerance, atol=tolerance)


WAYS = {
    "whole": lambda specs: {},
    "state": lambda specs: {"shard": "state"},
    "params": lambda specs: {"shard": "params"},
    "specs": lambda specs: {"shard": specs},
    "microbatches": lambda specs: {"shard": "params", "microbatches": 2},
}


@pytest.mark.parametrize("way", suite(WAYS, "whole", "microbatches"))
def test_models_with_shardings_inside(way):
    apply, params, specs_of, expected, loss = on_one_device()
    options = WAYS[way](specs_of(params))
    _, state, metrics = train(loss_of(apply), params, mesh=mesh_of(), **options)
    assert_near(state.params, expected)
    assert_near(metrics["loss"], loss)


@pytest.mark.parametrize("inside", [False, True])
def test_the_compiler_keeps_shardings_inside_of_models_and_of_their_params(inside):
    apply, params, specs_of, expected, _ = on_one_device()
    mesh = mesh_of()
    placements = jax.tree.map(
        lambda spec: NamedSharding(mesh, spec), specs_of(params), is_leaf=lambda x: isinstance(x, P)
    )
    there = jax.device_put(params, placements)
    with jax.set_mesh(mesh) if inside else contextlib.nullcontext():
        _, state, _ = train(loss_of(apply), there, mesh=mesh, partitioner="compiler")
    assert_near(state.params, expected)
    divided = [x for x in jax.tree.leaves(state) if any(x.sharding.spec) and x.ndim > 1]
    kernels = [x for x in jax.tree.leaves(placements) if any(x.spec)]
    assert kernels and len(divided) == 3 * len(kernels)  # each kernel and its two moments


def test_two_levels_and_an_axis_of_the_model():
    apply, params, _, expected, _ = on_one_device()
    options = {"data_axis": ("node", "data"), "shard": sharded("params", axis="data")}
    mesh = mesh_of(node=2, data=2, model=2)

    def divided(params, x):
        return apply(params, constrain(x, ("node", "data"), "model"))

    assert_near(train(loss_of(divided), params, mesh=mesh, **options)[1].params, expected)


def test_inside_of_set_mesh():
    apply, params, specs_of, expected, _ = on_one_device()
    with jax.set_mesh(mesh_of()):
        options = {"mesh": mesh_of(), "shard": specs_of(params)}
        assert_near(train(loss_of(apply), params, **options)[1].params, expected)


def test_other_axes_divide_activations():
    apply, params, _ = plain_scan()
    options = {"mesh": mesh_of(), "shard": "params"}
    step = optfn.make_train_step(loss_of(apply), optfn.sgd(0.1), **options)
    lowered = step.lower(params, BATCH)
    assert "sharding_constraint" in lowered.as_text()
    program = lowered.compile().as_text()
    half = f"f32[{EXAMPLES // 4},{WIDTH // 2}]"  # a worker's examples, and half of each
    assert any("tanh" in line and half in line for line in program.splitlines())


def test_a_constraint_changes_no_bit_where_it_means_nothing():
    _, params, _ = plain_scan()

    def apply(fit, params, x):
        layer = jax.checkpoint(lambda x, w: (fit(jnp.tanh(x @ w), "data", None), None))
        return jax.lax.scan(layer, fit(x, "data", None), params["w"])[0]

    plain, divided = (functools.partial(apply, fit) for fit in (lambda x, *spec: x, constrain))
    found = [
        train(loss_of(f), params, mesh=data_mesh(), shard="params")[1].params
        for f in (plain, divided)
    ]
    np.testing.assert_array_equal(*(np.asarray(x["w"]) for x in found))


def test_constraints_on_the_mesh_itself():
    """A NamedSharding is no sign for the step, which finds constraints by the first bare spec."""
    mesh = mesh_of()

    def loss(params, x):
        out = jax.nn.relu(constrain(x, "data", None) @ params["w"])
        out = jax.lax.with_sharding_constraint(out, NamedSharding(mesh, P("data", P.UNCONSTRAINED)))
        return jnp.mean((out - 1.0) ** 2)

    params = {"w": weights(0, WIDTH, WIDTH)}
    _, state, _ = train(loss, params, mesh=mesh, shard="params")
    expected = train(loss_of(lambda p, x: jax.nn.relu(x @ p["w"])), params)[1]
    assert_near(state.params, expected.params)


MESHES_OF_A_MODEL = {
    "the step's": ({"data": 4, "model": 2}, P("data", None)),
    "one of other axes": ({"x": 8}, P("x", None)),
    "one that does not divide": ({"a": 2, "b": 2, "c": 2}, P(("a", "b"), "c")),
}


@pytest.mark.parametrize(
    "name, within",
    suite(
        itertools.product(MESHES_OF_A_MODEL, [contextlib.nullcontext, jax.set_mesh]),
        ("the step's", jax.set_mesh),
        ("one of other axes", contextlib.nullcontext),
    ),
)
def test_constraints_by_a_sharding_of_a_mesh_name_the_remedies(name, within):
    shape, spec = MESHES_OF_A_MODEL[name]
    placement = NamedSharding(mesh_of(**shape), spec)
    params = {"w": weights(0, WIDTH, WIDTH)}

    def loss(params, x):
        return jnp.mean(jax.lax.with_sharding_constraint(x @ params["w"], placement))

    options = {"mesh": mesh_of(data=8) if "x" in shape else mesh_of()}
    remedies = r"test_constraints.*PartitionSpec alone.*partitioner=\"compiler\""
    with within(options["mesh"]):
        with pytest.raises(ValueError, match=remedies):
            train(loss, params, **options)
        with pytest.raises(ValueError, match=remedies):
            optfn.make_train_step(loss, optfn.sgd(0.1), **options).lower(params, BATCH)
    # The remedy.
    _, state, _ = train(loss, params, **options, partitioner="compiler")
    assert_near(state.params, train(lambda p, x: jnp.mean(x @ p["w"]), params)[1].params)


@pytest.mark.parametrize(
    "shape, boxed", [({"data": 4, "model": 2}, True), ({"data": 8}, False)], ids=str
)
def test_boxes_of_another_rank_name_the_remedy(shape, boxed):
    """DenseGeneral of flax makes its kernel flat, and its box has a name for each axis."""
    linen = pytest.importorskip("flax.linen")
    init = linen.with_partitioning(linen.initializers.lecun_normal(), ("data", "model", None))
    net = linen.DenseGeneral((4, 4), kernel_init=init)
    params = net.init(jax.random.key(0), BATCH)["params"]
    params = params if boxed else linen.unbox(params)

    def loss(params, x):
        return jnp.mean(net.apply({"params": params}, x) ** 2)

    def without_constraints(params, x):
        with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), ())):
            return loss(params, x)

    with pytest.raises(ValueError, match=r"use_abstract_mesh\(jax.sharding.AbstractMesh"):
        train(loss, params, mesh=mesh_of(**shape))
    _, state, _ = train(without_constraints, params, mesh=mesh_of(**shape))
    assert_near(state.params, train(loss, params)[1].params)


@pytest.mark.parametrize(
    "kind, error, words",
    [
        ("mine", ValueError, "a text of my own"),
        ("rank", ValueError, ""),
        ("axis", ValueError, "unknown"),
        ("shape", TypeError, "dot_general"),
    ],
)
def test_an_error_of_the_loss_itself_is_raised_as_it_is(kind, error, words):
    def loss(params, x):
        if kind == "mine":
            raise ValueError("with_sharding_constraint, Manual: a text of my own")
        if kind == "shape":
            return jnp.mean(constrain(x, "data", None) @ params["w"][1:])
        spec = {"rank": ("data", None, None), "axis": ("unknown", None)}[kind]
        return jnp.mean(jax.lax.with_sharding_constraint(x @ params["w"], P(*spec)))

    with pytest.raises(error, match=words) as caught:
        train(loss, {"w": weights(0, WIDTH, WIDTH)}, mesh=mesh_of())
    assert "JAX says" not in str(caught.value)


def test_a_shard_map_over_another_axis():
    mesh = mesh_of()

    def of_half(x, w):
        return jax.lax.psum(jax.nn.relu(x) @ w, "model")

    def loss(params, x):
        x = constrain(x, "data", "model")
        specs = P(None, "model"), P("model", None)
        run = jax.shard_map(of_half, in_specs=specs, out_specs=P(), axis_names={"model"})
        return jnp.mean((constrain(run(x, params["w"]), "data", None) - 1.0) ** 2)

    params = {"w": weights(0, WIDTH, WIDTH)}
    expected = train(loss_of(lambda p, x: jax.nn.relu(x) @ p["w"]), params)[1]
    assert_near(train(loss, params, mesh=mesh)[1].params, expected.params)


def test_a_linear_solver():
    """It keeps its functions in a NamedTuple."""

    def apply(params, x):
        matrix = params["w"] @ params["w"].T + jnp.eye(WIDTH)
        x = constrain(x, "data", "model")
        solution, _ = jax.scipy.sparse.linalg.cg(lambda v: matrix @ v, x.T, tol=1e-6)
        return constrain(solution.T, "data", None)

    params = {"w": weights(0, WIDTH, WIDTH)}
    expected = train(
        loss_of(lambda p, x: jnp.linalg.solve(p["w"] @ p["w"].T + jnp.eye(WIDTH), x.T).T), params
    )[1]
    found = train(loss_of(apply), params, mesh=mesh_of(), shard="params")[1]
    assert_near(found.params, expected.params, 1e-4)


@pytest.mark.nightly
def test_tables_keys_state_and_aux():
    """Rows as gradients, dropout, model state and an integer leaf pass through the traced loss."""
    ids = np.arange(EXAMPLES, dtype=np.int32) % 8
    params = {"table": weights(0, 8, WIDTH), "w": weights(1, WIDTH, WIDTH), "count": np.arange(3)}

    def loss(constrained, params, mean, ids, key):
        fit = constrain if constrained else lambda x, *spec: x
        x = fit(params["table"][ids], "data", None)
        mask = jax.random.bernoulli(key, 0.5, (WIDTH,))
        out = fit(jax.nn.relu((x - mean) @ params["w"]) * mask, "data", "model")
        new = 0.5 * mean + 0.5 * jnp.mean(x, 0)
        return jnp.mean((out - 1.0) ** 2), (new, {"size": jnp.mean(out)})

    def run(constrained, **options):
        step = optfn.make_train_step(
            functools.partial(loss, constrained), optfn.adam(1e-2), mesh=mesh_of(), rng=7,
            tables="table", has_aux=True, model_state=True, **options,
        )  # fmt: skip
        state = step.init(params, np.zeros(WIDTH, np.float32))
        for _ in range(STEPS):
            state, metrics = step(state, ids)
        return state.params, state.model_state, metrics["aux"]

    options = {"shard": "params", "microbatches": 2}
    assert_near(run(True, **options), run(False, **options))


def test_bfloat16_and_recomputation():
    # An all-reduce of bfloat16 over some axes of a mesh ends the process on CPU; see compilers.xla.
    apply, params, _ = custom_derivatives()
    narrow = jax.tree.map(lambda x: x.astype(jnp.bfloat16), params)
    options = {"mesh": mesh_of(), "recompute": ("kept",), "steps": 1}

    def loss(params, x):
        x = jax.ad_checkpoint.checkpoint_name(x @ params["first"], "kept")
        return jnp.mean((apply(params, x) - 1.0) ** 2)

    found = train(loss, narrow, tx=optfn.sgd(0.1), shard="params", **options)[1]
    assert_near(found.params, train(loss, narrow, tx=optfn.sgd(0.1), steps=1)[1].params, 2e-2)


def typed_losses():
    explicit = Mesh(mesh_of().devices, ("data", "model"), axis_types=(AxisType.Explicit,) * 2)
    of_mesh = NamedSharding(explicit, P("data", None))
    return explicit, {
        "result": lambda p, x: jnp.matmul(x, p["w"], out_sharding=P("data", None)),
        "result on a mesh": lambda p, x: jnp.matmul(x, p["w"], out_sharding=of_mesh),
        "reshard": lambda p, x: jax.sharding.reshard(x @ p["w"], P("data", None)),
    }


# A worker's examples are divided by the axis, or are not.
@pytest.mark.parametrize("examples", [32, 8])
@pytest.mark.parametrize("kind", ["result", *map(nightly, [*typed_losses()[1]][1:])])
def test_explicit_axes_are_refused_with_advice(kind, examples):
    explicit, losses = typed_losses()
    params, batch = {"w": weights(0, WIDTH, WIDTH)}, weights(3, examples, WIDTH)
    with pytest.raises(ValueError, match='partitioner="compiler"'):
        train(lambda p, x: jnp.mean(losses[kind](p, x)), params, mesh=explicit, batch=batch)


def test_a_plan_takes_the_loss_as_the_step_does():
    """Constraints and a model state change nothing of what a loss gathers."""
    params = {"layers": weights(0, 2, 64, 64), "head": weights(1, 64, 64)}
    x, mean = jax.ShapeDtypeStruct((4, 64), "float32"), np.zeros(64, np.float32)

    def loss(fit, params, x):
        layer = lambda x, w: (fit(jnp.tanh(x @ w), "data", None), None)  # noqa: E731
        return jnp.mean(jax.lax.scan(layer, x, params["layers"])[0] @ params["head"])

    def loss_of_state(params, mean, x):
        return loss(constrain, params, x - mean), mean

    plan = functools.partial(plan_memory, optfn.sgd(0.1), params, mesh_of(), shard="params")
    expected = plan(loss_fn=functools.partial(loss, lambda x, *spec: x), batch=x)
    assert expected.gathered_whole.keys() == {"head"}
    assert plan(loss_fn=functools.partial(loss, constrain), batch=x)._replace(
        gathered_whole={}
    ) == expected._replace(gathered_whole={})
    found = plan(loss_fn=loss_of_state, batch=x, model_state=mean)
    workers = mesh_of().shape["data"]
    assert found.sent == expected.sent + 2 * (workers - 1) / workers * mean.nbytes
    assert found.gathered_whole.keys() == {"head"}
