"""A program as Python that a user could have written: the text that is run is the text shown."""

import dataclasses
import inspect
import math

from reference_run import model
from reference_run.program import DAY, STACKED, Program, first_params, large_leaf, make_batch


@dataclasses.dataclass(frozen=True)
class Way:
    """How a run is divided: options of the step as Python, its workers and microbatches.

    exchanging: how many workers exchange gradients by the optimizer.
    stages: how many devices a pipeline takes; virtual: its stages on each; pipeline: its other
        options as Python.
    by_hand: the transformation of JAX around a step that the user writes.
    of_layers: the options for stacked layers, if they name leaves.
    """

    options: str = ""
    workers: int = 0
    microbatches: int = 1
    exchanging: int = 1
    stages: int = 0
    virtual: int = 1
    pipeline: str = ""
    by_hand: str = ""
    of_layers: str = ""

    @property
    def devices(self):
        """How many devices it takes."""
        return 4 if "mesh" in self.options else 1

    @property
    def parts(self):
        """What the number of examples must be a multiple of."""
        return max(self.workers, 1) * self.microbatches


_MESH, _GRID = "mesh=optfn.distributed.data_mesh(4)", 'mesh=grid, data_axis=("slow", "fast")'
_HOST = 'state_memory="pinned_host"'
_RECOMPUTE = 'recompute=["hidden"]'
_GPIPE = 'schedule="gpipe", stash="input"'
_TABLES, _DIVIDED = 'tables="[tu]"', "shard_tables=True"
WAYS = {
    "one": Way(),
    "microbatches": Way("microbatches=4", 0, 4),
    "packed": Way("packed=True"),
    "packed, microbatches": Way("packed=True, microbatches=2", 0, 2),
    "mesh": Way(_MESH, 4),
    "mesh, microbatches": Way(f"{_MESH}, microbatches=2", 4, 2),
    "mesh, packed": Way(f"{_MESH}, packed=True", 4),
    "mesh, reduced in float32": Way(f'{_MESH}, reduce_dtype="float32"', 4),
    "params, reduced in float32": Way(
        f'{_MESH}, shard="params", reduce_dtype="float32", microbatches=2', 4, 2
    ),
    "state": Way(f'{_MESH}, shard="state"', 4),
    "state, packed": Way(f'{_MESH}, shard="state", packed=True', 4),
    "state, microbatches": Way(f'{_MESH}, shard="state", microbatches=2', 4, 2),
    "params": Way(f'{_MESH}, shard="params"', 4),
    "params, microbatches": Way(f'{_MESH}, shard="params", microbatches=2', 4, 2),
    "gather once": Way(
        f'{_MESH}, shard=optfn.distributed.sharded("params", gather_once=True), microbatches=2',
        4,
        2,
    ),
    "whole": Way(f'{_MESH}, shard=optfn.distributed.sharded("params", whole="stages/w")', 4),
    "recompute, microbatches": Way(f"{_RECOMPUTE}, microbatches=4", 0, 4),
    "recompute, params": Way(f'{_MESH}, {_RECOMPUTE}, shard="params"', 4),
    "not donated": Way(f"{_MESH}, donate=False", 4),
    "explicit": Way("mesh=explicit", 4),
    "explicit, params": Way('mesh=explicit, shard="params"', 4),
    "specs": Way(
        f'{_MESH}, shard={{"w": P("data")}}',
        4,
        of_layers=f'{_MESH}, shard={{"stages/w": P(None, "data")}}',
    ),
    "host": Way(_HOST),
    "host, mesh, microbatches": Way(f"{_MESH}, {_HOST}, microbatches=2", 4, 2),
    "host, params": Way(f'{_MESH}, {_HOST}, shard="params"', 4),
    "host, state, packed": Way(f'{_MESH}, {_HOST}, shard="state", packed=True', 4),
    "compiler": Way(f'{_MESH}, partitioner="compiler"', 0),
    "compiler, params": Way(f'{_MESH}, partitioner="compiler", shard="params"', 0),
    "compiler, microbatches": Way(f'{_MESH}, partitioner="compiler", microbatches=2', 0, 2),
    "grid, state": Way(f'{_GRID}, shard=optfn.distributed.sharded("state", axis="fast")', 4),
    "grid, params": Way(f'{_GRID}, shard=optfn.distributed.sharded("params", axis="fast")', 4),
    "grid, params, microbatches": Way(
        f'{_GRID}, shard=optfn.distributed.sharded("params", axis="fast"), microbatches=2', 4, 2
    ),
    "grid, specs": Way(
        f'{_GRID}, shard={{"w": P("slow"), "b": P("fast")}}',
        4,
        of_layers=f'{_GRID}, shard={{"stages/w": P("slow"), "stages/b": P("fast")}}',
    ),
    "mesh, exchange": Way(_MESH, 4, 1, 4),
    "pair, exchange": Way("mesh=optfn.distributed.data_mesh(2)", 2, 1, 2),
    "mesh, microbatches, exchange": Way(f"{_MESH}, microbatches=2", 4, 2, 4),
    "mesh, packed, exchange": Way(f"{_MESH}, packed=True", 4, 1, 4),
    "host, mesh, exchange": Way(f"{_MESH}, {_HOST}", 4, 1, 4),
    "tables": Way(_TABLES),
    "tables, microbatches": Way(f"{_TABLES}, microbatches=2", 0, 2),
    "mesh, tables": Way(f"{_MESH}, {_TABLES}", 4),
    "state, tables": Way(f'{_MESH}, {_TABLES}, shard="state"', 4),
    "params, tables": Way(f'{_MESH}, {_TABLES}, shard="params"', 4),
    "divided tables": Way(f"{_MESH}, {_TABLES}, {_DIVIDED}", 4),
    "divided tables, microbatches": Way(f"{_MESH}, {_TABLES}, {_DIVIDED}, microbatches=2", 4, 2),
    "divided tables, state": Way(f'{_MESH}, {_TABLES}, {_DIVIDED}, shard="state"', 4),
    "divided tables, params": Way(f'{_MESH}, {_TABLES}, {_DIVIDED}, shard="params"', 4),
    "grid, tables": Way(f"{_GRID}, {_TABLES}", 4),
    "grid, divided tables": Way(f"{_GRID}, {_TABLES}, {_DIVIDED}", 4),
    "grid, state, divided tables": Way(
        f'{_GRID}, {_TABLES}, {_DIVIDED}, shard=optfn.distributed.sharded("state", axis="fast")', 4
    ),
    "grid, params, tables": Way(
        f'{_GRID}, {_TABLES}, shard=optfn.distributed.sharded("params", axis="fast")', 4
    ),
    "pipeline": Way("", 0, 4, stages=4),
    "pipeline, zb": Way("", 0, 4, stages=4, pipeline='schedule="zb"'),
    "pipeline, gpipe": Way("", 0, 4, stages=2, virtual=2, pipeline=_GPIPE),
    "pipeline, virtual": Way("", 0, 4, stages=2, virtual=2),
    "pipeline, data": Way("", 2, 2, stages=2, virtual=2, pipeline='data_axis="data"'),
    "pipeline, packed": Way("packed=True", 0, 4, stages=4),
    "pipeline, host": Way(_HOST, 0, 4, stages=4),
    "pipeline, workers": Way(
        'mesh=stages, shard={"stages/.*": P(None, "stage")}', 2, 2, stages=2, virtual=2
    ),
    "pipeline, workers, data": Way(
        'mesh=stages, shard={"stages/w": P("stage", None, "data"), "stages/b": P("stage")}',
        2,
        2,
        stages=4,
    ),
    "mesh, tables, exchange": Way(f"{_MESH}, {_TABLES}", 4, 1, 4),
    "mesh, tables, microbatches, exchange": Way(f"{_MESH}, {_TABLES}, microbatches=2", 4, 2, 4),
    "local steps": Way(_MESH),
    "local steps, tables": Way(f"{_MESH}, {_TABLES}"),
    "local steps, packed": Way(f"{_MESH}, packed=True"),
    "grid, exchange": Way(_GRID, 4, 1, 2),
    "grid, state, exchange": Way(
        f'{_GRID}, shard=optfn.distributed.sharded("state", axis="fast")', 4, 1, 2
    ),
    "grid, params, exchange": Way(
        f'{_GRID}, shard=optfn.distributed.sharded("params", axis="fast")', 4, 1, 2
    ),
}
WAYS |= {
    "by hand": Way(by_hand="jit"),
    "by hand, packed": Way(by_hand="jit"),
    "by hand, tables": Way(by_hand="jit"),
    "by hand, pmap": Way(_MESH, 4, by_hand="pmap"),
    "by hand, shard_map": Way(_MESH, 4, by_hand="shard_map"),
    "by hand, pmap, exchange": Way(_MESH, 4, 1, 4, by_hand="pmap"),
    "by hand, shard_map, exchange": Way(_MESH, 4, 1, 4, by_hand="shard_map"),
}
_EXCHANGE = "optfn.chain(exchange({0}, axis_name={1!r}, min_size=2), {tx})"
_SCHEDULES = {
    "inverse_time": "optfn.schedules.inverse_time({rate}, 2, 0.5)",
    "linear_warmup": "optfn.schedules.linear_warmup({rate}, 3, 0.0, {rate})",
    "piecewise": "optfn.schedules.piecewise([2], [{rate}, {rate} / 2])",
    "rises": "optfn.schedules.piecewise([3], [{rate} / 5, {rate}])",
    "cycle": "optfn.schedules.polynomial({rate}, 2, {rate} / 10, 2.0, cycle=True)",
    "warmup to cosine": "optfn.schedules.warmup_cosine({rate}, 2, 5, end={rate} / 4)",
    "warmup to steps": "optfn.schedules.linear_warmup("
    "optfn.schedules.step_decay({rate}, 2, 0.5), 2, 0.0, {rate})",
}
# What means the same as the usual text; "compare" and "statistics" ask the state at the end.
SPELLINGS = ("scan", "keywords", "patterns", "lookups", "minimize")
SPELLINGS += ("compare", "statistics", "record")
_MEAN_OF_ROWS = 'jnp.mean(params["t"][ids[:, :2]], 1)'
_MEAN_OF_LOOKUPS = '0.5 * params["t"][ids[:, 0]] + 0.5 * params["t"][ids[:, 1]]'
_SCAN = """
def hidden(params, x):
    layers = {{k: params["stages"][k] for k in ("w", "b")}}
    body = jax.checkpoint(lambda x, params: (layer(params, x), None))
    return jax.lax.scan(body, x, layers{more})[0]
"""
_AROUND = {
    "trace": "optfn.chain(optfn.scale_by_momentum(0.5), {tx})",
    "plateau": "optfn.chain({tx}, optfn.schedules.reduce_on_plateau("
    "{rate}, decay_rate=0.5, patience={0}{more}))",
    "scaled": "optfn.chain({tx}, optax.scale_by_schedule(lambda n: 1 / (1 + n)))",
    "ema": "optfn.chain({tx}, optfn.exponential_moving_average({0}{more}))",
    "model_average": "optfn.chain({tx}, optfn.model_average("
    "1.0, min_average_window={0}, max_average_window={0}))",
    "master_weights": "optfn.master_weights({tx}, {0})",
    "accumulate": "optfn.accumulate({tx}, {0})",
    "multi_steps": "optax.MultiSteps({tx}, {0}).gradient_transformation()",
    "apply_if_finite": "optax.apply_if_finite({tx}, {0})",
    "skip_nonfinite": "optfn.skip_nonfinite({tx}{more})",
    "loss_scale": "optfn.dynamic_loss_scale({tx}, growth_interval={0}{more})",
    "skip_spikes": "optfn.skip_spikes({tx}, {0}, window={1}{more})",
    "record_metrics": "optfn.record_metrics({tx}{more})",
}
HEADER = """\
import os, signal, tempfile
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"
import jax, jax.numpy as jnp, numpy as np, optax, optfn
import collections, datetime
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import AxisType, Mesh, PartitionSpec as P
from optfn.distributed import exchange, power_sgd, quantize, scan_layers, top_k
from optfn.distributed import PipelineParams, pipeline_value_and_grad, stack_stages
jax.config.update("jax_enable_x64", True)
nan = np.nan
"""


