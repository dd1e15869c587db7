"""The step that trains: fluid's backward and apply_gradients.

`make_train_step` compiles it once and updates params and state in place.
"""

import contextlib
import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from optfn import checks, core
from optfn import mesh as meshes
from optfn.leaves import mismatch, tree
from optfn.leaves.nodes import is_packed
from optfn.leaves.packed import pack
from optfn.leaves.tree import Pattern
from optfn.leaves.types import Batch, LossFn, OptState, Params, PyTree, Updates
from optfn.mesh import AxisName
from optfn.optimizers.sgd import sgd
from optfn.parallel import data_parallel as parallel
from optfn.parallel import processes, traffic
from optfn.parallel import sharding as shards
from optfn.parallel.fingerprint import replicas_differ
from optfn.parallel.sharding import Kind, Sharding
from optfn.sparse.tables import Owners
from optfn.state.per_worker import may_give_rows
from optfn.state.placement import init_on_mesh, num_workers
from optfn.train.local_steps import LocalSteps
from optfn.train.objective import (
    Form,
    Objective,
    Whole,
    of_loss,
    of_packed,
    of_value_and_grad,
    of_workers,
    value_fn,
)
from optfn.train.order import warn_of_order
from optfn.train.state import StepFn, TrainState, copy, distinct, on_one_mesh
from optfn.transforms.learning_rate import get_learning_rate
from optfn.wrappers.metrics import RECORDED
from optfn.wrappers.metrics import metrics as recorded_metrics
from optfn.wrappers.nonfinite import SkipNonfiniteState


