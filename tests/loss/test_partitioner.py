"""A step that is left to the compiler is the step of one device, whatever divides its arrays."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from arrays import weights
from compilations import count_compilations
from grids import suite
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from sharded_models import WIDTH, constrain

import optfn
from optfn.distributed import exchange, plan_memory, quantize, sharded, top_k

EXAMPLES, STEPS = 32, 3
AUTO, EXPLICIT = AxisType.Auto, AxisType.Explicit
SPECS = {"first/w": P("data", "model"), "first/b": P("model"), "last/w": P("model", "data")}
PARAMS = {
    "count": np.arange(3),  # not trained
    "first": {"b": weights(0, 4 * WIDTH), "w": weights(1, WIDTH, 4 * WIDTH)},
    "last": {"w": weights(2, 4 * WIDTH, WIDTH)},
}
BATCH = {"rate": np.float32(0.7), "x": weights(3, EXAMPLES, WIDTH), "y": weights(4, EXAMPLES)}


def mesh_of(kind=AUTO):
    return Mesh(np.array(jax.devices()).reshape(4, 2), ("data", "model"), axis_types=(kind,) * 2)


def spec_of(path):
    return SPECS.get("/".join(key.key for key in path), P())


def placed(mesh, params=PARAMS):
    def place(path, x):
        return jax.device_put(x, NamedSharding(mesh, spec_of(path)))

    return jax.tree_util.tree_map_with_path(place, params)


def has_types():
    mesh = jax.sharding.get_abstract_mesh()
    return not mesh.empty and bool(mesh.explicit_axes)


def multiply(x, w, *spec):
    """Multiply matrices; along explicit axes JAX wants to know the sharding of the product."""
    if not has_types():
        return constrain(x @ w, *spec)
    w = jax.sharding.reshard(w, P(None, spec[1]))
    x = jax.sharding.reshard(x, P("data", None))
    return jnp.matmul(x, w, out_sharding=P(*spec))


def as_type(x, *spec):
    """Return an array with a sharding as its type; without explicit axes, the array itself."""
    return jax.sharding.reshard(x, P(*spec)) if has_types() else x


def outputs(params, x):
    hidden = multiply(x, params["first"]["w"], "data", "model")
    hidden = hidden + as_type(params["first"]["b"], "model")
    return multiply(jnp.tanh(hidden), params["last"]["w"], "data", None)


def loss_fn(params, batch):
    errors = jnp.mean(outputs(params, batch["x"]), -1) - as_type(batch["y"], "data")
    return batch["rate"] * jnp.mean(errors**2)


def train(tx, loss=loss_fn, *, params=PARAMS, steps=STEPS, **options):
    step = optfn.make_train_step(loss, tx, **options)
    state = step.init(params)
    for _ in range(steps):
        state, metrics = step(state, BATCH)
    return step, state, metrics


def tree_of(params):
    return jax.device_get(optfn.unpack(params) if optfn.leaves.nodes.is_packed(params) else params)


def assert_near(a, b, tolerance=2e-5):
    a, b = tree_of(a), tree_of(b)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(
        np.float32(x), np.float32(y), rtol=tolerance, atol=tolerance), a, b)  # fmt: skip


# tests/reference_run draws the others, wrappers and averages.
WAYS = {
    "as placed": lambda mesh: {"params": placed(mesh)},
    "specs": lambda mesh: {"shard": SPECS},
    "over one of two axes": lambda mesh: {
        "data_axis": ("data", "model"), "shard": sharded("params", axis="model")
    },
}  # fmt: skip
OPTIMIZERS = {
    "adamw": lambda: optfn.adamw(1e-2),
    "adafactor": lambda: optax.adafactor(1e-2, min_dim_size_to_factor=4),
    "line search": lambda: optax.chain(
        optax.sgd(0.1), optax.scale_by_backtracking_linesearch(4, store_grad=True)
    ),
}
OF_OPTAX = ("adafactor", "line search")  # these take no integers
CASES = [
    ("over one of two axes", "adamw", AUTO),
    ("specs", "adamw", EXPLICIT),
    ("as placed", "adamw", AUTO),
    ("specs", "adafactor", AUTO),
    ("specs", "line search", EXPLICIT),
]


def params_for(name):
    return {k: x for k, x in PARAMS.items() if k != "count" or name not in OF_OPTAX}


@functools.cache
def on_one_device(name):
    """Return the params and the loss of an optimizer after the steps."""
    _, state, metrics = train(OPTIMIZERS[name](), params=params_for(name))
    return jax.device_get((state.params, metrics["loss"]))


@pytest.mark.parametrize("way, name, kind", suite(CASES, *CASES[:2]))
def test_a_step_left_to_the_compiler_is_that_of_one_device(way, name, kind):
    tx, mesh = OPTIMIZERS[name], mesh_of(kind)
    expected, loss = on_one_device(name)
    options = {"mesh": mesh, "partitioner": "compiler", "params": params_for(name)} | WAYS[way](
        mesh
    )
    _, state, found = train(tx(), **options)
    assert_near(state.params, expected)
    np.testing.assert_allclose(found["loss"], loss, rtol=1e-4)


@pytest.mark.parametrize("way, kind", [("as placed", EXPLICIT), ("specs", AUTO)])
def test_state_stays_where_it_is(way, kind):
    mesh = mesh_of(kind)
    options = {"mesh": mesh, "partitioner": "compiler"} | WAYS[way](mesh)
    step, state, _ = train(optfn.adam(1e-2), steps=1, **options)
    before = jax.tree.map(lambda x: x.sharding, state)
    with count_compilations() as made:
        after, _ = step(state, BATCH)
    assert not made.value
    assert jax.tree.map(lambda x: x.sharding, after) == before
    assert after.params["first"]["w"].sharding.spec == P("data", "model")
    moments = [x for x in jax.tree.leaves(after.opt_state) if x.shape == (WIDTH, 4 * WIDTH)]
    assert moments and all(x.sharding.spec == P("data", "model") for x in moments)
    assert all(x.is_deleted() for x in jax.tree.leaves(state.params))  # it was donated


def test_steps_in_a_scan():
    mesh = mesh_of(EXPLICIT)
    step = optfn.make_train_step(loss_fn, optfn.adamw(1e-2), mesh=mesh, partitioner="compiler")

    @jax.jit
    def run(state, batches):
        return jax.lax.scan(step, state, batches)[0]

    batches = jax.tree.map(lambda x: np.stack([x] * STEPS), BATCH)
    state = run(step.init(placed(mesh)), batches)
    assert_near(state.params, on_one_device("adamw")[0])


def test_packed_params():
    options = {"mesh": mesh_of(), "partitioner": "compiler", "packed": True, "shard": "params"}
    assert_near(train(optfn.adamw(1e-2), **options)[1].params, on_one_device("adamw")[0])


def test_model_state_and_aux_are_those_of_the_whole_batch():
    def loss(params, mean, batch):
        mean = 0.5 * mean + 0.5 * jnp.mean(batch["x"], 0)
        out = outputs(params, batch["x"] - mean)
        return jnp.mean(out**2), (mean, {"of examples": jnp.mean(out, -1)})

    def run(**options):
        step = optfn.make_train_step(
            loss, optfn.sgd(0.1), has_aux=True, model_state=True, **options
        )
        return step(step.init(PARAMS, np.zeros(WIDTH, np.float32)), BATCH)

    expected, metrics = run()
    state, found = run(mesh=mesh_of(EXPLICIT), partitioner="compiler", shard=SPECS)
    assert_near(state.model_state, expected.model_state)
    assert_near(found["aux"], metrics["aux"])


def test_lower_plans_the_step_of_params_as_they_are_placed():
    mesh = mesh_of()
    step = optfn.make_train_step(loss_fn, optfn.adam(1e-2), mesh=mesh, partitioner="compiler")
    memory = step.lower(placed(mesh), BATCH).compile().memory_analysis()
    whole = step.lower(PARAMS, BATCH).compile().memory_analysis()
    assert memory.argument_size_in_bytes < 0.4 * whole.argument_size_in_bytes
    plan = plan_memory(optfn.adam(1e-2), PARAMS, mesh, shard=SPECS)
    batch = 4 * (EXAMPLES // 4 * (WIDTH + 1) + 1)
    assert abs(memory.argument_size_in_bytes - batch - plan.params - plan.state) < 64
    assert abs(memory.alias_size_in_bytes - plan.params - plan.state) < 64  # the state is donated
    optfn.assert_in_place(step, step.init(placed(mesh)), BATCH)


@pytest.mark.parametrize(
    "options, match",
    [
        ({"mesh": None}, 'partitioner="compiler" needs mesh'),
        ({"local_steps": 2}, 'local_steps .* partitioner="compiler"'),
        ({"tables": "first/w", "shard_tables": True}, 'tables .* partitioner="compiler"'),
        ({"tables": "first/w", "shard": "params"}, 'tables .* partitioner="compiler"'),
        ({"shard": sharded("params", gather=quantize(8))}, 'gather=.* partitioner="compiler"'),
        ({"shard": sharded("params", reduce=quantize(8))}, 'reduce=.* partitioner="compiler"'),
        ({"reduce_dtype": "float32"}, 'reduce_dtype .* partitioner="compiler"'),
        ({"mesh": mesh_of, "packed": True}, 'packed .* partitioner="compiler"'),
        (
            {"tx": optfn.chain(exchange(top_k(0.1)), optfn.sgd(0.1))},
            'exchanges .* partitioner="compiler"',
        ),
        (
            {"tx": optfn.dgc_momentum(0.1, 0.9, rampup_begin_step=0)},
            'exchanges .* partitioner="compiler"',
        ),
    ],
)
def test_what_needs_a_worker_is_refused(options, match):
    options = {"mesh": mesh_of(), "tx": optfn.sgd(0.1)} | options
    if callable(options["mesh"]):
        options["mesh"] = mesh_of(EXPLICIT)
    tx = options.pop("tx")
    with pytest.raises(ValueError, match=match):
        optfn.make_train_step(loss_fn, tx, partitioner="compiler", **options).init(PARAMS)


def test_a_pipeline_is_refused():
    with pytest.raises(ValueError, match="value_and_grad cannot be combined"):
        optfn.make_train_step(
            None, optfn.sgd(0.1), value_and_grad=lambda params, batch: (0.0, params),
            mesh=mesh_of(), partitioner="compiler",
        )  # fmt: skip


def test_other_names_are_refused():
    with pytest.raises(ValueError, match="partitioner"):
        optfn.make_train_step(loss_fn, optfn.sgd(0.1), partitioner="xla")