_LAYER = """
def layer(params, x):
    return jnp.tanh(x @ params["w"] + params["b"])
"""
_HIDDEN = """
def hidden(params, x):
    return scan_layers(layer, params["stages"], x)
"""
# Small arrays go to the host too, in several chunks.
ON_HOST = """\
from optfn.loss.jaxprs import row_loops
from optfn.mesh.compilers import memories
memories.LARGE, row_loops.CHUNK = 1, 32
"""


def call(name, *arguments, **options):
    """Return the text of a call."""
    return f"{name}({', '.join([*arguments, *(f'{k}={v}' for k, v in options.items() if v)])})"


def rule_text(p: Program, way: str) -> str:
    """Return the text of the optimizer without what is around it."""
    name, options = p.rule
    rate = "1.0" if p.names("plateau") else repr(p.rate)
    if p.schedule:
        rate = _SCHEDULES[p.schedule].format(rate=rate)
    options = {k: repr(v) for k, v in options.items()}
    if name.startswith("optax."):
        before = [p.clip and clip_text(p.clip), p.regularization and decay_text(p.regularization)]
        links = [*filter(None, before), call(name, rate, **options)]
        return links[0] if len(links) == 1 else call("optfn.chain", *links)
    if name == "dgc_momentum":
        options |= {"axis_name": repr(axis_of(way)), "min_size": "2"}
    attrs = {k: p.attrs.get(k, {}) for k in p.leaves if k in p.attrs or k in p.stacked}
    attrs = {p.path_of(k): attr_text(x, k in p.stacked) for k, x in attrs.items()}
    if attrs and "patterns" in p.spelling:  # of two that match, the first one counts
        attrs |= {f"(?:{k})": "optfn.ParamAttr(learning_rate=0.0)" for k in attrs}
    return call(
        f"optfn.{name}",
        rate,
        **options,
        grad_clip=p.clip and clip_text(p.clip),
        regularization=p.regularization and decay_text(p.regularization),
        param_attrs=attrs and dict_text(attrs),
    )