@dataclasses.dataclass(frozen=True, eq=False)  # by identity, so that jit can hash it
class TrainStep:
    """A compiled training step; see `make_train_step`."""

    loss_fn: LossFn | None
    tx: optax.GradientTransformationExtraArgs
    compiled: StepFn
    mesh: Mesh | None = None
    data_axis: AxisName = "data"
    packed: bool = False
    has_model_state: bool = False
    local: LocalSteps | None = None
    sharding: Sharding | None = None
    compare_replicas_every: int | None = None
    _gave_up: list[jax.Array] = dataclasses.field(default_factory=list, repr=False)
    _replicas: list[tuple[jax.Array, jax.Array]] = dataclasses.field(
        default_factory=list, repr=False
    )
    _calls: Iterator[int] = dataclasses.field(default_factory=itertools.count, repr=False)

    def __repr__(self) -> str:
        name = getattr(self.loss_fn, "__qualname__", repr(self.loss_fn))
        options = {} if self.mesh is None else {"mesh": self.mesh, "data_axis": self.data_axis}
        options |= {"packed": True} if self.packed else {}
        options |= {"model_state": True} if self.has_model_state else {}
        if self.sharding is not None:
            options |= {"shard": self.sharding.kind, "shard_tables": self.sharding.tables}
        if self.local is not None:
            options |= {"local_steps": self.local.steps, "outer": self.local.outer}
        shown = [name, repr(self.tx), *(f"{k}={v!r}" for k, v in options.items())]
        return f"TrainStep({', '.join(shown)})"

    def init(self, params: Params, model_state: PyTree = None) -> TrainState:
        """Return the state of step 0. It holds copies: the caller's arrays stay valid.

        On a mesh, params and state are replicated, except for the parts of the state that are a
        worker's own. In a run of several processes all give the same params, and are compared.

        Args:
          params: what is trained.
          model_state: the initial one, a tree of arrays, for a step with `model_state=True`.

        Raises:
          TypeError: all params are integers, of which none is trained.
          ValueError: processes have other params, or other versions of optfn or JAX.

        Warns where a link of a chain stands at the wrong place, such as an average before others.
        """
        state = self._init(params, model_state)
        warn_of_order(state.opt_state)
        return state

    def _init(self, params: Params, model_state: PyTree) -> TrainState:
        mismatch.check_params("TrainStep.init", params, "")
        leaves = jax.tree.leaves(params)
        if leaves and not any(map(tree.is_inexact, leaves)):
            raise TypeError(
                "TrainStep.init: params must have a floating-point array, as integers are not "
                f"trained; got {checks.shown(params)}"
            )
        self._check_model_state(model_state)
        if processes.share(self.mesh):
            processes.check_params(params)
        if self.packed:
            params = pack(params)
        if self.mesh is None:
            params, model_state = jax.tree.map(copy, (params, model_state))
            step, opt_state = jnp.zeros((), jnp.int32), self.tx.init(params)
            return on_one_mesh(distinct(TrainState(step, params, opt_state, model_state)))
        if self.sharding is not None:
            placement = self.sharding.place(self.sharding.of_params(params))
            params = jax.tree.map(parallel.put, params, placement)
            opt_state = shards.init_state(self.tx, params, self.sharding)
            step, model_state = parallel.replicate((np.int32(0), model_state), self.sharding.mesh)
            return distinct(TrainState(step, params, opt_state, model_state))
        step, params, model_state = parallel.replicate(
            (np.int32(0), params, model_state), self.mesh
        )
        init = self.tx.init if self.local is None else self.local.init
        opt_state = init_on_mesh(init, params, self.mesh, self.data_axis)
        return TrainState(step, params, opt_state, model_state)

    @property
    def local_steps(self) -> int:
        """How many steps a call makes: 1, or those of a round."""
        return 1 if self.local is None else self.local.steps

    def _check_model_state(self, model_state: PyTree) -> None:
        if (model_state is not None) != self.has_model_state:
            raise TypeError(
                f"the step is made with model_state={self.has_model_state}; got "
                + ("a model_state" if model_state is not None else "none")
            )

    def __call__(self, state: TrainState, batch: Batch) -> tuple[TrainState, dict[str, Any]]:
        """Return the next state and the metrics of this step; `state` is used up (donated).

        It can be called inside `jax.jit` and `lax.scan` as well.

        Raises:
          FloatingPointError: `skip_nonfinite` gave up in the step before.
          ValueError: `state` has been used up by an earlier call; or, at the first call, batches of
            several processes have other structures or shapes.
          TypeError: `state` is not a TrainState, or its params are packed where the step's are not.
        """
        self.check()
        self._check_state(state)
        mesh = self.mesh if self.sharding is None else self.sharding.mesh
        is_traced = isinstance(state.step, jax.core.Tracer)
        if processes.share(mesh) and not is_traced and next(self._calls) == 0:
            processes.check_batch(batch)
        if mesh is not None:
            batch = parallel.split(batch, mesh, self.data_axis, self.local_steps)
        if _is_deleted(state.step):
            raise ValueError(
                "the state has been used up by an earlier call of the step, which overwrites it: "
                "go on with the state that that call returned, or pass donate=False"
            )
        state, metrics = self.compiled(state, batch)
        if isinstance(metrics["loss"], jax.core.Tracer):
            return state, metrics
        if _is_on_several_cpus(metrics["loss"]):
            # CPU devices share their threads: with several steps under way, those of one may hold
            # the threads that an all-reduce of another waits for.
            jax.block_until_ready(metrics)
        if "gave_up" in metrics:
            self._gave_up.append(metrics["gave_up"])
        if "replicas_differ" in metrics:
            self._replicas.append((metrics.pop("replicas_differ"), metrics.pop("step")))
        return state, metrics

    def _check_state(self, state: object) -> None:
        if not isinstance(state, TrainState):
            raise TypeError(
                "state must be a TrainState, as init and the step return it; "
                f"got {checks.shown(state)}"
            )
        if is_packed(state.params) != self.packed:
            kinds = ("a tree of params", "packed params")
            raise TypeError(
                f"the step is made with packed={self.packed}; the state has "
                f"{kinds[is_packed(state.params)]}"
            )
        self._check_model_state(state.model_state)

    def check(self) -> None:
        """Raise if `skip_nonfinite` gave up in the last step, or devices were found to differ.

        A call asks this of the step before it, so that the host need not wait for its own.

        Raises:
          FloatingPointError: `skip_nonfinite` gave up.
          RuntimeError: params that should be the same on all devices are not.
        """
        if self._replicas:
            differ, step = self._replicas.pop()
            if bool(differ):
                every, found = self.compare_replicas_every or 1, int(step)
                before = (found - self.local_steps) // every * every
                since = f"since a step after {before}" if before else "perhaps from the start"
                raise RuntimeError(
                    f"the params differ between devices after step {found}, {since}: each device "
                    "must begin with the same params and get the same updates"
                )
        if self._gave_up and bool(self._gave_up.pop()):
            raise FloatingPointError(
                "skip_nonfinite: more gradients in a row than max_consecutive were not finite; the "
                "last one has gone into the parameters"
            )


