"""The options of a training step: which of them need or exclude one another, and their checks."""

import dataclasses
import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, ParamSpec, TypeVar, cast

import jax
import optax
from jax.sharding import Mesh

from optfn import core
from optfn.core import checks
from optfn.core.types import DType, LossFn, Updates
from optfn.leaves.patterns import Pattern
from optfn.loss.recomputation.named_segments import check_names
from optfn.mesh.collectives.axes import AxisName, check_axis_names
from optfn.mesh.collectives.mesh import count_devices
from optfn.mesh.compilers import memories
from optfn.mesh.layout.sharding import Kind, Sharded, check_reduce_dtype

P = ParamSpec("P")
R = TypeVar("R")
Record = TypeVar("Record")

# (option, the option that it needs, why)
NEEDS = (
    ("shard", "mesh", "params or state are divided over its devices"),
    ("shard_tables", "tables", "a pattern of the leaves whose rows are divided"),
    ("shard_tables", "mesh", "rows are divided over its devices"),
    ("local_steps", "mesh", "its workers train apart"),
    ("outer", "local_steps", "it is the optimizer of rounds of several steps"),
    ("reduce_dtype", "mesh", "gradients are reduced over its devices"),
)

_OF_LOSS = "it concerns loss_fn, which value_and_grad replaces"