def clip_text(clip):
    return f"optfn.clip_by_{clip[0]}({clip[1]})"


def decay_text(decay):
    if decay[0] == "matrices":  # a rule of another library, which asks for the shapes of leaves
        return f"optax.add_decayed_weights({decay[1]}, mask=matrices)"
    return f"optfn.{decay[0]}_decay({decay[1]})"


def attr_text(attr, is_stacked):
    shown = {k: decay_text(x) if k == "regularization" else repr(x) for k, x in attr.items()}
    return call("optfn.ParamAttr", **shown, stacked=1 if is_stacked else None)


def wrap(p: Program, tx: str, links) -> str:
    """Return the text of a transformation with links around it."""
    for name, *arguments in links:
        options = arguments.pop() if arguments and isinstance(arguments[-1], dict) else {}
        if name == "loss_scale":
            options = {"initial_scale": 4.0, **options}
        more = "".join(f", {k}={v!r}" for k, v in options.items())
        if "evaluation" in arguments:
            mode = p.evaluate["mode"] if p.evaluate else "min"
            more += f', monitor="evaluation", mode="{mode}"'
        template = _AROUND[name]
        if "keywords" in p.spelling and name in ("skip_nonfinite", "loss_scale", "record_metrics"):
            template = template.replace("({tx}", "(tx={tx}")
        tx = template.format(*arguments, tx=tx, rate=p.rate, more=more)
    return tx


