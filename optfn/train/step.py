"""The step that trains: fluid's backward and apply_gradients.

`make_train_step` compiles it once and updates params and state in place. One composition serves all
options:

    layout       where params, state and batch lie on a mesh                  parallel/layout.py
    objective    loss and gradients; means over the part axes of the layout   objective.py
    update       means over the worker axes, or an exchange; the optimizer    worker_step.py
    rounds       local steps of each worker, and an outer step on the drift   local_steps.py
"""

import contextlib
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from optfn import checks, core
from optfn.leaves import mismatch, tree
from optfn.leaves.modules import check_split
from optfn.leaves.nodes import is_packed
from optfn.leaves.packed import pack
from optfn.leaves.tree import Pattern
from optfn.leaves.types import Batch, LossFn, Params, PyTree, Updates
from optfn.mesh import Axes, AxisName
from optfn.optimizers.sgd import sgd
from optfn.parallel import data_parallel as parallel
from optfn.parallel import processes
from optfn.parallel.fingerprint import replicas_differ
from optfn.parallel.layout import Layout
from optfn.parallel.sharding import Kind, Sharded, layout_of
from optfn.sparse.sharded_table import bare, check_rows, check_tables, natural, spread
from optfn.sparse.tables import Owners
from optfn.train.batches import as_arrays
from optfn.train.local_steps import LocalSteps, check_rounds
from optfn.train.microbatches import in_microbatches
from optfn.train.objective import (
    Form,
    Objective,
    Seen,
    gathered,
    of_loss,
    of_packed,
    of_sharded_tables,
    of_value_and_grad,
    on_parts,
)
from optfn.train.options import StepOptions, check_loss
from optfn.train.order import warn_of_lazy, warn_of_order
from optfn.train.state import StepFn, TrainState, copy, distinct, on_one_mesh
from optfn.train.worker_step import keys_of, worker_step
from optfn.wrappers.nonfinite import gave_up


