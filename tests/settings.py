"""Small programs, one for each ability, and the settings of JAX that each is run under."""

import contextlib
import functools
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import reference_schedules
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import optfn
from optfn import distributed, schedules

STEPS = 3

# Programs


def random(seed, *shape):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


X = random(2, 8, 8)
IDS = np.arange(8, dtype=np.int32) % 5


@functools.cache
def arrays() -> dict[str, Any]:
    """Return the params of the programs; made once, under no setting."""
    dense = {"w1": random(0, 8, 16), "b": np.zeros(16, np.float32), "w2": random(1, 16, 1)}
    return {
        "dense": dense,
        "half": {name: x.astype(jnp.bfloat16) for name, x in dense.items()},
        "table": {"table": random(3, 16, 4), "w": np.ones((4, 1), np.float32)},
        "layers": {"layers": random(4, 3, 8, 8)},
    }


def dense_loss(params, x):
    w1, b, w2 = (params[name].astype(jnp.float32) for name in ("w1", "b", "w2"))
    hidden = checkpoint_name(jnp.tanh(x @ w1 + b[None]), "hidden")
    return jnp.mean(jnp.square(hidden @ w2))


def table_loss(params, ids):
    return jnp.mean(jnp.square(params["table"][ids] @ params["w"] - 1.0))


def scan_loss(params, x):
    def layer(x, w):
        return jnp.tanh(x @ w), None

    return jnp.mean(jnp.square(jax.lax.scan(jax.checkpoint(layer), x, params["layers"])[0]))


LOSSES = {"dense": dense_loss, "half": dense_loss, "table": table_loss, "layers": scan_loss}


def devices(name="data", count=4):
    return Mesh(np.array(jax.devices()[:count]), (name,))


def train(optimizer, of="dense", batch=None, mesh=False, **options):
    """Return a program: params after STEPS steps."""

    def program(within):
        step_options = options | ({"mesh": devices()} if mesh else {})
        step = optfn.make_train_step(LOSSES[of], optimizer(), **step_options)
        state = step.init(jax.tree.map(jnp.asarray, arrays()[of]))
        some = IDS if of == "table" else X
        return trained(step, state, some if batch is None else batch, within)

    return program


def trained(step, state, batch, within):
    batch = jax.tree.map(jnp.asarray, batch)
    # What a first call makes is made outside of `within`.
    state, _ = step(state, batch)
    with within():
        for _ in range(STEPS - 1):
            state, _ = step(state, batch)
    return jax.device_get(state.params)


def pipeline(within):
    mesh = devices("stage", 2)
    value_and_grad = distributed.pipeline_value_and_grad(
        lambda w, x: jnp.tanh(x @ w),
        lambda x, y: jnp.mean(jnp.square(x - y)),
        mesh=mesh,
        num_microbatches=4,
    )
    step = optfn.make_train_step(None, optfn.adam(1e-2), value_and_grad=value_and_grad)
    stages = [jnp.eye(8, dtype=jnp.float32), 0.5 * jnp.eye(8, dtype=jnp.float32)]
    x = jax.device_put(X, NamedSharding(mesh, P()))  # on all stages, as its step has no mesh
    return trained(step, step.init(distributed.stack_stages(stages, mesh=mesh)), (x, x), within)


def loop(of, batches, **options):
    """Return a program: params after a run of `minimize` that is resumed."""

    def program(within):
        del within  # Its evaluations and saves read the state.
        with tempfile.TemporaryDirectory() as folder:
            for steps in (2, 4):
                state, _ = optfn.minimize(
                    LOSSES[of],
                    optfn.adam(1e-2, lazy="tables" in options),
                    jax.tree.map(jnp.asarray, arrays()[of]),
                    batches,
                    steps=steps,
                    checkpoint=folder,
                    progress=False,
                    **options,
                )
        return jax.device_get(state.params)

    return program


def memory(within):
    del within
    plan = distributed.plan_memory(
        optfn.adam(1e-2), arrays()["layers"], devices(), shard="params", loss_fn=scan_loss, batch=X
    )
    # Not what is kept: a rate has 8 bytes under x64.
    return np.float64(plan.gradients), np.float64(plan.sent)


def wrapped():
    averaged = optfn.chain(
        optfn.adam(1e-2), optfn.exponential_moving_average(0.9), optfn.model_average(0.5)
    )
    guarded = optfn.skip_nonfinite(optfn.skip_spikes(optfn.accumulate(averaged, 2)))
    return optfn.record_metrics(guarded)


def exchanged(compressor):
    exchange = distributed.exchange(compressor, min_size=1)
    return lambda: optfn.chain(exchange, optfn.sgd(1e-2))


def all_schedules(within):
    del within  # They read numbers of the host.
    found = {}
    for name, cases in reference_schedules.CASES.items():
        made = [getattr(schedules, name)(*case) for case in cases]
        found[name] = [jax.jit(schedule)(jnp.int32(i)) for schedule in made for i in (0, 7, 1000)]
    return jax.device_get(found)


COMPRESSORS = {
    "quantize": lambda: distributed.quantize(4),
    "top-k": lambda: distributed.top_k(0.1),
    "PowerSGD": lambda: distributed.power_sgd(2),
    "top-k of integers": lambda: distributed.top_k(0.1, values="int2"),
    "top-k of bfloat16": lambda: distributed.top_k(0.1, chunk=None, values="bfloat16"),
    "stochastic quantize": lambda: distributed.quantize(4, stochastic=True),
    "signs": lambda: distributed.quantize(1),
    "stochastic signs": lambda: distributed.quantize(1, stochastic=True),
    "levels": lambda: distributed.quantize(2),
    "packed codes": lambda: distributed.quantize(8),
}