def _is_deleted(x: jax.Array) -> bool:
    is_concrete = isinstance(x, jax.Array) and not isinstance(x, jax.core.Tracer)
    return is_concrete and x.is_deleted()


def _is_on_several_cpus(x: jax.Array) -> bool:
    """Tell whether an array lies on several CPU devices, as the result of a pipeline does too."""
    return x.sharding.num_devices > 1 and next(iter(x.devices())).platform == "cpu"


def make_train_step(
    loss_fn: LossFn | None,
    tx: optax.GradientTransformation,
    *,
    has_aux: bool = False,
    model_state: bool = False,
    mesh: Mesh | None = None,
    data_axis: AxisName = "data",
    recompute: Sequence[str] | None = None,
    packed: bool = False,
    tables: Pattern | None = None,
    rng: bool | int | jax.Array = False,
    value_and_grad: Callable[..., tuple[Any, Updates]] | None = None,
    local_steps: int = 1,
    outer: optax.GradientTransformation | None = None,
    shard: Kind | None = None,
    shard_tables: bool = False,
    compare_replicas_every: int | None = None,
    donate: bool = True,
) -> TrainStep:
    """Return a jitted training step: gradient, update, new params, in place.

        loss, g = value_and_grad(loss_fn)(params, batch)
        u, opt_state = tx.update(g, opt_state, params, value=loss, grad=g, value_fn=loss_fn)
        params = params + u

    JAX pairs donated inputs with outputs of the same shape in argument order; the step keeps params
    before state on both sides, so that each array is overwritten by its own successor and nothing
    is copied.

    Args:
      loss_fn: (params, batch) -> loss, a scalar; or (loss, aux) with `has_aux`. None beside
        `value_and_grad`.
      tx: an optimizer of optfn or optax.
      has_aux: whether `loss_fn` gives auxiliary data as well; it comes back as metrics["aux"], on a
        mesh the mean over workers of numbers, the sum of integers.
      model_state: whether the model keeps arrays beside params, such as batch statistics:
        `loss_fn` is then (params, model_state, batch) -> (loss, model_state), or
        (loss, (model_state, aux)) with `has_aux`, and the new ones are in the next TrainState. On a
        mesh they are the mean over workers of floating-point arrays, and worker 0's of others.
        Where a guard skips the step, they stay as they were.
      mesh: workers that share the work, such as `optfn.distributed.data_mesh()`: the leading axis
        of the batch is split over them, the loss is their mean. Batches are host arrays of all
        examples, the same in every process, or global arrays.
      data_axis: the axis of the mesh, or a tuple of axes, over which the batch is split; the
        `axis_name` of an optimizer that exchanges by itself, such as `dgc_momentum`.
      recompute: names of values in `loss_fn` that are kept for the backward pass; everything
        between them is recomputed there, see `optfn.recompute`.
      packed: whether params and state are kept in one buffer per dtype, for models of many small
        leaves; see `optfn.pack`. `loss_fn` sees the tree, state.params is the result of `pack`, and
        `unpack(state.params)` is the tree.
      tables: the embedding leaves, as a pattern of paths: in `loss_fn` they can only be looked up,
        and their gradient is row-sparse; see `optfn.sparse.value_and_grad`.
      rng: True, a seed or a key: `loss_fn` then gets a key as its last argument, a different one in
        each step and on each worker; True means the seed 0.
      value_and_grad: (params, batch) -> (loss, gradients), used instead of the gradient of
        `loss_fn`: for example that of a pipeline, with (inputs, targets) as the batch. It takes and
        gives model state and aux as `loss_fn` does, ((loss, model_state), gradients). With `mesh`
        it is called inside `shard_map` with a worker's part of the batch.
      local_steps: H. With H > 1 a call is a round: each worker makes H steps of `tx` by itself, on
        equal parts of its part of the batch, with a state of its own; then `outer` gets the drift
        θ_start − θ_end of each worker as its gradient, in float32, and params become θ_start plus
        its update, the same on all workers. Needs `mesh`; see docs/distributed.md.
      outer: the optimizer of the rounds; it sees the mean drift, or each worker's if it exchanges
        by itself. None is sgd(1.0): params become the mean over workers.
      shard: how params and state are spread over the devices of `mesh`. None: whole on each.
        "state": the state is, 1/N over `data_axis`; gradients arrive by a reduce-scatter, new
        params by an all-gather. "params": params are spread as well, and gathered for the loss,
        layer by layer where it uses `optfn.distributed.scan_layers`. A mapping from patterns of
        paths to PartitionSpecs of params, which the state follows; other leaves are whole on each
        device, and axes other than `data_axis` are left to the compiler. A leaf without a dimension
        that N divides stays whole. The trajectory is that of one device.
      shard_tables: whether each device of `mesh` keeps 1/N of the rows of the leaves that `tables`
        selects, and of their state, in their order. Rows that a batch looks up come from the
        devices that keep them, and gradients go there.
      compare_replicas_every: after so many steps the devices of `mesh` compare their params, by a
        checksum of 8 bytes a leaf; the next call raises if they differ. None never compares.
      donate: whether the step may overwrite the state that it is given.

    The update gets what transforms of optax ask for: value, the loss; grad, the gradients; and
    value_fn, params -> loss on this batch, whose gradient can be taken. On a mesh these are means
    over the workers.

    Returns:
      A TrainStep: `init(params)` gives the first TrainState, and calling it with (state, batch)
      gives (state, metrics), with metrics["loss"] and, where tx keeps one, ["learning_rate"]; with
      `record_metrics` in tx and without local steps also ["grad_norm"], ["update_norm"],
      ["param_norm"] and ["clip_factor"]; with `skip_nonfinite` ["gave_up"], which makes the next
      call raise. Where tx exchanges by itself, and with local steps, ["bytes_sent"] is what a
      worker sent in this call, by the formulas of the compressors.

    Raises:
      TypeError: an argument of the wrong kind, a loss that is not a real number.
      ValueError: a loss that is not a scalar; a mesh without `data_axis`; names for `recompute`
        that `loss_fn` does not give; `recompute`, `tables` or `rng` beside `value_and_grad`;
        `tables` with `packed`.

    >>> import jax.numpy as jnp, optfn
    >>> step = optfn.make_train_step(lambda p, x: jnp.sum((p - x) ** 2), optfn.sgd(0.25))
    >>> state, metrics = step(step.init(jnp.zeros(2)), jnp.array([1.0, 3.0]))
    >>> float(metrics["loss"]), state.params.tolist()
    (10.0, [0.5, 1.5])
    """
    _check_functions(loss_fn, value_and_grad, recompute, tables, rng)
    _check_mesh(mesh, data_axis)
    extra_tx = optax.with_extra_args_support(core.check_transform("tx", tx))
    form = Form(checks.flag("model_state", model_state), checks.flag("has_aux", has_aux))

    def make_objective(whole: Whole = contextlib.nullcontext) -> Objective:
        if value_and_grad is not None:
            return of_value_and_grad(value_and_grad, form, whole)
        assert loss_fn is not None
        owners = Owners(sharding.mesh, data_axis) if sharding and shard_tables else None
        return of_loss(loss_fn, form, whole, tables=tables, owners=owners, recompute=recompute)

    if checks.flag("packed", packed) and tables is not None:
        raise ValueError("tables with packed=True: the rows of a table are not a part of a buffer")
    if checks.flag("shard_tables", shard_tables) and tables is None:
        raise ValueError("shard_tables needs tables, a pattern of paths")
    if shard_tables and mesh is None:
        raise ValueError("shard_tables needs mesh, over whose devices rows are spread")
    sharding = _sharding(
        shard,
        tables if shard_tables else None,
        mesh,
        data_axis,
        packed=packed or None,
        tables=None if shard_tables else tables,
        local_steps=local_steps,
    )
    local = _local_steps(
        local_steps, extra_tx, outer, mesh=mesh, tables=tables, value_and_grad=value_and_grad
    )
    key_of = _keys(rng, data_axis if mesh is not None and sharding is None else None)
    axis_name = None if mesh is None else data_axis
    if sharding is not None:
        step = _sharded_step(make_objective, extra_tx, key_of, sharding)
    else:
        objective = of_packed(make_objective()) if packed else make_objective()
        step = _step(objective, extra_tx, key_of, axis_name if local is None else None)
        if local is not None:
            step = local.round(step, data_axis)
        if mesh is not None:
            step = parallel.on_workers(step, mesh, data_axis)
    if compare_replicas_every is not None:
        every = checks.count("compare_replicas_every", compare_replicas_every)
        if mesh is None:
            raise ValueError("compare_replicas_every needs mesh, whose devices it compares")
        step = _comparing(step, every, sharding or Sharding(None, mesh, data_axis))
    donated = (0,) if checks.flag("donate", donate) else ()
    compiled = jax.jit(step, donate_argnums=donated)
    return TrainStep(
        loss_fn,
        extra_tx,
        compiled,
        mesh,
        data_axis,
        packed,
        form.has_model_state,
        local,
        sharding,
        compare_replicas_every,
    )