class TrainStep:
    """A compiled training step; see `make_train_step`.

    loss_fn, tx, options: the arguments of `make_train_step`.
    layout: where the state lies; None without a mesh.
    compiled: the jitted function (state, batch) -> (state, metrics).
    """

    def __init__(
        self,
        loss_fn: LossFn | None,
        tx: optax.GradientTransformationExtraArgs,
        options: StepOptions,
        layout: Layout | None,
        local: LocalSteps | None,
        step: StepFn,
    ) -> None:
        self.loss_fn, self.tx, self.options, self.layout, self.local = (
            loss_fn, tx, options, layout, local,
        )  # fmt: skip
        self.compiled: Any = jax.jit(step, donate_argnums=(0,) if options.donate else ())
        self._has_run = False

    def __repr__(self) -> str:
        name = getattr(self.loss_fn, "__qualname__", repr(self.loss_fn))
        given = [f"{k}={v!r}" for k, v in self.options.given().items()]
        return f"TrainStep({', '.join([name, repr(self.tx), *given])})"

    @property
    def local_steps(self) -> int:
        """How many steps a call makes: 1, or those of a round."""
        return self.options.local_steps

    @property
    def mesh(self) -> Mesh | None:
        """The mesh on which the step runs."""
        return None if self.layout is None else self.layout.mesh

    def init(self, params: Params, model_state: PyTree = None) -> TrainState:
        """Return the state of step 0. It holds copies: the caller's arrays stay valid.

        On a mesh each leaf lies as the layout of the step says. In a run of several processes all
        give the same params, and are compared.

        Args:
          params: the parameters to train.
          model_state: the initial one, a tree of arrays, for a step with `model_state=True`.

        Raises:
          TypeError: all params are integers, of which none is trained; or they are a model of flax
            or equinox that holds more than parameters, such as batch statistics. The error has the
            line that splits it.
          ValueError: params, or the versions of optfn or JAX, differ between processes.

        Warns of a transform at the wrong position in a chain, such as an average before others, and
        of `lazy` in an optimizer of tables where no gradient is row-sparse.
        """
        _check_params(params)
        self._check_model_state(model_state)
        if processes.share(self.mesh):
            processes.compare_params(params)
        if self.options.packed:
            params = pack(params)
        if self.layout is None:
            params, model_state = jax.tree.map(copy, (params, model_state))
            step, opt_state = jnp.zeros((), jnp.int32), self.tx.init(params)
            state = on_one_mesh(distinct(TrainState(step, params, opt_state, model_state)))
        else:
            params = self.layout.put(natural(params))
            if self.layout.tables is not None:
                owners = Owners(self.layout.mesh, self.layout.part_axes)
                params = spread(params, self.layout.is_table(params), owners)
            opt_state = self.layout.init((self.local or self.tx).init, params)
            check_rows(opt_state)
            step, model_state = self.layout.replicate((np.int32(0), model_state))
            state = distinct(TrainState(step, params, opt_state, model_state))
        warn_of_order(state.opt_state)
        if self.options.tables is None and self.options.value_and_grad is None:
            warn_of_lazy(self.tx, params)
        return state

    def __call__(self, state: TrainState, batch: Batch) -> tuple[TrainState, dict[str, Any]]:
        """Return the next state and the metrics of this step; `state` is used up (donated).

        It can be called inside `jax.jit` and `lax.scan` as well.

        Raises:
          FloatingPointError: `skip_nonfinite` gave up in the step before.
          RuntimeError: replicated params differ between devices, where they are compared.
          ValueError: `state` has been used up by an earlier call; or, at the first call, batches of
            several processes have other structures or shapes; or `state` has local steps of
            another number of workers.
          TypeError: `state` is not a TrainState, or its params are packed where the step's are not,
            or it was made without local steps where the step makes some; or the batch holds text,
            or arrays of another library that NumPy does not take without a copy.
        """
        self.check_state(state)
        self.check(state)
        batch = as_arrays(batch)
        if processes.share(self.mesh) and not self._has_run and not checks.is_traced(state.step):
            processes.compare_batch(batch)
        if self.layout is not None:
            data_axes = self.layout.data_axes
            batch = parallel.split_batch(batch, self.layout.mesh, data_axes, self.local_steps)
        state, metrics = self.compiled(state, batch)
        loss = metrics["loss"]
        self._has_run |= not checks.is_traced(loss)
        if not checks.is_traced(loss) and _is_on_several_cpus(loss):
            # CPU devices share their threads: with several steps under way, those of one may hold
            # the threads that an all-reduce of another waits for.
            jax.block_until_ready(metrics)
        return state, metrics

    def check(self, state: TrainState) -> None:
        """Raise if the step that returned this state must end the run, as a call with it does.

        Raises:
          FloatingPointError: `skip_nonfinite` gave up.
          RuntimeError: replicated params differ between devices.
        """
        if checks.is_traced(state.step):
            return
        self._compare_replicas(state)
        flags = gave_up(state.opt_state)
        if any(np.any(x.addressable_data(0) if isinstance(x, jax.Array) else x) for x in flags):
            raise FloatingPointError(
                "skip_nonfinite: more gradients in a row than max_consecutive were not finite; the "
                "last one has gone into the parameters"
            )

    def _compare_replicas(self, state: TrainState) -> None:
        every = self.options.compare_replicas_every
        if every is None or self.layout is None:
            return
        step = int(state.step)
        before = max(step - self.local_steps, 0) // every
        if step // every > before and _replicas_differ(state.params, self.layout):
            since = f"since a step after {before * every}" if before else "perhaps from the start"
            raise RuntimeError(
                f"the params differ between devices after step {step}, {since}: each device must "
                "begin with the same params and get the same updates"
            )

    def check_state(self, state: object) -> None:
        """Raise unless the step can be called with this state: it is of this step, and not used up.

        Raises:
          TypeError: it is no TrainState, or that of a step with other arguments.
          ValueError: an earlier call has overwritten it.
        """
        if not isinstance(state, TrainState):
            raise TypeError(
                "state must be a TrainState, as init and the step return it; "
                f"got {checks.shown(state)}"
            )
        if is_packed(state.params) != self.options.packed:
            kinds = ("a tree of params", "packed params")
            raise TypeError(
                f"the step is made with packed={self.options.packed}; the state has "
                f"{kinds[is_packed(state.params)]}"
            )
        self._check_model_state(state.model_state)
        if self.layout is not None and self.layout.tables is not None:
            check_tables(state.params, self.layout.is_table(bare(state.params)))
        is_array = isinstance(state.step, jax.Array) and not checks.is_traced(state.step)
        if is_array and state.step.is_deleted():
            raise ValueError(
                "the state has been used up by an earlier call of the step, which overwrites it: "
                "go on with the state that that call returned, or pass donate=False"
            )
        check_rounds(state.opt_state, self.local, self.layout)

    def _check_model_state(self, model_state: PyTree) -> None:
        if (model_state is not None) != self.options.model_state:
            raise TypeError(
                f"the step is made with model_state={self.options.model_state}; got "
                + ("a model_state" if model_state is not None else "none")
            )


def _check_params(params: Params) -> None:
    check_split("TrainStep.init", params)
    mismatch.check_params("TrainStep.init", params, "")
    leaves = jax.tree.leaves(params)
    if leaves and not any(map(tree.is_inexact, leaves)):
        raise TypeError(
            "TrainStep.init: params must have a floating-point array, as integers are not "
            f"trained; got {checks.shown(params)}"
        )


def _is_on_several_cpus(x: jax.Array) -> bool:
    """Tell whether an array lies on several CPU devices, as the result of a pipeline does too."""
    return x.sharding.num_devices > 1 and next(iter(x.devices())).platform == "cpu"


