"""Loss and gradients of a model whose stages are on different devices.

Loss and gradients equal `jax.value_and_grad` on one device, so any optimizer takes them. `engine`
runs the stages by the schedule of `plan`.
"""

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from optfn.core import checks, leafwise, numerics, tree
from optfn.core.types import Batch, LossFn, Params, PyTree, Updates
from optfn.loss.jaxprs.pullback import Key, select_inexact_leaves
from optfn.loss.mean import is_mean, nonzero
from optfn.mesh.collectives.axes import is_spec, join_axes
from optfn.mesh.collectives.mesh import shard_map
from optfn.mesh.compilers.groups import manual_axes
from optfn.pipeline.engine import Engine, Microbatches, make_work_item
from optfn.pipeline.functions import Embedding, StageFunction, UserFunctions
from optfn.pipeline.model import (
    Gradient,
    Model,
    StashPolicy,
    Weights,
    WorkItem,
    make_heterogeneous_model,
    make_homogeneous_model,
)
from optfn.pipeline.plan import Plan, plan
from optfn.pipeline.stacking import PipelineParams, unwrap_stacked, wrap_stacked
from optfn.pipeline.stage import Leaves
from optfn.pipeline.stage_placement import ListedStages, StackedStages

_STASHES = ("input", "residual")
_WITH_INPUTS = object()  # the default of targets: inputs is the pair (inputs, targets)


