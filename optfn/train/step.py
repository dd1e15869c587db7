"""The training step: gradients, update, new params (fluid's backward and apply_gradients).

`make_train_step` compiles it once, and it updates params and state in place. All options are
composed of the same functions (composition.py):

    layout       how params, state and batch are divided over a mesh         mesh/layout/
    objective    loss and gradients; means over devices that divide params   loss/objective.py
    update       means over the worker axes, or an exchange; the optimizer   worker_step.py
    rounds       local steps of each worker, and an outer step after them    local_steps.py
"""

import collections
import dataclasses
import functools
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, Mesh

from optfn.core import checks
from optfn.core.types import Batch, Leaf, OptState, Params, PyTree
from optfn.interop.calls import show_transform
from optfn.leaves.foreign import check_arrays, check_integers
from optfn.leaves.nodes import is_packed
from optfn.leaves.packed import pack, unpack
from optfn.loss.jaxprs.constraints import name_refused_constraints
from optfn.mesh.collectives.devices import Devices
from optfn.mesh.collectives.mesh import count_devices, is_on_several_cpus
from optfn.mesh.layout import data_parallel as parallel
from optfn.mesh.layout import processes
from optfn.mesh.layout.as_placed import AsPlaced
from optfn.mesh.layout.mesh_layout import Layout
from optfn.mesh.layout.sharding import layout_of
from optfn.mesh.layout.traffic import warn_if_nothing_compressed
from optfn.mesh.state import reports
from optfn.tables import sharded_table
from optfn.train import ineffective
from optfn.train.composition import compile_step, make_local_steps, specs_of_state
from optfn.train.local_steps import check_rounds
from optfn.train.numeric_batch import convert_batch
from optfn.train.options import StepArguments, accept_fields
from optfn.train.order import warn_of_order
from optfn.train.packed_rules import refuse_changed_rules
from optfn.train.state import (
    TrainState,
    check_initial_params,
    copy,
    copy_each,
    copy_repeated,
    copy_shared,
    name_foreign_state,
    refuse_deleted,
    replicate_counters,
)
from optfn.wrappers.averaging import add_statistics, has_statistics

# Calls whose flags may still be unknown at the next call.
_STEPS_AHEAD = 3


class _Known(NamedTuple):
    """Facts from the structure of a state, found once for all calls with it.

    flags: the fields that end a run, each with the number of its leaf as the value.
    lasting: the metrics of the flags that keep their value.
    num_kept: how many leaves, the last ones, are the model state.
    is_apart: whether the workers of local steps are known to have their counters as the loss needs.
    """

    flags: list[reports.Flag]
    lasting: set[str]
    num_kept: int
    is_apart: bool = False