def optimizer_text(p: Program, way: str) -> str:
    """Return the text of the whole optimizer."""
    tx = rule_text(p, way)
    if p.partition:
        labels = {k: repr("own" if k in p.partition["leaves"] else "rest") for k in p.leaves}
        own = "optax.set_to_zero()" if p.partition.get("frozen") else tx
        own = wrap(p, own, p.partition["links"])
        tx = f'optax.partition({{"rest": {tx}, "own": {own}}}, {tree_text(p, labels)})'
    if p.exchanges and p.compressor:
        tx = _EXCHANGE.format(p.compressor, axis_of(way), tx=tx)
    return wrap(p, tx, p.links)


def axis_of(way: str) -> str:
    """Return the axis over which an optimizer exchanges gradients."""
    return "slow" if "grid" in way else "data"


def loss_text(p: Program) -> str:
    """Return the text of the loss."""
    names = {"model_state": p.model_state, "batch": True, "key": p.key, "step": p.pass_step}
    lines = [f"def loss_fn(params, {', '.join(k for k, v in names.items() if v)}):"]
    lines += ["params = params._asdict()"] * p.is_record
    lines += ["x, y, weights, *ids = batch"] if p.has_tables else ["x, y, weights = batch"]
    if p.rows > 1:
        lines += [f"x = jnp.mean(x.reshape(-1, {p.rows}, 4), 1)"]
    used = "weights" if p.is_weighted else "jnp.ones_like(weights)"
    lines += [
        f"used = {used}",
        "seen = jnp.where((used != 0)[:, None], x, 0)",
        f"out = outputs(params, seen{', *ids' if p.has_tables else ''})",
    ]
    if p.model_state:
        lines += ['out = out + 0.1 * model_state["mean"][0]']
    if p.key:
        lines += ['out_ = out * jax.random.uniform(key, out.shape, "float32", minval=0.5)']
    each = f"errors({'out_' if p.key else 'out'}, y)" + (
        " * (1 + 0.1 * step)" if p.pass_step else ""
    )
    lines += [f"each = jnp.where(used != 0, {each}, 0)"]
    mean = "optfn.Mean(jnp.sum(used * {0}), jnp.sum(used))"
    results = [mean.format("each") if p.is_weighted else "jnp.mean(each)"]
    further = []
    if p.model_state:
        mean_text = "jnp.mean(x, 0)"
        if p.model_state == "weights":
            mean_text = "jnp.sum(weights[:, None] * x, 0) / jnp.sum(weights)"
        mean_text = f'0.9 * model_state["mean"] + 0.1 * {mean_text}'
        key = ', "key": jax.random.split(model_state["key"])[0]' * (p.model_state == "key")
        further += [f'{{"mean": {mean_text}, "seen": model_state["seen"] + 1{key}}}']
    if p.aux:
        numbers = '"abs": jnp.mean(jnp.abs(out)), "big": jnp.sum(each > 1)'
        further += [f'{{{numbers}, "mean": {mean.format("out")}}}']
    results += further if len(further) < 2 else [f"({', '.join(further)})"]
    return "\n    ".join([*lines, f"return {', '.join(results)}"])


def array_text(x) -> str:
    """Return the text of an array."""
    dtype = str(x.dtype)
    if x.size == large_leaf().size:
        return f'(np.sin(np.arange({x.size}.0)).reshape{x.shape} / 4).astype("{dtype}")'
    return f"np.array({x.tolist()}, {dtype!r})" if x.size else f"np.zeros({x.shape}, {dtype!r})"


def step_text(p: Program, way: str) -> str:
    """Return the text that makes the step and its first state: what is compiled once."""
    if p.is_pipeline:
        return pipeline_text(p, way)
    options = options_text(p, way)
    hidden = _HIDDEN
    if {"scan", "reversed"}.intersection(p.spelling):
        hidden = _SCAN.format(more=", reverse=True" if "reversed" in p.spelling else "")
    hidden = _LAYER + hidden if p.stages else inspect.getsource(model.hidden)
    lines = [hidden, *map(inspect.getsource, (model.outputs, model.errors))]
    if "lookups" in p.spelling:
        lines[1] = lines[1].replace(_MEAN_OF_ROWS, _MEAN_OF_LOOKUPS)
    lines += [loss_text(p), "", judge_text(p)]
    if p.is_record:
        lines += [f'Model = collections.namedtuple("Model", {p.fields})']
    if "explicit" in WAYS[way].options:
        kinds = "axis_types=(AxisType.Explicit,)"
        lines += [f'explicit = Mesh(np.array(jax.devices()[:4]), ("data",), {kinds})']
    if "grid" in WAYS[way].options:
        lines += ['grid = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("slow", "fast"))']
    if "matrices" in str((p.attrs, p.regularization)):
        lines += ["def matrices(params):", "    return jax.tree.map(lambda x: x.ndim > 1, params)"]
    lines += [f"tx = {optimizer_text(p, way)}"]
    if WAYS[way].by_hand:
        return "\n".join([*lines, by_hand_text(p, way)])
    flags = {
        "model_state": bool(p.model_state),
        "average_model_state": bool(p.model_state and p.evaluate and p.evaluate["average"]),
    }
    first = ["params"] + ["model_state"] * bool(p.model_state)
    lines += [
        f"step = {call('optfn.make_train_step', 'loss_fn', 'tx', *options, **flags)}",
        f"params = {params_text(p)}",
        *([f"model_state = {model_state_text(p)}"] if p.model_state else []),
        f"start = step.init({', '.join(first)})",
        compiled_loop(p),
    ]
    return "\n".join(lines)