def pipeline_value_and_grad(
    stage_fn: StageFunction | Sequence[StageFunction],
    loss_fn: LossFn,
    *,
    mesh: Mesh,
    num_microbatches: int,
    axis_name: str = "stage",
    schedule: str = "1f1b",
    virtual_stages: int = 1,
    stash: str | None = None,
    data_axis: str | None = None,
    grad_reduce: str = "mean",
    param_specs: PyTree = None,
    embed: Embedding | None = None,
) -> Callable[..., tuple[jax.Array, Updates]]:
    """Return a jitted function that computes the loss and gradients of a model whose stages run on
    the devices along a mesh axis, a microbatch at a time.

        f(params, inputs, targets, *, rng=None) -> (loss, grads)
        f(params, (inputs, targets), *, rng=None), as `make_train_step` calls its value_and_grad

    Use it if a model is too deep for one device: each device keeps some layers, a stage. The model
    without a pipeline has the same loss and gradients: y = inputs; y = stage_fn(params[s], y) for
    each stage s; loss = loss_fn(y, targets).

    The batch is split into m microbatches. In lock step, each of the p devices along the stage axis
      1. runs its stage on the activation from the previous device, and saves the values that its
         backward reads;
      2. runs the backward of its stage on the cotangent from the next device (the last stage on
         the cotangent of the loss), and accumulates the gradients;
      3. passes both results on.
    The schedule says when. "gpipe" does all forwards, then all backwards. "1f1b" begins each
    backward as early as possible: p − 1 ticks of forwards, m ticks of a forward and a backward
    each, and p − 1 ticks of backwards. The idle time is the same as with "gpipe", but the memory
    does not grow with m. "zb" is 1f1b, but weight gradients wait for ticks when a device would
    idle, which leaves 2/3 of the idle time. `plan` has the numbers.

    Args:
      stage_fn: a function (params, x) -> x that returns the shapes and dtypes that it takes; x is a
        tree of arrays with the examples of a microbatch along the leading axis. For heterogeneous
        stages, such as embedding, blocks of different widths, and head: a list of p·v such
        functions in the model's order; each takes the result of the previous one. A
        function with a parameter `shared` or `rng` gets these as keywords (see below).
      loss_fn: a function (outputs, targets) -> loss, a real scalar, the mean over the examples of
        its arguments, or an `optfn.Mean`, whose weight must not depend on params. It may have a
        parameter `shared`.
      mesh: the devices. Along axes besides `axis_name`, `data_axis` and those in `param_specs`, the
        work is replicated. If you pass the same mesh to `make_train_step`, it splits the batch over
        the `data_axis` of the step. Place the params by `shard={pattern: PartitionSpec("stage")}`
        there; exchanges, local steps and sharding over the remaining axes work as for any model.
      num_microbatches: m ≥ 1, per data worker; it may be smaller than p.
      axis_name: the mesh axis of the stages; p is its size.
      schedule: "1f1b", "gpipe" or "zb".
      virtual_stages: v ≥ 1, the number of chunks of the model on each device: stage r·p + d is
        chunk r of device d (interleaved). The idle time is v times shorter. If v > 1, m must be a
        multiple of p.
      stash: the values saved for a microbatch until its backward. "input": the input of the stage,
        which then runs again. "residual": all values that the backward reads and that depend on the
        input. None is "input" for 1f1b, and "residual" for gpipe and zb.
      data_axis: the mesh axis that splits the batch, if any. Leave it out in a training
        step with a mesh, which splits the batch itself.
      grad_reduce: "mean": gradients are averaged over the data axis, as the loss is. An optimizer
        that exchanges gradients itself takes each worker's, in a training step with `mesh`.
      param_specs: a tree like the params of a stage, of PartitionSpecs over further axes of the
        mesh (a list of such trees for a list of functions); None divides nothing. Weights and
        gradients are divided like this, and `stage_fn` sees the shards of its device, which it
        combines by `copy_to` and `sum_over`. Weights divided over `data_axis` are gathered once
        before the ticks, and their gradients are reduce-scattered after them (with a list of
        functions, by an all-reduce).
      embed: a function inputs -> x, which the first stage runs, such as the lookup of tokens; it
        gets `shared` and `rng` too, if it has parameters of these names. Inputs may then differ
        from x. None: inputs are x.

    The arguments of f:
      params: the result of `stack_stages`, with leaves (p·v, …) or (v, p, …); or a list of params
        for a list of functions; or `PipelineParams(stages, shared)`, if several stages and the loss
        share weights.
      inputs: the whole batch, a tree of arrays (batch, …); its size must be a multiple of m times
        the number of data workers.
      targets: like `inputs`.
      rng: a random key, for dropout. A stage function gets
        fold_in(fold_in(rng, microbatch), stage), with the microbatches counted in the order of the
        whole batch, over all data workers; `embed` gets fold_in(key of the first stage, 2³¹ − 1).

    Returns (of f): the loss, of a `Mean` both sums over all examples, and gradients with the
    structure and dtypes of params, which are summed in float32 or wider. Integer leaves get float0.

    Memory per device: the weights, their gradients, and the stash of min(m·v, 2v·p − 1)
    microbatches, or m·v with gpipe. To run heterogeneous stages as one program, weights take p·v
    times the largest stage on every device (its largest shard, with `param_specs`), and stash and
    activations take the size of the largest.

    Raises, when f is made or traced, with the name of the argument:
      ValueError: the mesh lacks an axis, or does not fit the number of stages; the batch cannot be
        split; m is not a multiple of p although v > 1; a stage changes shape or dtype; the loss is
        not a scalar; or the schedule, stash or grad_reduce is unknown.
      TypeError: an argument is of the wrong kind, or the loss is not real.

    State: none.

    Source: as `plan`. That the phases are scans, with the vjp of each stage taken explicitly, is of
    this library: differentiating through one scan yields only gpipe.
    """
    functions = UserFunctions.from_arguments(stage_fn, loss_fn, embed)
    _check_axes(mesh, axis_name, data_axis)
    pipeline_plan = plan(mesh.shape[axis_name], num_microbatches, virtual_stages, schedule)
    functions.check_number(pipeline_plan, axis_name)
    if stash is None:
        stash = pipeline_plan.default_stash
    checks.choice("stash", stash, _STASHES)
    checks.choice("grad_reduce", grad_reduce, ("mean",))
    if param_specs is not None:
        _check_specs(param_specs, mesh, axis_name)
    policy = StashPolicy(stash, pipeline_plan.splits_backward)
    pipeline = _Pipeline(functions, mesh, axis_name, pipeline_plan, policy, data_axis, param_specs)
    # Once, so that a call outside of a jitted step is compiled too.
    compiled = jax.jit(pipeline.value_and_grad)

    def value_and_grad(
        params: Params, inputs: PyTree, targets: PyTree = _WITH_INPUTS, *, rng: Key = None
    ) -> tuple[jax.Array, Updates]:
        """Return the loss and the gradients of the batch, as `pipeline_value_and_grad` describes
        them."""
        if targets is _WITH_INPUTS:
            if not isinstance(inputs, list | tuple) or len(inputs) != 2:
                raise TypeError(
                    "targets are missing: pass inputs and targets as two arguments, or as a pair "
                    f"(inputs, targets); got a single argument of type {type(inputs).__name__}"
                )
            inputs, targets = inputs
        return compiled(params, inputs, targets, rng)

    return value_and_grad