def _sharding(
    shard: Kind | None,
    sharded_tables: Pattern | None,
    mesh: Mesh | None,
    data_axis: AxisName,
    **others: Any,
) -> Sharding | None:
    """Return where params and state lie; None where they are whole on every device.

    Args:
      shard: the argument of `make_train_step`, as `mesh` and `data_axis`.
      sharded_tables: the leaves whose rows are sharded.
      mesh: the mesh.
      data_axis: the axes of the workers.
      **others: arguments that it cannot be with, None where they are not given.
    """
    if shard is None and sharded_tables is None:
        return None
    if mesh is None:
        raise ValueError("shard needs mesh, over whose devices params and state are spread")
    others = {k: v for k, v in others.items() if v is not None and (k, v) != ("local_steps", 1)}
    if others:
        name, value = next(iter(others.items()))
        raise ValueError(f"shard cannot be with {name}={value!r}; pass one of them")
    # Along explicit axes an update of sharded moments and replicated params would be an error.
    mesh = Mesh(mesh.devices, mesh.axis_names)
    kind = None if shard is None else shards.check(shard, mesh)
    return Sharding(kind, mesh, data_axis, sharded_tables)


def _sharded_step(
    make_objective: Callable[[Whole], Objective],
    tx: optax.GradientTransformationExtraArgs,
    key_of: Callable[[jax.Array], jax.Array] | None,
    sharding: Sharding,
) -> StepFn:
    """Return the step of all workers on arrays that lie as `sharding` says."""

    def step(state: TrainState, batch: Batch) -> tuple[TrainState, dict[str, Any]]:
        objective = of_workers(make_objective, sharding, state.params)
        new, metrics = _step(objective, tx, key_of, None)(state, batch)
        specs = jax.tree.map(lambda x: P(), new)._replace(
            params=sharding.of_params(state.params),
            opt_state=sharding.of_state(new.opt_state, state.params),
        )
        return lax.with_sharding_constraint(new, sharding.place(specs)), metrics

    return step