def rate():
    return schedules.linear_warmup(schedules.cosine(1e-2, 10, 10), 5, 0.0, 1e-2)


PROGRAMS: dict[str, Callable[[Any], Any]] = {
    "adam": train(lambda: optfn.adam(rate())),
    "attributes": train(
        lambda: optfn.adamw(
            1e-2,
            grad_clip=optfn.clip_by_global_norm(1.0),
            param_attrs={"b": optfn.ParamAttr(learning_rate=0.5)},
        )
    ),
    "lamb, bfloat16 moments": train(lambda: optfn.lamb(1e-2, moment_dtype="bfloat16")),
    "int8 moments": train(lambda: optfn.adam(1e-2, moment_dtype="int8")),
    "masters, copies": train(lambda: optfn.adam(1e-2, multi_precision=True), "half"),
    "masters, 24 bits": train(lambda: optfn.adam(1e-2, multi_precision=24), "half"),
    "masters, 32 bits": train(lambda: optfn.momentum(1e-2, 0.9, multi_precision=32), "half"),
    "muon": train(lambda: optfn.muon(1e-2)),
    "ftrl": train(lambda: optfn.ftrl(1e-2)),
    "lars": train(lambda: optfn.lars(1e-2, 0.9)),
    "asgd": train(lambda: optfn.asgd(1e-2)),
    "wrappers": train(wrapped),
    "loss scale": train(lambda: optfn.dynamic_loss_scale(optfn.adam(1e-2))),
    "plateau": train(lambda: optfn.chain(optfn.adam(1.0), schedules.reduce_on_plateau(1e-2))),
    "line search": train(lambda: optax.lbfgs(1e-1)),
    "packed": train(lambda: optfn.lamb(1e-2), packed=True),
    "recompute": train(lambda: optfn.adam(1e-2), recompute=("hidden",)),
    "microbatches": train(lambda: optfn.adam(1e-2), microbatches=2),
    "tables": train(lambda: optfn.adam(1e-2, lazy=True), "table", tables="table"),
    "exact tables": train(lambda: optfn.adam(1e-2, lazy="exact"), "table", tables="table"),
    "divided tables": train(
        lambda: optfn.adam(1e-2, lazy=True), "table", tables="table", shard_tables=True, mesh=True
    ),
    "workers": train(lambda: optfn.adam(1e-2), mesh=True),
    "divided state": train(lambda: optfn.adam(1e-2), mesh=True, shard="state"),
    "divided params": train(
        lambda: optfn.adam(1e-2, moment_dtype="int8"), mesh=True, shard="params"
    ),
    "divided layers": train(lambda: optfn.adam(1e-2), "layers", mesh=True, shard="params"),
    "compiler": train(lambda: optfn.adam(1e-2), mesh=True, partitioner="compiler"),
    "dgc": train(
        lambda: optfn.dgc_momentum(
            1e-2, 0.9, rampup_begin_step=0, sparsity=(0.9, 0.99, 0.999), min_size=1
        ),
        mesh=True,
    ),
    **{name: train(exchanged(make()), mesh=True) for name, make in COMPRESSORS.items()},
    "schedules": all_schedules,
    "local steps": train(
        lambda: optfn.adam(1e-2), batch=np.concatenate([X, X]), mesh=True, local_steps=2
    ),
    "pipeline": pipeline,
    "loop": loop("dense", [X] * 4),
    "loop of tables": loop("table", [IDS] * 4, tables="table"),
    "memory": memory,
}

# Settings


def nothing() -> AbstractContextManager[None]:
    return contextlib.nullcontext()


@contextlib.contextmanager
def configured(**values: Any) -> Iterator[None]:
    """Give flags of JAX other values for a while."""
    before = {name: getattr(jax.config, name) for name in values}
    for name, value in values.items():
        jax.config.update(name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            jax.config.update(name, value)


@contextlib.contextmanager
def strictest() -> Iterator[None]:
    """All that JAX and Python can refuse, at once; none of it changes a number."""
    with (
        warnings.catch_warnings(),
        configured(
            jax_numpy_rank_promotion="raise",
            jax_numpy_dtype_promotion="strict",
            jax_debug_nans=True,
            jax_enable_checks=True,
            jax_legacy_prng_key="error",
        ),
    ):
        warnings.simplefilter("error")
        yield


def transfers_refused() -> AbstractContextManager[None]:
    return jax.transfer_guard("disallow")


class Setting(NamedTuple):
    """A setting: a context of the whole program, and of its steps after the first one.

    tolerance: the largest difference of a param from the program without the setting.
    """

    around: Callable[[], AbstractContextManager[None]] = nothing
    within: Callable[[], AbstractContextManager[None]] = nothing
    tolerance: float = 0.0

    def run(self, program: str) -> Any:
        with self.around():
            return PROGRAMS[program](self.within)


SETTINGS = {
    "strictest": Setting(strictest),
    # Other numbers are drawn, for roundings and codes.
    "x64": Setting(lambda: configured(jax_enable_x64=True), tolerance=5e-3),
    "leaks": Setting(lambda: configured(jax_check_tracer_leaks=True)),
    "transfers": Setting(within=transfers_refused),
}
# In JAX 0.10 they are not all there, and custom derivatives may not close over traced values.
NEW_DERIVATIVES = ("jax_remat3", "jax_custom_vjp3", "jax_custom_jvp3")
if all(hasattr(jax.config, name) for name in NEW_DERIVATIVES):
    SETTINGS["new derivatives"] = Setting(
        lambda: configured(**dict.fromkeys(NEW_DERIVATIVES, True)), tolerance=1e-5
    )


@functools.cache
def expected(program: str) -> Any:
    """Return what a program gives under no setting."""
    return PROGRAMS[program](nothing)