def _check_axes(mesh: Mesh, axis_name: str, data_axis: str | None) -> None:
    """Raise a TypeError unless `mesh` is a mesh, and a ValueError unless `axis_name` and
    `data_axis`, which may be None, are two different axes of it."""
    checks.instance("mesh", mesh, Mesh, "a jax.sharding.Mesh")
    for argument, name in (("axis_name", axis_name), ("data_axis", data_axis)):
        if name not in mesh.axis_names and not (argument == "data_axis" and name is None):
            names = tree.list_names(mesh.axis_names)
            raise ValueError(
                f"{argument} must be an axis of the mesh, which has {names}; got {name!r}"
            )
    if axis_name == data_axis:
        raise ValueError(f"data_axis and axis_name must be different axes; both are {axis_name!r}")


def _check_specs(specs: PyTree, mesh: Mesh, axis_name: str) -> None:
    """Raise a TypeError unless `param_specs` has only PartitionSpecs, and a ValueError unless these
    are over axes of the mesh besides the stage axis."""
    for path, spec in tree.arrays_with_paths(specs):
        if not is_spec(spec):
            raise TypeError(
                f"param_specs must consist of PartitionSpecs; got {spec!r} of type "
                f"{type(spec).__name__} at {path!r}"
            )
        for name in join_axes(*spec):
            if name not in mesh.axis_names or name == axis_name:
                allowed = tree.list_names([a for a in mesh.axis_names if a != axis_name])
                raise ValueError(
                    f"param_specs: {name!r} at {path!r} must be an axis of the mesh other than "
                    f"the stage axis: {allowed}"
                )