# (option, an option that excludes it, why)
EXCLUDES = (
    (
        "recompute",
        "value_and_grad",
        f"{_OF_LOSS}. Wrap the function that it differentiates, such as a stage: "
        "optfn.recompute(stage_fn, checkpoints=...)",
    ),
    ("tables", "value_and_grad", _OF_LOSS),
    ("rng", "value_and_grad", _OF_LOSS),
    ("pass_step", "value_and_grad", _OF_LOSS),
    ("tables", "packed", "a buffer of several leaves has no rows"),
    ("shard_tables", "packed", "a buffer of several leaves has no rows"),
    (
        "state_memory",
        "local_steps",
        "each of the steps would move the state of the workers over the link to the host",
    ),
    ("state_memory", "tables", "the host would send all rows for the few that a batch looks up"),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepOptions:
    """The options of a training step, which `make_train_step` and `minimize` take.

    Args:
      has_aux: whether `loss_fn` returns auxiliary data as well, which you find in metrics["aux"].
        On a mesh and with microbatches, floating-point numbers and arrays are averaged over workers
        and microbatches, integers are summed, and a boolean becomes the number of times that it was
        true. An array with an entry for each example is an error there.
      mesh: the workers that share the work, such as `optfn.distributed.data_mesh()`. The leading
        axis of the batch is split over them, and the loss is their mean. Pass batches as host
        arrays of all examples, the same in every process, or as global arrays.
      data_axis: the axis of the mesh, or a tuple of axes; the batch is split over them. An
        optimizer that exchanges gradients itself, such as `dgc_momentum`, does so over its
        `axis_name`; over the remaining data axes its gradients are averaged.
      recompute: names of values in `loss_fn` that are kept for the backward pass. Everything
        between them is recomputed there, to save memory; see `optfn.recompute`.
      packed: whether params and state are kept in one buffer per dtype, which is faster for models
        with many small leaves; see `optfn.pack`. `loss_fn` still sees the tree. `state.params` is
        packed, and `unpack(state.params)` is the tree.
      tables: the embedding leaves, as a pattern of paths. `loss_fn` can only look rows up in them,
        and their gradients are row-sparse; see `optfn.sparse.value_and_grad`. Without it all
        gradients are dense, and `init` warns of an optimizer with `lazy`.
      rng: True, a seed or a key. `loss_fn` then gets a key as its last argument: in step i, counted
        from 0, it is fold_in(key, i), with the key of a seed, and True means the seed 0. On a mesh
        each worker folds in its number, and then each microbatch its number:
        fold_in(fold_in(fold_in(key, i), worker), microbatch). A key of unsafe_rbg, whose folds
        commute, is split before each of them. The same numbers on one device and on several come
        from `partitioner="compiler"` without microbatches, or from keys in the batch.
      pass_step: whether `loss_fn` gets the index of the step, counted from 0, as its last argument,
        after the key: for a weight or a temperature that changes during the run. All microbatches
        of a step get the same index, and a run that goes on counts on.
      value_and_grad: a function (params, batch) -> (loss, gradients) to use instead of the gradient
        of `loss_fn`, such as a pipeline, whose batch is (inputs, targets). It takes and returns
        model state and aux as `loss_fn` does: ((loss, model_state), gradients); with a `Mean`, the
        gradients are those of its quotient. The step
        conjugates gradients of complex params, as `jax.grad` gives them. With `mesh` it is called
        inside `shard_map`, with a worker's slice of the batch.
      microbatches: k. The loss is computed for k equal slices of a worker's batch, one after
        another, and the gradients are averaged, by weight if the loss is a `Mean`. This saves
        memory, since only the activations of one microbatch are kept at a time. Batch statistics
        are taken over a microbatch, and so are losses over pairs of examples. With `shard="params"`
        each microbatch gathers the params again; see `optfn.distributed.sharded`.
      local_steps: H. With H > 1 a call is a round: each worker takes H steps of `tx` alone, with a
        local state, on equal slices of its batch. Then `outer` gets the pseudo-gradient
        θ_start − θ_end, in float32, as its gradient, and params become θ_start plus its update, the
        same on all workers. Needs `mesh`; see docs/links.md.
      outer: the optimizer of the rounds. It gets the mean pseudo-gradient over workers, or each
        worker's pseudo-gradient if it exchanges gradients itself. None is sgd(1.0): params become
        the mean over workers.
      shard: how params and state are divided over the devices of `mesh`, if they don't fit on one.
        None: every device has all of them. "state": each of the N devices along `data_axis` keeps
        1/N of the state; gradients are reduce-scattered, and new params are all-gathered.
        "params": params are divided as well, and gathered for the loss, one layer at a time if it
        uses `optfn.distributed.scan_layers`. Or the PartitionSpecs of params: a tree of
        PartitionSpecs or NamedShardings with the structure of params or of a prefix of it, such as
        flax's `nn.get_partition_spec(...)`, where None stands for whole leaves; or a mapping from
        patterns of paths to PartitionSpecs, where leaves without a pattern are whole. The state
        follows them, and axes besides `data_axis` are left to the compiler. Of a NamedSharding only
        the spec counts. A mapping whose keys name all leaves is a tree. A leaf without a dimension
        that N divides stays whole, and so does a small leaf, see `sharded`. The results are the
        same as on one device, up to rounding: compare in float32, because in bfloat16 gradients
        differ by a few percent.
      shard_tables: whether each of the N devices of `mesh` keeps 1/N of the rows of the leaves that
        `tables` selects, and of their state; any `shard` does the same with them. N must divide the
        number of rows. Row r is on device r mod N. Rows that a batch looks up are fetched from
        these devices, and gradients are sent back to them. In `TrainState.params` such a leaf is an
        `optfn.sparse.ShardedTable`; `np.asarray` of it has the natural order.
      compiler_options: options of XLA for the step, as `jax.jit` takes them: a mapping from names
        to values, such as `optfn.distributed.overlap_options(mesh)`. Options that the installed
        compiler does not know are dropped, with a warning. Inside another `jax.jit`, JAX refuses
        such a step: pass the options to the outer jit. None: XLA's defaults.
      reduce_dtype: the dtype for adding and sending gradients where devices take their mean: in
        all-reduces and reduce-scatters, over shards and over workers. "float32" keeps the digits
        of a sum of bfloat16 gradients over many devices, and sends twice the bytes; the mean is
        rounded to the dtype of its parameter. None: the dtype of the gradient. It does not change
        packets, rows of tables, the sums of a pipeline or a `value_and_grad`, and the compiler's
        sums along axes besides `data_axis`; pseudo-gradients of local steps are float32 in any
        case. See docs/precision.md.
      partitioner: who divides the loss over `mesh`. "shard_map": each worker runs `loss_fn` on its
        examples, and the step sends params and gradients. Sharding constraints in the model are
        dropped along `data_axis`, and hold along the remaining axes. "compiler": `loss_fn` sees all
        examples, as on one device, and XLA divides the work by the placements of params and batch
        and the sharding constraints in the model, over all axes of the mesh. `shard` places params
        and state; without it params keep the NamedShardings that you give them, and state follows
        them. Options that need workers are refused: an optimizer that exchanges gradients,
        `local_steps`, compressors of `sharded`, divided tables and `value_and_grad`; see
        docs/shardings.md.
      state_memory: "pinned_host" keeps the arrays of the optimizer's state that have a megabyte or
        more in the memory of the host, where each device has its part of them. A step reads and
        writes them once, in chunks, so that a device holds params, gradients and about one leaf of
        the state. It takes the time of these bytes over the link to the host, 24 bytes a parameter
        for masters and two moments in float32, which microbatches divide among them; see
        docs/state-on-host.md. Values are those without it, up to rounding. None: on the device.
    """

    has_aux: bool = False
    mesh: Mesh | None = None
    data_axis: AxisName = "data"
    recompute: Sequence[str] | None = None
    packed: bool = False
    tables: Pattern | None = None
    rng: bool | int | jax.Array = False
    pass_step: bool = False
    value_and_grad: Callable[..., tuple[Any, Updates]] | None = None
    microbatches: int = 1
    local_steps: int = 1
    outer: optax.GradientTransformation | None = None
    shard: Kind | None = None
    shard_tables: bool = False
    compiler_options: Mapping[str, Any] | None = None
    reduce_dtype: DType | None = None
    partitioner: Literal["shard_map", "compiler"] = "shard_map"
    state_memory: Literal["pinned_host"] | None = None


@dataclasses.dataclass(frozen=True)
class StepArguments(StepOptions):
    """The arguments of `make_train_step`, checked."""

    loss_fn: LossFn | None
    tx: optax.GradientTransformation
    _: dataclasses.KW_ONLY
    model_state: bool = False
    donate: bool = True
    average_model_state: bool = False

    def __post_init__(self) -> None:
        # The only way to set a field of a frozen dataclass: tx of another library is wrapped.
        object.__setattr__(self, "tx", core.check_transform("tx", self.tx))
        dtype = check_reduce_dtype("reduce_dtype", self.reduce_dtype)
        object.__setattr__(self, "reduce_dtype", dtype)
        for field in dataclasses.fields(self):
            if field.type is bool:
                checks.flag(field.name, getattr(self, field.name))
        if self.average_model_state and not self.model_state:
            raise ValueError("average_model_state=True needs model_state=True")
        checks.count("local_steps", self.local_steps)
        checks.count("microbatches", self.microbatches)
        if self.recompute is not None:
            check_names("recompute", self.recompute)
        check_axis_names("data_axis", self.data_axis)
        if self.mesh is not None:
            count_devices(self.mesh, self.data_axis)
        wanted = "a mapping from names of XLA's options to values"
        checks.instance("compiler_options", self.compiler_options, Mapping | None, wanted)
        checks.choice("partitioner", self.partitioner, ("shard_map", "compiler"))
        checks.choice("state_memory", self.state_memory, (None, memories.PINNED_HOST))
        _check_together(self.list_given())
        if self.partitioner == "compiler":
            self._check_compiler()
        if self.packed and isinstance(self.shard, Sharded) and self.shard.whole is not None:
            raise ValueError(
                "shard=sharded(..., whole=) cannot be combined with packed=True: a part of a "
                "buffer of several leaves does not consist of whole matrices"
            )
        self._check_loss()

    def _check_compiler(self) -> None:
        """Raise a ValueError if an option needs a worker, or if there is no mesh, since the step is
        left to the compiler."""
        if self.mesh is None:
            raise ValueError(
                'partitioner="compiler" needs mesh: the compiler divides the loss over its devices'
            )
        shard, divided = self.shard, self.shard_tables or self.shard is not None
        has_packets = isinstance(shard, Sharded) and (shard.gather or shard.reduce)
        given = {
            "local_steps": (self.local_steps > 1, "its workers train apart"),
            "tables": (self.tables is not None and divided, "the owners of rows are workers"),
            "value_and_grad": (
                self.value_and_grad is not None,
                "a pipeline divides its work itself",
            ),
            "shard=sharded(gather=, reduce=)": (has_packets, "workers encode their messages"),
            "reduce_dtype": (self.reduce_dtype is not None, "the compiler adds up gradients"),
            "packed": (
                self.packed and bool(self.mesh.explicit_axes),
                "along explicit axes a buffer of several leaves has no sharding of each",
            ),
        }
        for option, (is_given, why) in given.items():
            if is_given:
                raise ValueError(f'{option} cannot be combined with partitioner="compiler": {why}')

    def _check_loss(self) -> None:
        """Raise a TypeError unless `value_and_grad`, if given, or else `loss_fn` is a function that
        takes the arguments of a step."""
        loss_fn, value_and_grad = self.loss_fn, self.value_and_grad
        if not callable(loss_fn) and (loss_fn is not None or value_and_grad is None):
            raise TypeError(f"loss_fn must be a function (params, batch) -> loss; got {loss_fn!r}")
        wanted = "a function (params, batch) -> (loss, gradients)"
        checks.instance("value_and_grad", value_and_grad, Callable | None, wanted)
        arguments = ["params", "model_state", "batch"] if self.model_state else ["params", "batch"]
        if value_and_grad is not None:
            checks.check_signature("value_and_grad", value_and_grad, arguments)
            return
        if self.rng is not False:
            arguments.append("key")
        if self.pass_step:
            arguments.append("step")
        hint = (
            ". model_state=True adds the model state before the batch; rng adds a key after it, "
            "and pass_step=True the index of the step, the last"
        )
        checks.check_signature("loss_fn", loss_fn, arguments, hint=hint)

    def list_given(self) -> dict[str, Any]:
        """Return the options that are not the default objects, by name."""
        options = [f for f in dataclasses.fields(self) if f.kw_only]
        values = {f.name: (getattr(self, f.name), f.default) for f in options}
        return {name: value for name, (value, default) in values.items() if value is not default}


def _check_together(given: Mapping[str, Any]) -> None:
    """Raise a ValueError if an option lacks another that it needs, or excludes a given one."""
    for option, needed, why in NEEDS:
        if option in given and needed not in given:
            raise ValueError(f"{_show_option(option, given)} needs {needed}: {why}")
    for option, excluded, why in EXCLUDES:
        if option in given and excluded in given:
            shown, other = _show_option(option, given), _show_option(excluded, given)
            raise ValueError(f"{shown} cannot be combined with {other}: {why}")


def _show_option(option: str, given: Mapping[str, Any]) -> str:
    """Return "name=value" for an option whose value is a number or a word, and the name alone
    otherwise."""
    value = given[option]
    return f"{option}={value!r}" if isinstance(value, str | int) else option


def accept_fields(record: Callable[P, Record]) -> Callable[[Callable[[Record], R]], Callable[P, R]]:
    """Decorate a function of one dataclass, so that callers pass the fields as its arguments.

    The dataclass `record` has their order, types and defaults. In the function's docstring, a line
    `**Options` stands for the arguments in the docstring of the base class `Options` of `record`.
    """

    def decorate(function: Callable[[Record], R]) -> Callable[P, R]:
        name, signature = function.__name__, inspect.signature(record)

        @functools.wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            # The error of the dataclass itself would name `__init__` instead of the function.
            try:
                signature.bind(*args, **kwargs)
            except TypeError as error:
                known = ", ".join(signature.parameters)
                raise TypeError(f"{name}: {error}; its arguments are {known}") from None
            return function(record(*args, **kwargs))

        returned = inspect.signature(function).return_annotation
        text = inspect.cleandoc(function.__doc__ or "")
        for base in inspect.getmro(cast(type, record)):
            words = inspect.cleandoc(base.__doc__ or "").partition("Args:\n")[2]
            text = text.replace(f"  **{base.__name__}", words)
        call.__doc__ = text
        call.__signature__ = signature.replace(return_annotation=returned)  # type: ignore[attr-defined]
        return call

    return decorate