def _local_steps(
    count: int,
    tx: optax.GradientTransformationExtraArgs,
    outer: optax.GradientTransformation | None,
    **others: Any,
) -> LocalSteps | None:
    """Return how a round goes; None where a call is one step.

    Args:
      count: the argument `local_steps`.
      tx: the optimizer of the workers.
      outer: the optimizer of the rounds.
      **others: arguments of `make_train_step`: `mesh`, which rounds need, and those that they
        cannot be with.
    """
    if checks.count("local_steps", count) == 1:
        if outer is not None:
            raise ValueError("outer with local_steps=1: it is the optimizer of rounds; pass H > 1")
        return None
    if others.pop("mesh") is None:
        raise ValueError(f"local_steps={count} needs mesh, whose workers train apart")
    for name, value in others.items():
        if value is not None:
            raise ValueError(f"local_steps={count} cannot be with {name}; pass one of them")
    outer = sgd(1.0) if outer is None else core.check_transform("outer", outer)
    return LocalSteps(count, tx, optax.with_extra_args_support(outer))


def _step(
    objective: Objective,
    tx: optax.GradientTransformationExtraArgs,
    key_of: Callable[[jax.Array], jax.Array] | None,
    axis_name: AxisName,
) -> StepFn:
    """Return the step of one worker; the names of the axes are bound where it runs.

    Args:
      objective: what it minimizes.
      tx: the optimizer.
      key_of: gives the key of a step; None where the loss takes none.
      axis_name: the mesh axes of the workers; None where there is one.
    """

    def step(state: TrainState, batch: Batch) -> tuple[TrainState, dict[str, Any]]:
        keys = () if key_of is None else (key_of(state.step),)
        arguments = (state.model_state, batch, *keys)
        values, grads = objective.value_and_grad(state.params, *arguments)
        grads, (loss, aux), extra = parallel.for_optimizer(
            grads, state.opt_state, axis_name, (values.loss, values.aux)
        )
        exchanges_itself = bool(extra)
        params, grads, loss = _barrier((state.params, grads, loss))
        # What an optimizer that exchanges by itself does not see.
        mean = parallel.mean_over_workers(grads, axis_name) if exchanges_itself else grads
        extra |= {"value": loss, "grad": mean}
        extra["value_fn"] = value_fn(objective, axis_name, *arguments)
        if may_give_rows(state.opt_state):
            extra["row_updates"] = True
        updates, opt_state = tx.update(grads, state.opt_state, params, **extra)
        params = core.apply_updates(params, updates)
        model_state = parallel.mean_or_first(values.model_state, axis_name)
        model_state = _kept_where_skipped(model_state, state, opt_state)
        metrics = {"loss": loss} | ({} if aux is None else {"aux": aux}) | _metrics_of(opt_state)
        if exchanges_itself:
            metrics |= traffic.metrics(grads, state.opt_state, opt_state, axis_name)
        new_state = TrainState(core.next_step(state.step), params, opt_state, model_state)
        return new_state, metrics

    return step