class TrainStep:
    """A compiled training step, as `make_train_step` returns it.

    loss_fn, tx, options: the arguments of `make_train_step`.
    layout: how the state is divided over the mesh; None without a mesh.
    compiled: the jitted function (state, batch) -> (state, metrics).
    """

    def __init__(self, options: StepArguments) -> None:
        self.loss_fn, self.options = options.loss_fn, options
        self.layout = layout = find_layout(options)
        self.tx = options.tx
        self.local = make_local_steps(options, layout)
        self.compiled: Any = compile_step(options, layout, self.local)
        # The mesh of a plan has no devices.
        mesh = self.mesh
        self._devices = frozenset(mesh.devices.flat if isinstance(mesh, Mesh) else ())
        self._has_run = False
        self._known: dict[Any, _Known] = {}
        self._placed: Batch = None  # the batch that `place_batch` returned last
        self._flags: collections.deque[jax.Array] = collections.deque()

    def __repr__(self) -> str:
        name = getattr(self.loss_fn, "__qualname__", repr(self.loss_fn))
        given = [f"{k}={v!r}" for k, v in self.options.list_given().items()]
        return f"TrainStep({', '.join([name, show_transform(self.tx), *given])})"

    def list_arguments(self, state: TrainState, batch: Batch) -> tuple[Any, ...]:
        """Return the arguments of `compiled`, (state, batch), and as a third one the layout of the
        params if they keep their placement."""
        if isinstance(self.layout, AsPlaced):
            return state, batch, self.layout.follow(state.params)
        return state, batch

    @property
    def local_steps(self) -> int:
        """The count of steps in a call: H in a round of H local steps, else 1."""
        return self.options.local_steps

    @property
    def mesh(self) -> Mesh | None:
        """The mesh that the step runs on, None without one."""
        return None if self.layout is None else self.layout.mesh

    def init(self, params: Params, model_state: PyTree = None) -> TrainState:
        """Return the state before the first step, which holds copies of your arrays on the mesh,
        and warn of an optimizer that would not train as intended.

        On a mesh, the state is placed as the options of the step say. In a run of several
        processes, all must pass the same params, which is checked.

        You get a warning of a transform at the wrong position in a chain, such as an average that
        is not last; of no learning rate, or of two whose steps go uphill; of `lazy` without a
        row-sparse gradient; of params that are all frozen, or for a mesh the copies of a pmap; and
        of deep gradient compression that compresses no leaf.

        Args:
          params: the parameters to train, also those of an earlier state, packed or with tables.
          model_state: the initial one, a tree of arrays, for a step with `model_state=True`.

        Raises:
          TypeError: params are a TrainState; all are integers, which are not trained; or params are
            a flax or equinox model with more than parameters in it, such as batch statistics. The
            error has the line that splits it.
          ValueError: params, or the versions of optfn or JAX, differ between processes; a NumPy
            array has integers that JAX would cut to 32 bits; or with `packed`, a rule that is not
            optfn's updates a leaf in a buffer otherwise.
        """
        check_initial_params(params)
        self._check_model_state(model_state)
        check_arrays("TrainStep.init: model_state", model_state)
        check_integers("TrainStep.init: model_state", model_state)
        if processes.is_on_all_processes(self.mesh):
            processes.compare_params(params)
        state = self._make_state(params, model_state)
        ineffective.warn_of_replicas(params, self.mesh)
        ineffective.warn_of_frozen(self.tx, params)
        ineffective.warn_of_unclipped(self.tx)
        if self.options.state_memory is not None:
            ineffective.warn_of_moves(state.opt_state)
        warn_if_nothing_compressed(state.opt_state)
        # In a round tx gets gradients, and outer the pseudo-gradient: each has an order to check.
        if self.local is None:
            warn_of_order("tx", self.tx, state.opt_state, params)
        else:
            warn_of_order("tx", self.tx, state.opt_state.inner.inner_state, params)
            warn_of_order("outer", self.local.outer, state.opt_state.outer, params)
        if self.options.tables is not None:
            ineffective.warn_of_lazy_sums(self.tx)
        elif self.options.value_and_grad is None:
            ineffective.warn_of_lazy(self.tx, state.params)
        return state

    def _make_state(
        self, params: Params, model_state: PyTree, layout: Layout | None = None
    ) -> TrainState:
        """Return the state before the first step, packed if the step is, and placed on the mesh by
        the params' layout."""
        if self.options.packed:
            given = unpack(params)  # as they are, or packed in an earlier state
            params = pack(parallel.copy_host_arrays(given))
            refuse_changed_rules("tx", self.tx, given)
            if self.local is not None:
                refuse_changed_rules("outer", self.local.outer, given)
        if self.layout is None:
            params, model_state = jax.tree.map(copy, (params, model_state))
            step, opt_state = jnp.zeros((), jnp.int32), self._init_optimizer(params)
            opt_state = self._add_statistics(opt_state, model_state, lambda x: x)
            state = TrainState(step, params, opt_state, model_state)
            return self._keep_in_memory(replicate_counters(copy_repeated(state)))
        layout = layout or self.layout.follow(params)
        # Tables in the params of an earlier state have the stored order of their rows.
        params = layout.place_params(sharded_table.to_logical(params))
        if layout.tables is not None:
            owners = Devices(layout.mesh, layout.shard_axes)
            params = sharded_table.divide_tables(params, _find_tables(layout, params), owners)
        opt_state = layout.init((self.local or self.tx).init, params)
        sharded_table.check_rows(opt_state)
        opt_state = self._add_statistics(opt_state, model_state, layout.replicate)
        step, model_state = layout.replicate((jnp.zeros((), jnp.int32), model_state))
        return self._keep_in_memory(copy_repeated(TrainState(step, params, opt_state, model_state)))

    def _init_optimizer(self, params: Params) -> OptState:
        """Return the optimizer's state without a mesh, made in the memory where it stays."""
        if checks.is_traced(params):
            return self.tx.init(params)
        if self.options.state_memory is None:
            return copy_each(self.tx.init(params))
        from optfn.train.host_state import init_on_host

        return init_on_host(self.tx.init, params)

    def _keep_in_memory(self, state: TrainState) -> TrainState:
        """Return a state whose large arrays of the optimizer lie in `state_memory`, with all arrays
        committed to their devices, or unchanged without one or while a function is traced."""
        if self.options.state_memory is None or checks.is_traced(state.step):
            return state
        from optfn.train.host_state import place_state

        return place_state(state)

    def _init_like(self, state: TrainState) -> OptState:
        """Return the optimizer's state before the first step for the params and the model state of
        a state."""
        opt_state = (self.local or self.tx).init(state.params)
        return self._add_statistics(opt_state, state.model_state, lambda x: x)

    def _add_statistics(
        self, opt_state: OptState, model_state: PyTree, place: Callable[[PyTree], PyTree]
    ) -> OptState:
        """Let the averages in a state average the model state if the step is to, or raise a
        ValueError without any, and return the state unchanged otherwise."""
        if not self.options.average_model_state:
            return opt_state
        added = add_statistics(opt_state, model_state, place)
        if not has_statistics(added):
            raise ValueError(
                "average_model_state=True needs an average in tx: put optfn.exponential_moving_"
                "average or optfn.model_average last in the chain"
            )
        return added

    def lower(
        self, params: Params | TrainState, batch: Batch, model_state: PyTree = None
    ) -> jax.stages.Lowered:
        """Return the step traced and lowered for the devices of its mesh, without allocating or
        running anything.

        `.compile()` of the result gives the program of a call. Its `memory_analysis()` has the
        bytes that a device needs, and its `as_text()` the collectives. Devices that you do not have
        serve as well: `jax.experimental.topologies` describes TPUs and GPUs.

        Args:
          params: as for `init`: arrays, or ShapeDtypeStructs of whole arrays; or the TrainState of
            a call.
          batch: as for a call: arrays or ShapeDtypeStructs of all examples.
          model_state: likewise, for a step with `model_state=True`; a TrainState has one already.

        Raises:
          TypeError, ValueError: `init` or a call would refuse the arguments.

        >>> import jax, jax.numpy as jnp, optfn
        >>> step = optfn.make_train_step(lambda p, x: jnp.mean(x @ p), optfn.adam(1e-3))
        >>> x, p = (jax.ShapeDtypeStruct(s, jnp.float32) for s in [(8, 512), (512, 512)])
        >>> memory = step.lower(p, x).compile().memory_analysis()
        >>> memory.argument_size_in_bytes // (512 * 512)  # params and two moments
        12
        """
        arguments = self.list_arguments(*self.shapes(params, batch, model_state))
        with name_refused_constraints(lambda: self.compiled.trace(*arguments).jaxpr):
            lowered: jax.stages.Lowered = self.compiled.lower(*arguments)
        return lowered

    def shapes(
        self, params: Params | TrainState, batch: Batch, model_state: PyTree = None
    ) -> tuple[TrainState, Batch]:
        """Return the state and the batch of a call as ShapeDtypeStructs, placed on the mesh.

        It takes the arguments of `lower`.
        """
        if isinstance(params, TrainState):
            if model_state is not None:
                raise TypeError("TrainStep.lower: a TrainState has its own model_state")
            self.check_state(params)
            state = jax.tree.map(_shape_of, params)
            layout = self.layout and self.layout.follow(params.params)
        else:
            check_initial_params(params, "TrainStep.lower")
            self._check_model_state(model_state)
            layout = self.layout and self.layout.follow(params)
            make = functools.partial(self._make_state, layout=layout)
            state = jax.eval_shape(make, *jax.tree.map(_shape_of, (params, model_state)))
        batch = jax.eval_shape(self._split_batch, jax.tree.map(_shape_of, convert_batch(batch)))
        if layout is not None:
            along = layout.data_axes
            split = jax.tree.map(lambda x: parallel.batch_spec(x, along), batch)
            state = layout.shapes(specs_of_state(state, layout), state)
            batch = layout.shapes(split, batch)
        if self.options.state_memory is not None:
            from optfn.train.host_state import describe_state

            state = describe_state(state)
        return state, batch

    def __call__(self, state: TrainState, batch: Batch) -> tuple[TrainState, dict[str, Any]]:
        """Take a step on a batch, and return the next state and the metrics, overwriting `state`
        unless the step was made with `donate=False`.

        `state` is donated: don't use it again, unless the step was made with `donate=False`. Where
        its arrays are in the batch or the model state too, they are copied. You can also call the
        step inside `jax.jit` and `lax.scan`.

        Raises:
          FloatingPointError: `skip_nonfinite` gave up in the previous step.
          ValueError: `state` has been donated to an earlier call, has local steps of another number
            of workers, or lies on devices outside of the mesh; or something besides the
            update has changed a parameter that has a master; or, at the first call, the batches of
            several processes differ in structure, shapes or numbers.
          TypeError: `state` is not a TrainState, or it was made by a step with another `packed`,
            `model_state` or `local_steps`; or the batch contains text, or arrays of another library
            that NumPy cannot convert without a copy.
        """
        state, metrics = self.dispatch(state, batch)
        wait_on_cpus(metrics)
        return state, metrics

    def dispatch(self, state: TrainState, batch: Batch) -> tuple[TrainState, dict[str, Any]]:
        """Start a call, and return its results, which the devices are still computing.

        `wait_on_cpus` must be called with the metrics before the next call.
        """
        leaves, structure = jax.tree.flatten(state)
        known = self._known.get(structure) or self._learn(state, structure)
        is_traced = checks.has_tracer(leaves[:1])
        flags = set() if is_traced else self._check_values(state, leaves, known)
        is_placed, self._placed = batch is self._placed, None
        if not is_placed:
            batch = convert_batch(batch)
        if self.options.donate and not is_traced:
            if known.num_kept:
                others = leaves[: -known.num_kept]
                state = state._replace(model_state=copy_shared(state.model_state, others))
            if not (is_placed and self.layout):
                batch = copy_shared(batch, leaves)
        # Only at the first call: the comparison is a collective of all processes.
        if not (self._has_run or is_traced) and processes.has_state_on_all_processes(state):
            processes.compare_batch(batch)
        if not is_placed and (self.layout is not None or not is_traced):
            batch = self._split_batch(batch) if self.layout else parallel.copy_host_arrays(batch)
        if self.local is not None and not known.is_apart:
            state = self._keep_apart(state, batch)
        arguments = self.list_arguments(state, batch)
        try:
            state, metrics = self.compiled(*arguments)
        except Exception:
            with (
                name_foreign_state(state, self._init_like),
                name_refused_constraints(lambda: self.compiled.trace(*arguments).jaxpr),
            ):
                raise
        if not is_traced:
            self._has_run = True
            self._flags.extend(metrics[name] for name in flags if name in metrics)
        return state, metrics

    def _learn(self, state: TrainState, structure: Any) -> _Known:
        """Check all that the structure of a state tells, and keep it for the next calls with it."""
        self.check_state(state)
        found = reports.find_flags(structure)
        lasting = {x.metric for x in found if x.is_lasting}
        kept = len(jax.tree.leaves(state.model_state))
        known = self._known[structure] = _Known(found, lasting, kept)
        return known

    def _check_values(self, state: TrainState, leaves: list[Any], known: _Known) -> set[str]:
        """Raise an error if the values of a state that a call gets must end the run, or if they
        have been donated or lie off the mesh, and return the metrics of the flags that keep their
        value."""
        self._check_step(state)
        if self.layout is not None:
            refuse_deleted(state, leaves)
        if self.local is not None:
            check_rounds(state.opt_state, self.local, self.layout)
        if known.flags:
            self._check_flags([x._replace(value=leaves[x.value]) for x in known.flags])
        return known.lasting

    def _keep_apart(self, state: TrainState, batch: Batch) -> TrainState:
        """Return the state of local steps with a copy of all counters for each worker if the loss
        is a `Mean`, and unchanged otherwise."""
        assert self.local is not None
        metrics = jax.eval_shape(self.compiled, *self.list_arguments(state, batch))[1]
        state = self.local.keep_apart(state) if "weight" in metrics else state
        structure = jax.tree.structure(state)
        self._known[structure] = self._learn(state, structure)._replace(is_apart=True)
        return state

    def check_batch_sizes(self, sizes: Iterable[int]) -> None:
        """Raise a ValueError unless workers and local steps divide these counts of examples, or
        accept every count without a mesh."""
        if self.layout is None:
            return
        workers = count_devices(self.layout.mesh, self.layout.data_axes)
        for size in sizes:
            if size % (workers * self.local_steps):
                steps = f" × {self.local_steps} local steps" if self.local_steps > 1 else ""
                raise ValueError(
                    f"a batch of {size} examples cannot be divided evenly by {workers} workers"
                    f"{steps}. {parallel.REMEDIES_OF_SIZE}"
                )

    def place_batch(self, batch: Batch, state: TrainState) -> Batch:
        """Check and place a batch on the devices of a state as a call would, and remember it, so
        that the next call with it does neither again."""
        batch = convert_batch(batch)
        if self.layout is None:
            batch = parallel.copy_beside(batch, state.step)
        elif self.options.donate:
            batch = copy_shared(batch, jax.tree.leaves(state))
        self._placed = batch = self._split_batch(batch)
        return batch

    def _split_batch(self, batch: Batch) -> Batch:
        """Return a batch on the mesh, split over the data axes, or unchanged without a mesh."""
        if self.layout is None:
            return batch
        layout = self.layout
        return parallel.split_batch(batch, layout.mesh, layout.data_axes, self.local_steps)

    def check(self, state: TrainState) -> None:
        """Raise a FloatingPointError or a ValueError if the step that returned this state must end
        the run, as the next call would.

        Raises:
          FloatingPointError: `skip_nonfinite` gave up.
          ValueError: something besides the update changed a parameter that has a master.
        """
        if not checks.is_traced(state.step):
            reports.raise_flags(reports.get_flags(state.opt_state))

    def _check_flags(self, flags: list[reports.Flag]) -> None:
        """Raise the errors of `check`, where a flag that keeps its value is read from earlier
        calls, so that nothing waits for the last one.

        To read such a flag from the state of the last call would end the overlap of the host's work
        with the work of the devices. We read it from the metrics of earlier calls instead, as soon
        as these are ready or a few calls old.
        """
        is_set = False
        while self._flags and (len(self._flags) > _STEPS_AHEAD or reports.is_ready(self._flags[0])):
            is_set |= bool(np.any(reports.read_local(self._flags.popleft())))
        reports.raise_flags(
            x for x in flags if is_set or not x.is_lasting or reports.is_ready(x.value)
        )

    def check_state(self, state: TrainState) -> None:
        """Raise a TypeError or a ValueError if this step does not take a state, as a call would."""
        checks.instance("state", state, TrainState, "a TrainState, such as step.init(params)")
        if is_packed(state.params) != self.options.packed:
            kind = "a tree of params" if self.options.packed else "packed params"
            raise TypeError(
                f"the step was made with packed={self.options.packed}, but the state has {kind}"
            )
        self._check_model_state(state.model_state)
        if self.layout is not None and self.layout.tables is not None:
            params = sharded_table.unwrap_tables(state.params)
            sharded_table.check_tables(state.params, _find_tables(self.layout, params))
        check_rounds(state.opt_state, self.local, self.layout)
        self._check_step(state)

    def _check_step(self, state: TrainState) -> None:
        """Raise a ValueError if a state has been donated, or is one of several, or is committed to
        devices outside the mesh. Its count of steps tells it."""
        is_array = isinstance(state.step, jax.Array) and not checks.has_tracer([state.step])
        if is_array and state.step.is_deleted():
            raise ValueError(
                "the state has been used up: an earlier call of the step has overwritten it. "
                "Continue with the state that this call returned, or make the step with "
                "donate=False"
            )
        if getattr(state.step, "ndim", 0):  # np.ndim takes five times as long
            raise ValueError(
                "the step trains one state, whose step is a scalar; got a state whose step has "
                f"shape {np.shape(state.step)}, as a population has: call jax.vmap(step, "
                "in_axes=(0, None))(state, batch) in a loop of your own, or pass one member to fit"
            )
        if is_array and self.layout is not None:
            self._check_devices(state.step)

    def _check_devices(self, x: jax.Array) -> None:
        """Raise a ValueError if a state is committed to devices outside the mesh.

        Args:
          x: one array of the state; all its arrays lie on the same devices.
        """
        here = x.sharding.device_set
        if x.committed and here != self._devices:
            raise ValueError(
                f"the state lies on {len(here)} devices, but the mesh of the step has "
                f"{len(self._devices)}, and they must be the same. Begin with step.init(params), "
                "or take the state over by optfn.load_state_dict(step.init(params), "
                "optfn.state_dict(state))"
            )

    def _check_model_state(self, model_state: PyTree) -> None:
        """Raise a TypeError if there is a model state but the step takes none, or the reverse."""
        if (model_state is not None) != self.options.model_state:
            raise TypeError(
                f"the step was made with model_state={self.options.model_state}; got "
                + ("a model_state" if model_state is not None else "none")
            )


