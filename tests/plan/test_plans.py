"""The bytes that `plan_memory` gives are those of the compiled step, for pairs that divide or send.

Bytes on a device are its parts of params and state; bytes sent are those of the collectives of the
compiled step over data axes.
"""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from grids import suite
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from pairs import ALTERNATIVES, EXAMPLES, FEATURES, PARAMS, impossible, made

import optfn
from benchmarks import wire
from optfn.distributed import MemoryPlan, data_mesh, plan_memory, sharded

# Pairs that the plan does not tell, and why.
LEFT_OUT = {
    # The CPU's compiler gathers leaves that are not scanned once, before the loop of microbatches.
    frozenset({"params", "microbatches"}),
    # A line search evaluates the loss as often as it likes.
    *(frozenset({"search", other}) for other in FEATURES),
}
DIVIDING = {"exchange", "dgc", "local_steps", "state", "params", "specs", "tables", "pipeline"}
PLANNED = [
    f"{a} + {b}"
    for a, b in itertools.combinations(FEATURES, 2)
    if not any({a, b} <= group for group in ALTERNATIVES)
    and not DIVIDING.isdisjoint({a, b})
    and not impossible((a, b))
    and frozenset({a, b}) not in LEFT_OUT
]


@pytest.mark.filterwarnings("ignore:.*row-sparse gradient becomes dense")
@pytest.mark.filterwarnings("ignore:dgc_momentum. momentum masking")
@pytest.mark.parametrize(
    "pair", suite(PLANNED, "exchange + local_steps", "specs + tables", "pipeline + aux")
)
def test_the_plan_is_that_of_the_compiled_step(pair):
    names = pair.split(" + ")
    step, state = made(tuple(names))
    mesh, options = step.mesh, step.options
    split = NamedSharding(step.layout.mesh, P(step.layout.data_axes))
    batch = tuple(
        jax.ShapeDtypeStruct((EXAMPLES,), dtype, sharding=split)
        for dtype in (jnp.int32, jnp.float32)
    )
    program = step.compiled.lower(state, batch).compile()
    data = {str(axis) for axis in step.layout.data_axes}
    sent = sum(v for axes, v in wire.bytes_by_axes(program, mesh).items() if {*axes} & data)
    held = [x.addressable_shards[0].data for x in jax.tree.leaves((state.params, state.opt_state))]

    devices = int(np.prod([mesh.shape[axis] for axis in step.layout.data_axes]))
    has_rows = "tables" in names and "dgc" not in names  # DGC makes rows dense
    plan = plan_memory(
        step.tx, PARAMS, mesh,
        shard=options.shard,
        data_axis=options.data_axis,
        tables=options.tables,
        lookups=EXAMPLES // devices // options.local_steps if has_rows else None,
        microbatches=options.microbatches,
        packed=options.packed,
        value_and_grad=options.value_and_grad is not None,
        local_steps=options.local_steps,
        outer=options.outer,
    )  # fmt: skip
    assert plan.params + plan.state == pytest.approx(sum(x.nbytes for x in held), rel=0.05)
    assert plan.sent == pytest.approx(sent, rel=0.02)


LORA = {"w": (512, 1024), "a": (512, 8), "b": (8, 1024)}
FROZEN = {"w": optfn.ParamAttr(trainable=False)}
CLIP = optfn.clip_by_global_norm(1.0)
TRAINED_IN_PART = {
    "frozen": lambda: optfn.adam(1e-2, param_attrs=FROZEN, grad_clip=CLIP),
    "partition": lambda: optax.partition(
        {"trained": optfn.adam(1e-2), "frozen": optax.set_to_zero()},
        {"w": "frozen", "a": "trained", "b": "trained"},
    ),
    "guard": lambda: optfn.skip_nonfinite(optfn.adam(1e-2, param_attrs=FROZEN)),
    "all": lambda: optfn.adam(1e-2),  # reads every gradient
}
SHARDS = {
    None: {},
    "state": {"shard": "state"},
    "params": {"shard": "params"},
    "two levels": {"shard": sharded("state", axis="fast"), "data_axis": ("slow", "fast")},
    "microbatches": {"shard": "params", "microbatches": 2},
    "local steps": {"local_steps": 2},
}