@dataclasses.dataclass(frozen=True)
class _Pipeline:
    """The arguments of `pipeline_value_and_grad`, checked."""

    functions: UserFunctions
    mesh: Mesh
    axis_name: str
    plan: Plan
    stash_policy: StashPolicy
    data_axis: str | None
    param_specs: PyTree

    @property
    def num_workers(self) -> int:
        """The size of the data axis, or 1 without one."""
        return 1 if self.data_axis is None else self.mesh.shape[self.data_axis]

    @property
    def placement(self) -> StackedStages | ListedStages:
        """The placement of params and gradients, stacked for one stage function and in buffers for
        a list of them."""
        form = StackedStages if self.functions.homogeneous else ListedStages
        return form(self.mesh, self.axis_name, self.plan, self.data_axis, self.param_specs)

    def value_and_grad(
        self, params: Params, inputs: PyTree, targets: PyTree, rng: Key
    ) -> tuple[jax.Array, Updates]:
        """Check the arguments, run the pipeline on all devices, and return the loss, or both sums
        of a `Mean`, and the gradients in the structure of `params`."""
        self._check_batch(inputs, targets)
        self._check_bound_axes()
        has_shared = isinstance(params, PipelineParams)
        stages, shared = params if has_shared else (params, None)
        stages, marks = unwrap_stacked(stages)
        self.functions.check_keywords(has_shared, rng is not None)
        placement = dataclasses.replace(self.placement, marks=marks)
        weights = Weights(placement.weights(stages), shared)
        arguments = (weights, (self.functions.carry_inputs(inputs, shared, rng), targets), rng)
        specs = (Weights(placement.weight_specs(stages), P()), P(self.data_axis), P())
        out_specs = P(), (placement.gradient_specs(stages), P())
        run_on_device = partial(self._run_on_device, placement.shapes(stages))
        run = shard_map(run_on_device, self.mesh, self.mesh.axis_names, specs, out_specs)
        arguments = placement.reshard_explicit_axes(arguments, specs)
        loss, (stage_gradients, shared_gradients) = run(*arguments)
        grads = wrap_stacked(placement.gradients(stages, stage_gradients), marks)
        if has_shared:
            grads = PipelineParams(grads, leafwise.build_gradients(shared, shared_gradients))
        return loss, grads

    def _run_on_device(
        self, shapes: Params, weights: Weights, batch: Batch, rng: Key
    ) -> tuple[PyTree, tuple[Leaves, Leaves]]:
        """Run the pipeline on this device, and return the gradients and the loss, averaged over the
        batch, or for a `Mean` both of its sums over the batch.

        `shapes` are the shapes of the params, or of this device's shards of them.
        """
        m = self.plan.num_microbatches

        def split(x: jax.Array) -> jax.Array:
            return x.reshape(m, x.shape[0] // m, *x.shape[1:])

        worker = 0 if self.data_axis is None else lax.axis_index(self.data_axis)
        inputs, targets = jax.tree.map(split, batch)
        microbatches = Microbatches(inputs, targets, worker * m, rng)
        # shard_map leaves an axis of length 1 in the place of p.
        local = jax.tree.map(lambda x: x[:, 0], weights.stage)
        weights = weights._replace(stage=self.placement.gather_along_data(local))
        # One chunk, to trace with: all chunks have the same shapes.
        example = weights._replace(stage=jax.tree.map(lambda x: x[0], weights.stage))
        model = self._make_model(shapes, example, make_work_item(microbatches, 0, 0))
        engine = Engine(self.plan, model, self.axis_name, weights, microbatches)
        loss, gradients = self._average_over_batch(*engine.run(), weights)
        # The engine adds losses in float32 or wider.
        return jax.tree.map(lambda x, like: x.astype(like.dtype), loss, model.loss), gradients

    def _make_model(self, shapes: Params, weights: Weights, item: WorkItem) -> Model:
        """Return the homogeneous model of a single stage function, or the heterogeneous one of a
        list, traced with the examples `weights` and `item`."""
        functions, policy = self.functions.bind_keywords(), self.stash_policy
        if self.functions.homogeneous:
            num_stages = self.plan.num_stages * self.plan.virtual_stages
            return make_homogeneous_model(functions, policy, num_stages, weights, item)
        return make_heterogeneous_model(functions, policy, shapes, weights, item)

    def _average_over_batch(
        self, loss: PyTree, gradient: Gradient, weights: Weights
    ) -> tuple[PyTree, tuple[Leaves, Leaves]]:
        """Reduce this device's sums over stages, data workers and microbatches to means over the
        batch, or for a `Mean` to both sums and the gradient of their quotient."""
        # Only the last stage has a loss, and each stage a term of the shared gradient.
        loss, shared = lax.psum((loss, gradient.shared), self.axis_name)
        gradient = gradient._replace(shared=shared)
        if self.data_axis is not None:
            loss, shared = lax.pmean((loss, gradient.shared), self.data_axis)
            stage = self.placement.average_over_data(weights.stage, gradient.stage)
            gradient = Gradient(stage, shared)
        divisor: Any = self.plan.num_microbatches
        if is_mean(loss):
            # `loss` has the means of both sums over the data workers, as the gradient is one.
            divisor = nonzero(loss.weight)

        def divide(sums: Leaves, of: Params) -> Leaves:
            pairs = zip(sums, select_inexact_leaves(of), strict=True)
            return [(g / numerics.scalar(divisor, g)).astype(w.dtype) for g, w in pairs]

        stage, shared = map(divide, gradient, weights)
        if is_mean(loss):
            loss = jax.tree.map(lambda x: x * self.num_workers, loss)
        else:
            loss = loss / divisor
        # The axis p again, for the out_specs.
        return loss, ([g[:, None] for g in stage], shared)

    def _check_bound_axes(self) -> None:
        """Raise a ValueError if an enclosing training step has bound `data_axis` or an axis of
        `param_specs`."""
        bound = manual_axes()
        if self.data_axis in bound:
            raise ValueError(
                f"data_axis={self.data_axis!r}: the training step already splits the batch over "
                "this axis and takes the mean. Make the pipeline without data_axis"
            )
        specs = jax.tree.leaves(self.param_specs, is_leaf=is_spec)
        divided = [a for spec in specs for a in join_axes(*spec) if a in bound]
        if divided:
            raise ValueError(
                f"param_specs: the training step splits the batch over {divided[0]!r}, and gathers "
                "params that are divided over it. Pass their PartitionSpecs to the step instead, "
                "shard={...}"
            )

    def _check_batch(self, inputs: PyTree, targets: PyTree) -> None:
        """Raise a ValueError unless there are inputs, and all arrays have one leading axis whose
        size is a positive multiple of m times the data workers."""
        named = [("inputs", x) for x in jax.tree.leaves(inputs)]
        named += [("targets", x) for x in jax.tree.leaves(targets)]
        if not jax.tree.leaves(inputs):
            raise ValueError("inputs must contain at least one array")
        size = jnp.shape(named[0][1])[:1]
        for name, x in named:
            if jnp.shape(x)[:1] != size or not size:
                raise ValueError(
                    f"{name}: every array must have the batch as its leading axis; got shape "
                    f"{jnp.shape(x)}, but the first array has {jnp.shape(named[0][1])}"
                )
        m = self.plan.num_microbatches
        if size[0] % (m * self.num_workers) or not size[0]:
            workers = f" on {self.num_workers} data workers" if self.data_axis is not None else ""
            raise ValueError(
                f"inputs: a batch of {size[0]} cannot be split into num_microbatches={m}{workers}"
            )