def options_text(p: Program, way: str) -> list[str]:
    """Return the texts of the options that `make_train_step` and `minimize` share."""
    options = WAYS[way].options
    options = WAYS[way].of_layers or options if p.stages else options
    more = {"has_aux": p.aux, "rng": 7 if p.key else None, "pass_step": p.pass_step}
    if p.local_steps > 1:
        more["local_steps"] = p.local_steps
        if p.outer is not None:
            outer = "optfn.momentum(0.7, 0.5)"
            if p.compressor:
                outer = _EXCHANGE.format(p.compressor, axis_of(way), tx=outer)
            more["outer"] = wrap(p, outer, p.outer)
    return [*filter(None, [options]), *(f"{k}={v}" for k, v in more.items() if v)]


def model_state_text(p: Program) -> str:
    """Return the text of the model state that a program begins with."""
    state = {"mean": f"np.zeros(4, {p.dtype!r})", "seen": "np.int32(0)"}
    return dict_text(state | ({"key": "jax.random.key(3)"} if p.model_state == "key" else {}))


_OBJECTIVE = """
def objective(params, opt_state, batch):
    scale = optfn.loss_scale(opt_state)
    return scale * loss_fn(params, batch), jnp.ones(())
"""
_OBJECTIVE_OF_MEAN = """
def objective(params, opt_state, batch):
    scale, mean = optfn.loss_scale(opt_state), loss_fn(params, batch)
    weight = {weight}
    return scale * {workers}mean.total / jnp.where(weight == 0, 1, weight), weight
"""
_BY_HAND = """
def take_step(state, batch):
    (loss, weight), grads = {value_and_grad}(
        state.params, state.opt_state, batch
    )
    {average}loss = loss / optfn.loss_scale(state.opt_state)
    updates, opt_state = tx.update(
        grads, state.opt_state, state.params, value=loss{weight}
    )
    params = optfn.apply_updates(state.params, updates)
    row = {{"loss": jnp.where(weight == 0, nan, loss){row}}}
    return optfn.TrainState(state.step + 1, params, opt_state, None), row

params = {params}
start = optfn.TrainState(np.int32(0), params, tx.init(params), None)
"""
_STEPS = {
    "jit": "step = jax.jit(take_step)",
    "pmap": """
start = jax.tree.map(lambda x: jnp.broadcast_to(x, (4, *jnp.shape(x))), start)
on_devices = jax.pmap(take_step, axis_name="data")

def step(state, batch):
    state, row = on_devices(state, [x.reshape(4, -1, *x.shape[1:]) for x in batch])
    return state, jax.tree.map(lambda x: x[0], row)
""",
    "shard_map": """
mesh = optfn.distributed.data_mesh(4)
specs = optfn.distributed.state_specs(tx, params)
specs = optfn.TrainState(P(), P(), specs, None)
step = jax.jit(jax.shard_map(
    take_step, mesh=mesh, in_specs=(specs, P("data")), out_specs=(specs, P()), check_vma=False
))
start = start._replace(opt_state=optfn.distributed.init_state(tx, params, mesh))
""",
}


def by_hand_text(p: Program, way: str) -> str:
    """Return the text of a step that a user writes around `tx.update`, and of its first state."""
    on_devices = WAYS[way].workers > 0
    has_rate = not (p.partition or p.rule[0].startswith("optax.")) or p.names("plateau")
    row = [', "weight": weight'] if p.is_weighted else []
    row += [", **optfn.metrics(opt_state)"] if p.names("record_metrics") else []
    row += [', "loss_scale": optfn.loss_scale(opt_state)'] if p.names("loss_scale") else []
    row += [', "learning_rate": optfn.get_learning_rate(opt_state)'] if has_rate else []
    objective = _OBJECTIVE
    if p.is_weighted:
        weight = 'jax.lax.psum(mean.weight, "data")' if on_devices else "mean.weight"
        objective = _OBJECTIVE_OF_MEAN.format(weight=weight, workers="4 * " * on_devices)
    average = "loss" if p.exchanges else "loss, grads"
    average = f'{average} = jax.lax.pmean(({average}), "data")\n    ' if on_devices else ""
    value_and_grad = "jax.value_and_grad(objective, has_aux=True)"
    if "tables" in way:
        value_and_grad = 'optfn.sparse.value_and_grad(objective, "[tu]", has_aux=True)'
    elif "count" in p.leaves:
        value_and_grad = "jax.value_and_grad(objective, has_aux=True, allow_int=True)"
    params = params_text(p)
    if "packed" in way:
        params = f"optfn.pack({params})"
        objective = objective.replace("loss_fn(params", "loss_fn(optfn.unpack(params)")
    step = _BY_HAND.format(
        value_and_grad=value_and_grad,
        average=average,
        weight=", weight=weight" * p.is_weighted,
        row="".join(row),
        params=params,
    )
    return objective + step + _STEPS[WAYS[way].by_hand]