def _find_tables(layout: Layout, params: Params) -> PyTree:
    """Tell for each leaf of params whether its rows are divided."""
    return jax.tree.map(lambda entry: entry.is_table, layout.describe(params))


def _shape_of(x: Leaf) -> jax.ShapeDtypeStruct:
    """Return the shape and dtype of an array or a number, without its placement."""
    return jax.ShapeDtypeStruct(jnp.shape(x), jnp.result_type(x))


def wait_on_cpus(metrics: dict[str, Any]) -> None:
    """Wait for the call that returned these metrics if it runs on several CPU devices, and
    otherwise do nothing.

    CPU devices share their threads. If several steps run at once, one may hold the threads that an
    all-reduce of another waits for.
    """
    if not checks.has_tracer([metrics["loss"]]) and is_on_several_cpus(metrics["loss"]):
        jax.block_until_ready(metrics)


def find_layout(options: StepArguments) -> Layout | None:
    """Return the layout of the state of a step on its mesh, or None without a mesh."""
    if options.mesh is None:
        return None
    # Any way of sharding divides tables by rows: a lookup fetches rows from their owners, where
    # another layout would gather the whole table for it.
    tables = options.tables if options.shard_tables or options.shard else None
    layout = layout_of(
        options.shard, options.mesh, options.data_axis, tables, options.tx, options.reduce_dtype,
        options.partitioner,
    )  # fmt: skip
    return dataclasses.replace(layout, state_memory=options.state_memory)