def _comparing(step: StepFn, every: int, sharding: Sharding) -> StepFn:
    """Return a step that compares the params of all devices every so many steps."""

    def compared(state: TrainState, batch: Batch) -> tuple[TrainState, dict[str, Any]]:
        new, metrics = step(state, batch)
        specs = sharding.of_params(state.params)
        differ = lax.cond(
            new.step // every > state.step // every,
            lambda params: replicas_differ(params, specs, sharding.mesh),
            lambda params: jnp.asarray(False),
            new.params,
        )
        # With the step, which the error names.
        return new, metrics | {"replicas_differ": differ, "step": new.step}

    return compared


def _kept_where_skipped(model_state: PyTree, before: TrainState, opt_state: OptState) -> PyTree:
    """Return the new model state, or the one before where a guard has skipped the step."""
    pairs = zip(_skips(before.opt_state), _skips(opt_state), strict=True)
    changed = [old != new for old, new in pairs]
    if not changed or model_state is None:
        return model_state
    skipped = functools.reduce(jnp.logical_or, changed)
    return jax.tree.map(
        lambda old, new: jnp.where(skipped, old, new), before.model_state, model_state
    )


def _skips(opt_state: OptState) -> list[jax.Array]:
    """Return the counters of skipped steps in a state: the int32 scalars of fields `skipped`."""
    return [
        x
        for path, x in jax.tree_util.tree_leaves_with_path(opt_state)
        if getattr(path[-1], "name", "") in ("skipped", "total_notfinite")
        and x.shape == ()
        and x.dtype == jnp.int32
    ]