def params_text(p: Program) -> str:
    """Return the text of the params that a program begins with."""
    return tree_text(p, {k: array_text(x) for k, x in first_params(p).items()})


def tree_text(p: Program, texts) -> str:
    """Return the text of a tree like the params, from that of each leaf."""
    texts = dict(texts)
    layers = dict_text({k: texts.pop(k) for k in STACKED}) if p.stages else ""
    layers = layers if p.stacked or not layers else f"optfn.Stacked({layers})"
    texts |= {"stages": layers} if layers else {}
    if p.is_record:
        return call("Model", **texts)
    return dict_text(texts)


def dict_text(texts) -> str:
    """Return the text of a dict, from that of its values."""
    return "{" + ", ".join(f"{k!r}: {x}" for k, x in texts.items()) + "}"


def pipeline_text(p: Program, way: str) -> str:
    """Return the text that makes the step of a pipeline and its first state.

    "stages" is a mesh of 2 workers and stages, for a way with data, and of stages alone without.
    """
    used = "weights" if p.is_weighted else "jnp.ones_like(weights)"
    result = (
        "optfn.Mean(jnp.sum(used * each), jnp.sum(used))" if p.is_weighted else "jnp.mean(each)"
    )
    params, like = first_params(p), WAYS[way]
    stages = [dict_text({k: array_text(params[k][i]) for k in STACKED}) for i in range(p.stages)]
    shared = dict_text({k: array_text(x) for k, x in params.items() if k not in STACKED})
    virtual = like.virtual if like.virtual > 1 else None
    made = call(
        "pipeline_value_and_grad",
        "stage_fn",
        "loss_fn",
        *([like.pipeline] if like.pipeline else []),
        mesh="stages",
        num_microbatches=like.microbatches,
        virtual_stages=virtual,
        embed="embed",
    )
    blocks = call("stack_stages", "blocks", mesh="stages", virtual_stages=virtual)
    options = f", {like.options}" if like.options else ""
    shape, names = (like.stages,), ("stage",)
    if like.workers:
        shape, names = (2, *shape), ("data", *names)
    return f"""
{inspect.getsource(model.errors)}
def embed(inputs, shared):
    x, weights = inputs
    used = {used}
    return jnp.where((used != 0)[:, None], x, 0)

def stage_fn(params, h):
    return jnp.tanh(h @ params["w"] + params["b"])

def loss_fn(h, targets, shared):
    y, weights = targets
    used = {used}
    each = jnp.where(used != 0, errors(shared["s"] * jnp.sum(h, -1), y), 0)
    return {result}

stages = Mesh(np.array(jax.devices()[:{math.prod(shape)}]).reshape{shape}, {names})
value_and_grad = {made}
tx = {optimizer_text(p, way)}
step = optfn.make_train_step(None, tx, value_and_grad=value_and_grad{options})
blocks = [{", ".join(stages)}]
start = step.init(PipelineParams({blocks}, {shared}))
{compiled_loop(p)}"""


_KILLED = """
class Killed(Exception):
    pass
"""
_UNTIL = '''
class Until:
    """The batches of a run that dies before call k."""
    def __init__(self, batches, k):
        self.batches, self.k, self.epoch = batches, k, 0
    def set_epoch(self, epoch):
        self.epoch = epoch
        if hasattr(self.batches, "set_epoch"):
            self.batches.set_epoch(epoch)
    def __iter__(self):
        for i, batch in enumerate(self.batches, self.epoch * PER_EPOCH):
            if i == self.k:
                raise Killed
            yield batch
'''
_READER = '''
class Reader:
    """Batches in an iterator that saves and restores its position; it dies before call k."""
    def __init__(self, batches, k=None):
        self.batches, self.k, self.at = batches, k, 0
    def __iter__(self):
        return self
    def __next__(self):
        if self.at == self.k:
            raise Killed
        if self.at == len(self.batches):
            raise StopIteration
        self.at += 1
        return self.batches[self.at - 1]
    def get_state(self):
        return {"at": self.at}
    def set_state(self, state):
        self.at = state["at"]
'''


