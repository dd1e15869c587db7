"""The training step: gradients, update, new params (fluid's backward and apply_gradients).

`make_train_step` compiles it once, and it updates params and state in place. All options are
composed of the same parts (composition.py):

    layout       how params, state and batch are divided over a mesh          parallel/layout.py
    objective    loss and gradients; means over the part axes of the layout   objective.py
    update       means over the worker axes, or an exchange; the optimizer    worker_step.py
    layers       updated inside the backward pass, the others by the update   in_backward.py
    rounds       local steps of each worker, and an outer step on the drift   local_steps.py
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh

from optfn import checks, core
from optfn.leaves import mismatch, tree
from optfn.leaves.modules import check_split
from optfn.leaves.nodes import is_packed
from optfn.leaves.packed import pack
from optfn.leaves.tree import Pattern
from optfn.leaves.types import Batch, LossFn, Params, PyTree, Updates
from optfn.mesh import AxisName
from optfn.parallel import data_parallel as parallel
from optfn.parallel import processes
from optfn.parallel.fingerprint import replicas_differ
from optfn.parallel.layout import Layout
from optfn.parallel.sharding import Kind, layout_of
from optfn.sparse.sharded_table import bare, check_rows, check_tables, natural, spread
from optfn.sparse.tables import Owners
from optfn.train.batches import as_arrays
from optfn.train.composition import composed, local_rounds
from optfn.train.local_steps import check_rounds
from optfn.train.options import StepOptions, check_loss
from optfn.train.order import warn_of_ascent, warn_of_frozen, warn_of_lazy, warn_of_order
from optfn.train.state import TrainState, copy, distinct, on_one_mesh
from optfn.wrappers.nonfinite import gave_up


class TrainStep:
    """A compiled training step; see `make_train_step`.

    loss_fn, tx, options: the arguments of `make_train_step`.
    layout: how the state is divided over the mesh; None without a mesh.
    compiled: the jitted function (state, batch) -> (state, metrics).
    """

    def __init__(
        self,
        loss_fn: LossFn | None,
        tx: optax.GradientTransformationExtraArgs,
        options: StepOptions,
        layout: Layout | None,
    ) -> None:
        self.loss_fn, self.tx, self.options, self.layout = loss_fn, tx, options, layout
        self.local = local_rounds(options, tx, layout)
        step = composed(loss_fn, tx, options, layout, self.local)
        self.compiled: Any = jax.jit(step, donate_argnums=(0,) if options.donate else ())
        self._has_run = False

    def __repr__(self) -> str:
        name = getattr(self.loss_fn, "__qualname__", repr(self.loss_fn))
        given = [f"{k}={v!r}" for k, v in self.options.given().items()]
        return f"TrainStep({', '.join([name, repr(self.tx), *given])})"

    @property
    def local_steps(self) -> int:
        """The number of steps in a call: 1, or those of a round."""
        return self.options.local_steps

    @property
    def mesh(self) -> Mesh | None:
        """The mesh on which the step runs."""
        return None if self.layout is None else self.layout.mesh

    def init(self, params: Params, model_state: PyTree = None) -> TrainState:
        """Return the state before the first step. It holds copies, so your arrays stay valid.

        On a mesh, the state is placed as the options of the step say. In a run of several
        processes, all must pass the same params, which is checked.

        You get a warning if a transform is at the wrong position in a chain, such as an average
        before others, if no learning rate or two of them make steps that go uphill, if an optimizer
        has `lazy` although no gradient is row-sparse, or if no parameter is trained.

        Args:
          params: the parameters to train.
          model_state: the initial one, a tree of arrays, for a step with `model_state=True`.

        Raises:
          TypeError: all params are integers, which are not trained; or params are a flax or equinox
            model with more than parameters in it, such as batch statistics. The error has the line
            that splits it.
          ValueError: params, or the versions of optfn or JAX, differ between processes.
        """
        _check_params(params)
        given = params
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
        warn_of_frozen(self.tx, given)
        warn_of_order(state.opt_state)
        if self.local is None:
            warn_of_ascent("tx", self.tx, state.opt_state)
        else:
            warn_of_ascent("tx", self.tx, state.opt_state.inner)
            warn_of_ascent("outer", self.local.outer, state.opt_state.outer)
        if self.options.tables is None and self.options.value_and_grad is None:
            warn_of_lazy(self.tx, params)
        return state

    def __call__(self, state: TrainState, batch: Batch) -> tuple[TrainState, dict[str, Any]]:
        """Return the next state and the metrics of this step.

        `state` is donated: don't use it again, unless the step was made with `donate=False`. You
        can also call the step inside `jax.jit` and `lax.scan`.

        Raises:
          FloatingPointError: `skip_nonfinite` gave up in the previous step.
          RuntimeError: params differ between devices, and `compare_replicas_every` found it.
          ValueError: `state` has been donated to an earlier call; or, at the first call, the
            batches of several processes differ in structure or shapes; or `state` has local steps
            of another number of workers.
          TypeError: `state` is not a TrainState, or it was made by a step with another `packed`,
            `model_state` or `local_steps`; or the batch contains text, or arrays of another library
            that NumPy cannot convert without a copy.
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
            # CPU devices share their threads. If several steps run at once, one may hold the
            # threads that an all-reduce of another waits for.
            jax.block_until_ready(metrics)
        return state, metrics

    def check(self, state: TrainState) -> None:
        """Raise if the step that returned this state must end the run, as the next call would.

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
                "skip_nonfinite: more than max_consecutive gradients in a row were not finite; the "
                "last one has been applied to the parameters"
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
                f"the params differ between devices after step {step}, {since}: all devices "
                "must begin with the same params and get the same updates"
            )

    def check_state(self, state: object) -> None:
        """Raise the errors of a call with a state that this step does not take."""
        if not isinstance(state, TrainState):
            raise TypeError(
                f"state must be a TrainState, such as step.init(params); got {checks.shown(state)}"
            )
        if is_packed(state.params) != self.options.packed:
            kinds = ("a tree of params", "packed params")
            raise TypeError(
                f"the step was made with packed={self.options.packed}, but the state has "
                f"{kinds[is_packed(state.params)]}"
            )
        self._check_model_state(state.model_state)
        if self.layout is not None and self.layout.tables is not None:
            check_tables(state.params, self.layout.is_table(bare(state.params)))
        is_array = isinstance(state.step, jax.Array) and not checks.is_traced(state.step)
        if is_array and state.step.is_deleted():
            raise ValueError(
                "the state has been used up: an earlier call of the step has overwritten it. "
                "Continue with the state that this call returned, or make the step with "
                "donate=False"
            )
        check_rounds(state.opt_state, self.local, self.layout)

    def _check_model_state(self, model_state: PyTree) -> None:
        if (model_state is not None) != self.options.model_state:
            raise TypeError(
                f"the step was made with model_state={self.options.model_state}; got "
                + ("a model_state" if model_state is not None else "none")
            )


def _check_params(params: Params) -> None:
    check_split("TrainStep.init", params)
    mismatch.check_params("TrainStep.init", params, "")
    leaves = jax.tree.leaves(params)
    if leaves and not any(map(tree.is_inexact, leaves)):
        raise TypeError(
            "TrainStep.init: params must contain a floating-point array, since integers are not "
            f"trained; got {checks.shown(params)}"
        )


def _is_on_several_cpus(x: jax.Array) -> bool:
    """Tell whether an array is on several CPU devices, as the result of a pipeline may be."""
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
    update_in_backward: Pattern | None = None,
    compare_replicas_every: int | None = None,
    donate: bool = True,
) -> TrainStep:
    """Return a jitted training step, which updates params and state in place.

        loss, g = value_and_grad(loss_fn)(params, batch)
        u, opt_state = tx.update(g, opt_state, params, value=loss, grad=g, value_fn=loss_fn)
        params = params + u

    The step overwrites the arrays of the state that you pass, so that it needs no second copy of
    them: JAX pairs donated inputs with outputs of the same shape in order, and the step keeps
    params before state on both sides.

    Args:
      loss_fn: a function (params, batch) -> loss, a scalar; with `has_aux`, it returns (loss, aux).
        None if you pass `value_and_grad`.
      tx: an optimizer of optfn or optax.
      has_aux: whether `loss_fn` returns auxiliary data as well, which you find in metrics["aux"].
        On a mesh, numbers are averaged over the workers and integers are summed.
      model_state: whether the model has arrays besides params, such as batch statistics. `loss_fn`
        is then (params, model_state, batch) -> (loss, model_state), or (loss, (model_state, aux))
        with `has_aux`, and the next TrainState has the new model_state. On a mesh, floating-point
        arrays are averaged over the workers, and others are those of worker 0. If `skip_nonfinite`
        skips the step, the model_state stays as it was.
      mesh: the workers that share the work, such as `optfn.distributed.data_mesh()`. The leading
        axis of the batch is split over them, and the loss is their mean. Pass batches as host
        arrays of all examples, the same in every process, or as global arrays.
      data_axis: the axis of the mesh, or a tuple of axes, over which the batch is split. An
        optimizer that exchanges gradients itself, such as `dgc_momentum`, does so over its
        `axis_name`; over the other data axes its gradients are averaged.
      recompute: names of values in `loss_fn` that are kept for the backward pass. Everything
        between them is recomputed there, to save memory; see `optfn.recompute`.
      packed: whether params and state are kept in one buffer per dtype, which is faster for models
        with many small leaves; see `optfn.pack`. `loss_fn` still sees the tree. `state.params` is
        packed, and `unpack(state.params)` is the tree.
      tables: the embedding leaves, as a pattern of paths. `loss_fn` can only look rows up in them,
        and their gradients are row-sparse; see `optfn.sparse.value_and_grad`. Without it all
        gradients are dense, and `init` warns of an optimizer with `lazy`.
      rng: True, a seed or a key. `loss_fn` then gets a key as its last argument, a different one in
        each step and on each worker. True means the seed 0.
      value_and_grad: a function (params, batch) -> (loss, gradients) to use instead of the gradient
        of `loss_fn`, such as that of a pipeline, whose batch is (inputs, targets). It takes and
        returns model state and aux as `loss_fn` does: ((loss, model_state), gradients). With `mesh`
        it is called inside `shard_map`, with a worker's part of the batch.
      microbatches: k. The loss is computed for k equal parts of a worker's batch, one after the
        other, and the gradients are averaged. This saves memory, since only the activations of one
        part are kept at a time. Batch statistics are those of the parts. With `shard="params"` each
        part gathers the params again; see `optfn.distributed.sharded`.
      local_steps: H. With H > 1 a call is a round: each worker takes H steps of `tx` alone, with
        its own state, on equal parts of its part of the batch. Then `outer` gets the drift
        θ_start − θ_end of each worker, in float32, as its gradient, and params become θ_start plus
        its update, the same on all workers. Needs `mesh`; see docs/distributed.md.
      outer: the optimizer of the rounds. It sees the mean drift, or that of each worker if it
        exchanges gradients itself. None is sgd(1.0): params become the mean over workers.
      shard: how params and state are divided over the devices of `mesh`, if they don't fit on one.
        None: every device has all of them. "state": each of the N devices along `data_axis` keeps
        1/N of the state; gradients are reduce-scattered, and new params are all-gathered.
        "params": params are divided as well, and gathered for the loss, one layer at a time if it
        uses `optfn.distributed.scan_layers`. A mapping from patterns of paths to the
        PartitionSpecs of params: the state follows them, other leaves are whole on each device, and
        axes other than `data_axis` are left to the compiler. A leaf without a dimension that N
        divides stays whole. The results are those of one device.
      shard_tables: whether each of the N devices of `mesh` keeps 1/N of the rows of the leaves that
        `tables` selects, and of their state. Row r is on device r mod N. Rows that a batch looks up
        are fetched from these devices, and gradients are sent back to them. In `TrainState.params`
        such a leaf is an `optfn.sparse.ShardedTable`; `np.asarray` of it has the natural order.
      update_in_backward: the leaves that are updated inside the backward pass, layer by layer, so
        that the gradients of all layers are never in memory at once; a pattern of leaves of a
        `Stacked` that the loss passes to `optfn.distributed.scan_layers`. The update of each leaf
        must depend on its own gradient alone; see docs/training.md.
      compare_replicas_every: after how many steps the devices of `mesh` compare their params, by a
        checksum of 8 bytes per leaf. If they differ, the next call raises. None: never.
      donate: whether the step may overwrite the state that you pass.

    Transforms of optax that ask for extra arguments get them: value, the loss; grad, the gradients;
    and value_fn, a differentiable function from params to the loss on this batch. On a mesh these
    are means over the workers.

    Returns:
      A TrainStep. `init(params)` returns the first TrainState, and calling the step with
      (state, batch) returns (state, metrics). Metrics have "loss" and, if tx has one,
      "learning_rate". With `record_metrics` in tx, and without local steps, they also have
      "grad_norm", "update_norm", "param_norm", "clip_factor" and the norms of its groups. With
      `skip_nonfinite` they have "gave_up", which makes the next call raise. If tx exchanges
      gradients itself, and with local steps, they have "bytes_sent": the bytes that a worker sent
      in this call, by the formulas of the compressors.

    Raises:
      TypeError: an argument is of the wrong kind, or the loss is not a real number.
      ValueError: the loss is not a scalar; the mesh has no `data_axis`; `recompute` has names that
        `loss_fn` does not; or options need or exclude each other, see `optfn.train.options`.

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
        update_in_backward=tree.check_pattern("update_in_backward", update_in_backward),
        compare_replicas_every=compare_replicas_every,
        donate=donate,
    )
    check_loss(loss_fn, value_and_grad, options)
    layout = None
    if mesh is not None:
        layout = layout_of(shard, mesh, data_axis, tables if shard_tables or shard else None)
    return TrainStep(loss_fn, extra_tx, options, layout)