@pytest.mark.parametrize(
    ("rule", "shard"),
    [
        *(("frozen", "params"), ("partition", "state"), ("guard", "two levels")),
        *(("all", "microbatches"), ("frozen", "local steps"), ("all", None)),
    ],
)
def test_the_plan_counts_no_gradient_that_the_update_does_not_read(rule, shard):
    params = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in LORA.items()}
    tx, options, mesh = TRAINED_IN_PART[rule](), SHARDS[shard], data_mesh(8)
    if "data_axis" in options:
        mesh = Mesh(np.array(jax.devices()).reshape(2, 4), ("slow", "fast"))

    def loss(p, x):
        return jnp.mean(jnp.tanh(x @ p["w"] + x @ p["a"] @ p["b"]) ** 2)

    step = optfn.make_train_step(loss, tx, mesh=mesh, **options)
    program = step.lower(params, jax.ShapeDtypeStruct((32, 512), jnp.float32)).compile()
    plan = plan_memory(tx, params, mesh, **options)
    sent = sum(wire.bytes_by_axes(program, mesh).values())
    if shard == "microbatches":  # the CPU's compiler gathers params once, before the loop
        whole = sum(4 * int(np.prod(shape)) for shape in LORA.values())
        sent += 7 / 8 * whole
    assert plan.sent == pytest.approx(sent, rel=0.02)
    reads_all = rule == "all"
    small = 4 * 8 * (512 + 1024)
    assert plan.gradients == small + reads_all * 4 * 512 * 1024


def test_a_plan_is_shown_in_one_unit():
    plan = MemoryPlan(657_989_632, 1_315_979_264, 5_263_917_056, 0)
    assert plan.kept == 1_973_968_896
    assert (
        repr(plan)
        == str(plan)
        == (
            "MemoryPlan(params=0.658 GB, state=1.32 GB, kept=1.97 GB, gradients=5.26 GB, sent=0 GB)"
        )
    )
    small = MemoryPlan(0, 0, 0, 999, ("w",), {"b": "a.py:1"})
    assert repr(small).endswith(
        "sent=999 B, gathered_in_update=('w',), gathered_whole={'b': 'a.py:1'})"
    )
    assert repr(MemoryPlan(0, 0, 0, 0)).startswith("MemoryPlan(params=0 B,")


def test_a_summary_has_the_placement_of_tables():
    params = {"t": np.zeros((64, 4), np.float32), "w": np.zeros(3, np.float32)}
    tx, options = optfn.adam(0.1, lazy=True), {"mesh": data_mesh(8), "tables": "t"}
    assert "placement" not in optfn.summary(tx, params, **options)  # whole, as in a step made so
    with pytest.raises(ValueError, match="shard_tables=True needs tables"):
        optfn.summary(tx, params, mesh=data_mesh(8), shard_tables=True)
    text = optfn.summary(tx, params, **options, shard_tables=True)
    table, rest = text.splitlines()[2:4]
    assert "(data,)" in table and table.endswith(str(3 * 64 * 4 * 4 // 8))
    assert "whole" in rest and rest.endswith(str(3 * 3 * 4))


def test_the_batch_of_a_plan_is_that_of_all_devices():
    """As for `TrainStep.lower`; the loss is traced with the examples of a device's microbatch."""
    seen = []

    def loss(params, batch):
        x, scale = batch
        seen.append((x.shape, x.dtype, scale.shape))
        return jnp.mean(x @ params["w"]) * scale

    params, batch = {"w": jnp.ones((8, 8))}, (jnp.ones((64, 8), jnp.bfloat16), jnp.ones(()))
    options = {"mesh": data_mesh(8), "shard": "params", "loss_fn": loss}
    plan_memory(optfn.sgd(0.1), params, batch=batch, microbatches=2, **options)
    assert {*seen} == {((4, 8), jnp.dtype(jnp.bfloat16), ())}
    step = optfn.make_train_step(
        loss, optfn.sgd(0.1), mesh=data_mesh(8), shard="params", microbatches=2
    )
    seen.clear()
    step.lower(params, batch)
    assert {*seen} == {((4, 8), jnp.dtype(jnp.bfloat16), ())}


@pytest.mark.parametrize("has_aux", [False, True])
@pytest.mark.parametrize("kind", ["pair", "dict"])
def test_a_model_state_may_be_a_pair(kind, has_aux):
    """What a loss returns beside itself is a pair with aux only if it is not the model state."""
    model_state = (np.ones(2), np.ones(3)) if kind == "pair" else {"m": np.ones(5)}

    def loss(params, state, x):
        return jnp.mean(x @ params["w"]), (state, jnp.ones(())) if has_aux else state

    def plan(loss, **options):
        params, x = {"w": jnp.ones((8, 8))}, jnp.ones((64, 8))
        return plan_memory(optfn.sgd(0.1), params, data_mesh(8), loss_fn=loss, batch=x, **options)

    more = plan(loss, model_state=model_state).sent - plan(lambda p, x: loss(p, 0, x)[0]).sent
    assert more == 2 * 7 / 8 * 4 * (5 + has_aux)