def data_text(p: Program) -> str:
    """Return the text that makes batches, evaluation and directory."""
    lines = [inspect.getsource(make_batch), "batches = ["]
    for b in p.batches:
        bad = f", {b['bad']!r}" if b.get("bad") else ""
        more = "" if p.dtype == "float64" else f", dtype={p.batch_dtype!r}"
        more += f", rows={p.rows}" if p.rows > 1 else ""
        more += ", ids=True" if p.has_tables else ""
        lines += [f"    make_batch({b['seed']}, {b['weights']}{bad}{more}),"]
    lines += ["]"]
    if isinstance(p.loader, list | tuple):
        _, size, seed, drop_last = p.loader
        lines += ["arrays = tuple(map(np.concatenate, zip(*batches)))"]
        if p.is_pipeline:
            lines += ["arrays = (arrays[0], arrays[2]), arrays[1:]"]
        lines += [f"batches = optfn.shuffled(arrays, {size}, seed={seed}, drop_last={drop_last})"]
    elif p.is_pipeline:
        lines += ["batches = [((x, w), (y, w)) for x, y, w in batches]"]
    if any(part.get("kill") is not None for part in p.parts):
        per_epoch = p.num_steps // (p.epochs or 1) // p.local_steps
        lines += [_KILLED]
        lines += [_UNTIL.replace("PER_EPOCH", str(per_epoch))] if p.loader != "reader" else []
    lines += [_READER] if p.loader == "reader" else []
    return "\n".join([*lines, "directory = tempfile.mkdtemp()"])


def evaluation_text(p: Program) -> str:
    """Return the text that makes the evaluation, "" if there is none."""
    if not p.evaluate:
        return ""
    if p.evaluate["values"]:
        lines = [
            f"values, given = {p.evaluate['values']}, []",
            "def evaluate(params, *model_state):",
            "    given.append(values[len(given) % len(values)])",
            f"    return {result_text(p, 'given[-1]')}",
        ]
    elif p.evaluate.get("held"):
        more = f"dtype={p.batch_dtype!r}, ids={p.has_tables}"
        batches = [f"make_batch({b['seed']}, {b['weights']}, {more})" for b in model.HELD]
        lines = [
            f"loss_of_held = optfn.over_batches(judge, [{', '.join(batches)}])",
            "def evaluate(*trees):",
            f"    return {result_text(p, 'loss_of_held(*trees)')}",
        ]
    else:  # an average leaves counters and keys as they are
        lines = [
            "def evaluate(*trees):",
            "    leaves = jax.tree.leaves(trees)",
            "    leaves = [x for x in leaves if jnp.issubdtype(x.dtype, np.inexact)]",
            "    leaves = map(np.float64, jax.device_get(leaves))",
            f"    return {result_text(p, 'float(sum(map(np.sum, leaves)))')}",
        ]
    return "\n".join(lines)


def judge_text(p: Program) -> str:
    """Return the text of a function that gives the loss of a batch outside of the step."""
    arguments = "params, model_state, batch" if p.model_state else "params, batch"
    more = ", jax.random.fold_in(jax.random.key(7), 0)" * p.key + ", 0" * p.pass_step
    loss = f"loss_fn({arguments}{more})" + "[0]" * bool(p.aux or p.model_state)
    return f"def judge({arguments}):\n    return {loss}"


def result_text(p: Program, value: str) -> str:
    """Return the text of the result of an evaluation."""
    return f'{{"score": {value}, "other": 1.0}}' if p.evaluate.get("named") else value


_NEWEST = """with tempfile.TemporaryDirectory() as saved:
    optfn.save_checkpoint(saved, state{})
    state, _ = optfn.restore_checkpoint(saved, start)
"""
_INTO_COPY = """path = optfn.save_checkpoint(directory + "/saved", state)
template = jax.tree.map(jnp.copy, start)  # whose arrays the state shares
state, _ = optfn.load_checkpoint(path, template, {})
"""
CARRIES = {
    "state": "",
    "file": 'path = optfn.save_checkpoint(directory + "/saved", state)\n'
    "state, _ = optfn.load_checkpoint(path, start)\n",
    "newest": _NEWEST.format(", keep=1"),
    "parts": _NEWEST.format(", sharded=True"),
    "thaw": _INTO_COPY.format("strict=False"),
    "only": _INTO_COPY.format('only="params/.*"'),
    "mapping": "state = optfn.load_state_dict(start, optfn.state_dict(state))\n",
    "params": "state = step.init(state.params, state.model_state)\n",
}


_OWN_LOOP = """{before}state, rows = {start}, []
for batch in {data}:
    state, row = step(state, batch)
    aux = row.pop("aux", {{}})
    rows.append(jax.device_get(row | {{f"aux/{{k}}": x for k, x in aux.items()}}))
history = {{k: [row[k] for row in rows] for k in rows[0]}} | {{"stopped": "{stopped}"}}
"""


def compiled_loop(p: Program) -> str:
    """Return the text of a program of all calls of the loop, "" if each is a program."""
    return COMPILED_LOOPS.get(p.loop, "")


_ALL_AT_ONCE = """{before}stacked = jax.tree.map(lambda *x: np.stack(x), *{data})
{run}
aux = rows.pop("aux", {{}})
rows = jax.device_get(rows | {{f"aux/{{k}}": x for k, x in aux.items()}})
history = {{k: list(x) for k, x in rows.items()}} | {{"stopped": "{stopped}"}}
"""
# One program for all calls; of two runs, of which the first has other data.
COMPILED_LOOPS = {
    "scan": "take_steps = jax.jit(lambda *x: jax.lax.scan(step, *x))",
    "vmap": "take_steps = jax.jit(jax.vmap(lambda *x: jax.lax.scan(step, *x)))",
}
_RUNS = {
    "scan": "state, rows = take_steps({start}, stacked)",
    "vmap": """
both = jax.tree.map(lambda x: np.stack([x[::-1], x]), stacked)
start_of_both = jax.tree.map(lambda x: jnp.stack([x, x]), {start})
state, rows = jax.tree.map(lambda x: x[1], take_steps(start_of_both, both))
""",
}