def _check_functions(
    loss_fn: LossFn | None,
    value_and_grad: Callable[..., Any] | None,
    recompute: Sequence[str] | None,
    tables: Pattern | None,
    rng: object,
) -> None:
    """Raise for functions that are none, and for what concerns `loss_fn` where it is not used."""
    if not callable(loss_fn) and (loss_fn is not None or value_and_grad is None):
        raise TypeError(f"loss_fn must be a function (params, batch) -> loss; got {loss_fn!r}")
    if value_and_grad is None:
        return
    if not callable(value_and_grad):
        raise TypeError(
            "value_and_grad must be a function (params, batch) -> (loss, gradients); "
            f"got {value_and_grad!r}"
        )
    of_loss = {"recompute": recompute, "tables": tables, "rng": None if rng is False else rng}
    for argument, value in of_loss.items():
        if value is not None:
            raise ValueError(
                f"{argument} concerns loss_fn, which value_and_grad takes the place of"
            )


def _check_mesh(mesh: object, data_axis: AxisName) -> None:
    if mesh is not None and not isinstance(mesh, Mesh):
        raise TypeError(
            "mesh must be a jax.sharding.Mesh such as optfn.distributed.data_mesh(); "
            f"got {checks.shown(mesh)}"
        )
    meshes.check_names("data_axis", data_axis)
    if mesh is not None:
        num_workers(mesh, data_axis)


def _keys(rng: Any, axis_name: AxisName | None) -> Callable[[jax.Array], jax.Array] | None:
    """Return the function from a step to its key, on each worker another; None without rng."""
    if rng is False:
        return None
    if rng is True or checks.is_host_number(rng):
        rng = jax.random.key(0 if rng is True else checks.count("rng", rng, low=0))
    if not isinstance(rng, jax.Array) or not tree.is_key(rng):
        raise TypeError(
            f"rng must be True, a seed or a key from jax.random.key; got {checks.shown(rng)}"
        )

    def key_of(step: jax.Array) -> jax.Array:
        key = jax.random.fold_in(rng, step)
        return key if axis_name is None else jax.random.fold_in(key, lax.axis_index(axis_name))

    return key_of


def _barrier(values: PyTree) -> PyTree:
    """Keep XLA from mixing the update with the loss that reads the same parameters.

    Where it does, it keeps a copy of the parameters.
    """
    leaves, structure = jax.tree.flatten(values)
    kept = iter(lax.optimization_barrier([x for x in leaves if not mismatch.is_float0(x)]))
    whole = [x if mismatch.is_float0(x) else next(kept) for x in leaves]
    return jax.tree.unflatten(structure, whole)


def _metrics_of(opt_state: OptState) -> dict[str, jax.Array]:
    """Return what a state has to tell the host: its rate, norms, and whether a guard gave up."""

    def guard(x: Any) -> bool:
        return isinstance(x, SkipNonfiniteState)

    metrics = {}
    flags = [x.gave_up for x in jax.tree.leaves(opt_state, is_leaf=guard) if guard(x)]
    if flags:
        metrics["gave_up"] = functools.reduce(jnp.logical_or, flags)
    with contextlib.suppress(ValueError):  # no rate, or several
        metrics["learning_rate"] = get_learning_rate(opt_state)
    with contextlib.suppress(ValueError):  # no recorder, or several
        recorded = recorded_metrics(opt_state)
        metrics |= {name: recorded[name] for name in RECORDED}
    return metrics