@accept_fields(StepArguments)
def make_train_step(options: StepArguments) -> TrainStep:
    """Return a jitted training step, which updates params and state in place.

        loss, g = value_and_grad(loss_fn)(params, batch)
        u, opt_state = tx.update(g, opt_state, params, value=loss, grad=g, value_fn=loss_fn)
        params = params + u

    The step overwrites the arrays of the state that you pass, so that it needs no second copy of
    them: JAX pairs donated inputs with outputs of the same shape in order, and the step keeps
    params before state on both sides.

    Args:
      loss_fn: a function (params, batch) -> loss, a scalar, the mean over the examples of a batch,
        or an `optfn.Mean`, where examples do not count alike; with `has_aux`, it returns (loss,
        aux). Its arguments are (params, model_state, batch, key, step): the model state, the key
        and the step only with `model_state`, `rng` and `pass_step`. None if you pass
        `value_and_grad`.
      tx: an optimizer of optfn or optax.
      **StepOptions
      model_state: whether the model has arrays besides params, such as batch statistics. `loss_fn`
        is then (params, model_state, batch) -> (loss, model_state), or (loss, (model_state, aux))
        with `has_aux`, and the next TrainState has the new model_state. On a mesh, floating-point
        arrays are averaged over the workers, and integers are taken from worker 0. If
        `skip_nonfinite` skips the step, the model_state stays as it was.
      donate: whether the step may overwrite the state that you pass.
      average_model_state: whether the averages in tx (`exponential_moving_average`,
        `model_average`) average the floating-point arrays of the model state too, with the same
        weights, as batch statistics belong to params. Averaged params are evaluated with these.

    Transforms of optax that ask for extra arguments get them: value, the loss; grad, the gradients;
    and value_fn, a differentiable function from params to the loss on this batch, for sophia as
    obj_fn. On a mesh these are means over the workers.

    Returns:
      A TrainStep. `init(params)` returns the first TrainState, and calling the step with
      (state, batch) returns (state, metrics). Metrics have "loss" and, if tx has one,
      "learning_rate" (of local steps, the largest of the workers in their last step: a worker that
      skips a step falls behind in its schedule); if the loss is a `Mean`, also "weight", the sum of
      the weights. With `record_metrics` in tx, and without local steps, they also have "grad_norm",
      "update_norm", "param_norm", "clip_factor" and the norms of its groups. With `skip_nonfinite`
      they have "gave_up", which makes the next call raise, and "skipped". If tx exchanges gradients
      itself, and with local steps, they have "bytes_sent": the bytes that a worker sent in this
      call, by the formulas of the compressors.

    Raises:
      TypeError: an argument is of the wrong kind, or the loss is not a real number.
      ValueError: the loss is not a scalar; the mesh has no `data_axis`; `recompute` has names that
        `loss_fn` does not; or options need or exclude one another, see `optfn.train.options`.

    >>> import jax.numpy as jnp, optfn
    >>> step = optfn.make_train_step(lambda p, x: jnp.sum((p - x) ** 2), optfn.sgd(0.25))
    >>> state, metrics = step(step.init(jnp.zeros(2)), jnp.array([1.0, 3.0]))
    >>> float(metrics["loss"]), state.params.tolist()
    (10.0, [0.5, 1.5])
    """
    if isinstance(options.mesh, AbstractMesh):
        raise TypeError(
            "mesh must be a jax.sharding.Mesh such as optfn.distributed.data_mesh(); got "
            f"{checks.show(options.mesh)}. For devices that you do not have, plan_memory takes an "
            "AbstractMesh, and jax.experimental.topologies describes them for TrainStep.lower"
        )
    return TrainStep(options)