def loop_text(p: Program, part: dict) -> str:
    """Return the text of a loop that the user writes."""
    first, steps = "", part.get("steps")
    start, before = "jax.tree.map(jnp.copy, start)", ""
    if "carry" in part:
        start, before = "state", carry_text(part)
        first = f"int(np.max(state.step)) // {p.local_steps}"
    end = "" if steps is None else steps // p.local_steps
    data = f"batches[{first}:{end}]"
    stopped = "batches" if steps is None else "steps"
    if p.loop in _RUNS:
        run = _RUNS[p.loop].format(start=start)
        return _ALL_AT_ONCE.format(before=before, run=run, data=data, stopped=stopped)
    return _OWN_LOOP.format(before=before, start=start, data=data, stopped=stopped)


def carry_text(part: dict) -> str:
    """Return the text that hands the state of the call before to the next one."""
    before = CARRIES[part["carry"]]
    if "set_rate" in part:
        before += f"state = optfn.set_learning_rate(state, {part['set_rate']})\n"
    return before


def is_minimized(p: Program, part: dict) -> bool:
    """Tell whether a call of the loop is one of `minimize`."""
    is_known = not p.is_pipeline and "donate" not in WAYS[part.get("way", p.way)].options
    return "minimize" in p.spelling and is_known and "carry" not in part


def fit_text(p: Program, part: dict) -> str:
    """Return the text of one call of the loop."""
    if p.loop != "fit":
        return loop_text(p, part)
    e, kill = p.evaluate, part.get("kill")
    calls = kill if kill is None else kill // p.local_steps
    data = "iter(batches)" if p.loader == "generator" else "batches"
    if "drop_last" in part:
        _, size, seed, _ = p.loader
        data = f"optfn.shuffled(arrays, {size}, seed={seed}, drop_last={part['drop_last']})"
    steps, start, before = part.get("steps"), "jax.tree.map(jnp.copy, start)", ""
    if "carry" in part:
        start, before = "state", carry_text(part)
        each = f" // {p.local_steps}" if p.local_steps > 1 else ""
        data = f"batches[int(state.step){each}:]"
        data = f"iter({data})" if p.loader == "generator" else data
        steps = steps and f"{steps} - int(state.step)"
    options = {
        "steps": steps,
        "epochs": p.epochs,
        "progress": "False",
        "prefetch": None if p.prefetch else "0",
    }
    if p.saves:
        every = "datetime.timedelta(days=1)" if p.save_every == DAY else p.save_every
        options |= {"checkpoint": "directory", "save_every": every, "keep": p.keep}
    if e:
        every = part.get("every", e["every"])
        options |= {
            "evaluate": "evaluate",
            "evaluate_every": every and repr(every),
            "patience": e["patience"],
        }
        options |= {
            "mode": repr(e["mode"]),
            "keep_best": e["keep_best"],
            "evaluate_average": e["average"] and repr(p.average_name or True),
            "monitor": repr("score") if e.get("named") else None,
        }
    if not p.save_frozen:
        options["save_frozen"] = "False"
    if p.stops:
        options["on_nonfinite"] = repr("stop")
    if p.reports:
        options["report"] = 'directory + ".html"'
    if p.log:
        if p.reports:
            options["count_tokens"] = repr("weight") if p.is_weighted else "lambda batch: 8"
        options["log"] = 'directory + ".jsonl"'
    if part.get("callback"):
        options["callback"] = f"lambda n, state, metrics: n == {part['callback']}"
    if part.get("signal"):
        signalled = f"n == {part['signal']} and os.kill(os.getpid(), signal.SIGTERM)"
        options["callback"] = f"lambda n, state, metrics: {signalled}"
    if p.loader == "reader":
        data = "Reader(batches)" if kill is None else f"Reader(batches, {calls})"
    elif kill is not None:
        data = f"Until({data}, {calls})"
    if is_minimized(p, part):
        first = "loss_fn", "tx", "params", data, *options_text(p, part.get("way", p.way))
        options["model_state"] = "model_state" if p.model_state else None
        text = call("optfn.minimize", *first, **options)
    else:
        text = call("optfn.fit", "step", start, data, **options)
    text = f"{before}state, history = {text}"
    return text if kill is None else f"try:\n    {text}\nexcept Killed:\n    state = None"


def whole_text(p: Program) -> str:
    """Return a program as a file that can be run by itself."""
    ways = [p.way, *(part.get("way", p.way) for part in p.parts)]
    header = HEADER + (ON_HOST if any("host" in way for way in ways) else "")
    lines, made = [header, data_text(p)], None
    for part in p.parts:
        step = step_text(p.of_part(part), part.get("way", p.way))
        lines += [] if step == made else [step]
        lines += [fit_text(p, part)] if made else [evaluation_text(p), fit_text(p, part)]
        made = step
    end = "print(state and jax.device_get((state.params, state.opt_state)))\nprint(history)"
    return "\n".join([*lines, end])