@functools.partial(jax.jit, static_argnums=1)
def _replicas_differ(params: Params, layout: Layout) -> jax.Array:
    return replicas_differ(params, layout.of_params(params), layout.mesh)


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
    microbatches: int = 1,
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
        If `skip_nonfinite` skips the step, they stay as they were.
      mesh: workers that share the work, such as `optfn.distributed.data_mesh()`: the leading axis
        of the batch is split over them, the loss is their mean. Batches are host arrays of all
        examples, the same in every process, or global arrays.
      data_axis: the axis of the mesh, or a tuple of axes, over which the batch is split. An
        optimizer that exchanges gradients by itself, such as `dgc_momentum`, does so over its
        `axis_name`; over the other data axes its gradients are averaged.
      recompute: names of values in `loss_fn` that are kept for the backward pass; everything
        between them is recomputed there, see `optfn.recompute`.
      packed: whether params and state are kept in one buffer per dtype, for models of many small
        leaves; see `optfn.pack`. `loss_fn` sees the tree, state.params is the result of `pack`, and
        `unpack(state.params)` is the tree.
      tables: the embedding leaves, as a pattern of paths: in `loss_fn` they can only be looked up,
        and their gradient is row-sparse; see `optfn.sparse.value_and_grad`. Without it every
        gradient of `loss_fn` is dense, and `init` warns of an optimizer with `lazy`.
      rng: True, a seed or a key: `loss_fn` then gets a key as its last argument, a different one in
        each step and on each worker; True means the seed 0.
      value_and_grad: (params, batch) -> (loss, gradients), used instead of the gradient of
        `loss_fn`: for example that of a pipeline, with (inputs, targets) as the batch. It takes and
        gives model state and aux as `loss_fn` does, ((loss, model_state), gradients). With `mesh`
        it is called inside `shard_map` with a worker's part of the batch.
      microbatches: k. The batch of a worker goes through the loss in k equal parts, one after the
        other, whose gradients are averaged, so that the activations of one part are held at a time.
        Batch statistics are those of the parts. With `shard="params"` each part gathers params
        anew, see `optfn.distributed.sharded`.
      local_steps: H. With H > 1 a call is a round: each worker makes H steps of `tx` alone, on
        equal parts of its part of the batch, with a state of its own; then `outer` gets the drift
        θ_start − θ_end of each worker as its gradient, in float32, and params become θ_start plus
        its update, the same on all workers. Needs `mesh`; see docs/distributed.md.
      outer: the optimizer of the rounds; it sees the mean drift, or each worker's if it exchanges
        gradients by itself. None is sgd(1.0): params become the mean over workers.
      shard: how params and state are spread over the devices of `mesh`. None: whole on each.
        "state": the state is, 1/N over `data_axis`; gradients arrive by a reduce-scatter, new
        params by an all-gather. "params": params are spread as well, and gathered for the loss,
        layer by layer where it uses `optfn.distributed.scan_layers`. A mapping from patterns of
        paths to PartitionSpecs of params, which the state follows; other leaves are whole on each
        device, and axes other than `data_axis` are left to the compiler. A leaf without a dimension
        that N divides stays whole. The trajectory is that of one device.
      shard_tables: whether each device of `mesh` keeps 1/N of the rows of the leaves that `tables`
        selects, and of their state: row r lies on device r mod N. Rows that a batch looks up come
        from the devices that keep them, and gradients go there. In `TrainState.params` such a leaf
        is an `optfn.sparse.ShardedTable`, of which `np.asarray` is the table in natural order.
      compare_replicas_every: after so many steps the devices of `mesh` compare their params, by a
        checksum of 8 bytes a leaf; the next call raises if they differ. None never compares.
      donate: whether the step may overwrite the state that it is given.

    The update gets the extra arguments that transforms of optax ask for: value, the loss; grad, the
    gradients; and value_fn, params -> loss on this batch, whose gradient can be taken. On a mesh
    these are means over the workers.

    Returns:
      A TrainStep: `init(params)` gives the first TrainState, and calling it with (state, batch)
      gives (state, metrics), with metrics["loss"] and, where tx keeps one, ["learning_rate"]; with
      `record_metrics` in tx and without local steps also ["grad_norm"], ["update_norm"],
      ["param_norm"] and ["clip_factor"], and those of its groups; with `skip_nonfinite`
      ["gave_up"], which makes the next call raise. Where tx exchanges gradients by itself, and with
      local steps, ["bytes_sent"] has the bytes that a worker sent in this call, by the formulas of
      the compressors.

    Raises:
      TypeError: an argument of the wrong kind, a loss that is not a real number.
      ValueError: a loss that is not a scalar; a mesh without `data_axis`; names for `recompute`
        that `loss_fn` does not give; options that need another or exclude each other, see
        `optfn.train.options`.

    >>> import jax.numpy as jnp, optfn
    >>> step = optfn.make_train_step(lambda p, x: jnp.sum((p - x) ** 2), optfn.sgd(0.25))
    >>> state, metrics = step(step.init(jnp.zeros(2)), jnp.array([1.0, 3.0]))
    >>> float(metrics["loss"]), state.params.tolist()
    (10.0, [0.5, 1.5])
    """
    extra_tx = optax.with_extra_args_support(core.check_transform("tx", tx))
    options = StepOptions(
        has_aux=has_aux,
        model_state=model_state,
        mesh=mesh,
        data_axis=data_axis,
        recompute=recompute,
        packed=packed,
        tables=tables,
        rng=rng,
        value_and_grad=value_and_grad,
        microbatches=checks.count("microbatches", microbatches),
        local_steps=checks.count("local_steps", local_steps),
        outer=outer,
        shard=shard,
        shard_tables=shard_tables,
        compare_replicas_every=compare_replicas_every,
        donate=donate,
    )
    check_loss(loss_fn, value_and_grad, options)
    layout = None
    if mesh is not None:
        layout = layout_of(shard, mesh, data_axis, tables if shard_tables or shard else None)
    local = _local_steps(options, extra_tx, layout)
    step = _composed(_objective(loss_fn, options, layout), extra_tx, options, layout, local)
    return TrainStep(loss_fn, extra_tx, options, layout, local, step)


def _composed(
    objective: Objective,
    tx: optax.GradientTransformationExtraArgs,
    options: StepOptions,
    layout: Layout | None,
    local: LocalSteps | None,
) -> StepFn:
    """Return the step of all devices."""
    workers = Axes() if layout is None else layout.worker_axes
    key_of = keys_of(options.rng, workers)
    step = worker_step(objective, tx, key_of, workers if local is None else Axes(), layout)
    if local is not None:
        step = local.round(step)
    if layout is not None and workers:
        step = parallel.on_workers(step, layout.mesh, workers)
    if layout is not None and layout.divides:
        step = _placed(step, layout)
    return step


def _placed(step: StepFn, layout: Layout) -> StepFn:
    """Return a step whose new state lies as the layout says."""

    def run(state: TrainState, batch: Batch) -> tuple[TrainState, dict[str, Any]]:
        old = state._replace(opt_state=layout.in_update(state.opt_state))
        new, metrics = step(old, batch)
        new = new._replace(opt_state=layout.stored(new.opt_state, state.params))
        specs = jax.tree.map(lambda x: P(), new)._replace(
            params=layout.of_params(state.params),
            opt_state=layout.of_state(new.opt_state, state.params),
        )
        return lax.with_sharding_constraint(new, layout.place(specs)), metrics

    return run


def _objective(loss_fn: LossFn | None, options: StepOptions, layout: Layout | None) -> Objective:
    """Return the objective of one device; of all devices of the part axes where there are some."""
    form = Form(options.model_state, options.has_aux)
    owners = None
    if layout is not None and layout.tables is not None:
        owners = Owners(layout.mesh, layout.part_axes)

    def make(seen: Seen = contextlib.nullcontext) -> Objective:
        once = isinstance(options.shard, Sharded) and options.shard.gathers_once
        if not (once or options.packed):
            return in_microbatches(of_one(seen), options.microbatches)
        whole = in_microbatches(of_one(), options.microbatches)
        return gathered(of_packed(whole) if options.packed else whole, seen)

    def of_one(seen: Seen = contextlib.nullcontext) -> Objective:
        if options.value_and_grad is not None:
            return of_value_and_grad(options.value_and_grad, form, seen)
        assert loss_fn is not None
        return of_loss(
            loss_fn,
            form,
            seen,
            tables=options.tables,
            owners=owners,
            recompute=options.recompute,
        )

    if layout is None or not layout.part_axes:
        return make()
    objective = on_parts(make, layout)
    return objective if owners is None else of_sharded_tables(objective)


def _local_steps(
    options: StepOptions, tx: optax.GradientTransformationExtraArgs, layout: Layout | None
) -> LocalSteps | None:
    """Return how a round goes; None where a call is one step."""
    if options.local_steps == 1 or layout is None:
        return None
    if not layout.worker_axes:
        raise ValueError(
            f"local_steps={options.local_steps} cannot be with params or state divided over all of "
            f"data_axis, {(*layout.part_axes,)}: workers that train apart differ in their params, "
            "so that none can keep a part for others. Divide over some of the axes: "
            "shard=sharded(..., axis=)"
        )
    outer = sgd(1.0) if options.outer is None else core.check_transform("outer", options.outer)
    return LocalSteps(options.local_steps, tx, optax.with_extra_args_support(outer), layout)
