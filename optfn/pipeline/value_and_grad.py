"""Loss and gradients of a model whose stages lie on different devices.

A function that is to `jax.value_and_grad` what a pipeline is to one device: the same values, so any
optimizer takes them. What runs is `engine`, by the schedule of `plan`.
"""

import dataclasses
import inspect
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from optfn.autodiff.pullback import inexact_leaves
from optfn.leaves import tree
from optfn.pipeline.engine import Batch, Engine, at_microbatch
from optfn.pipeline.layout import Layout
from optfn.pipeline.model import At, Gradient, Kept, Model, Weights, alike, unlike
from optfn.pipeline.plan import Plan, plan
from optfn.pipeline.stacking import PipelineParams

_STASHES = ("input", "residual")
_REDUCTIONS = ("mean", None)
_PAIRED = object()  # the targets come with the inputs


def pipeline_value_and_grad(
    stage_fn: Callable[..., Any] | Sequence[Callable[..., Any]],
    loss_fn: Callable[..., Any],
    *,
    mesh: Mesh,
    num_microbatches: int,
    axis_name: str = "stage",
    schedule: str = "1f1b",
    virtual_stages: int = 1,
    stash: str | None = None,
    data_axis: str | None = None,
    grad_reduce: str | None = "mean",
) -> Callable[..., tuple[jax.Array, Any]]:
    """Return a function that gives the loss and gradients of a pipelined model.

        f(params, inputs, targets, *, rng=None) -> (loss, grads)
        f(params, (inputs, targets), *, rng=None), as `make_train_step` calls its value_and_grad

    They are those of the whole model in one place: y = inputs; y = stage_fn(params[s], y) for each
    stage s; loss_fn(y, targets).

    The batch is split into m microbatches. In lock step, each of the p devices along the stage axis
      1. runs its stage on what came from the device before, and keeps what its backward needs;
      2. runs the backward of its stage on the cotangent that came from the device after, or in the
         last stage on that of the loss, and adds up the gradients;
      3. passes both results on.
    The schedule says when. "gpipe" does all forwards, then all backwards. "1f1b" begins each
    backward as soon as it can be: p − 1 ticks of forwards, m of one forward and one backward each,
    p − 1 of backwards; the idle time is the same, and the memory does not grow with m. "zb" is
    1f1b with the gradient of the weights put off to where a device would wait, which leaves 2/3 of
    the idle time. `plan` has the numbers.

    Args:
      stage_fn: (params, x) -> x, the same shapes and dtypes out as in; x is a tree of arrays with
        the examples of a microbatch along the leading axis. Or a list of p·v such functions in the
        model's order, in which each takes what the one before returns: embedding, blocks of
        different widths, head. A function with a parameter `shared` or `rng` gets these as
        keywords (below).
      loss_fn: (outputs, targets) -> a real scalar, the mean over the examples that it is given; it
        may have a parameter `shared`.
      mesh: the devices. Axes other than the two below repeat the work.
      num_microbatches: m ≥ 1, per data worker; it may be less than p.
      axis_name: the mesh axis along which the stages lie; p is its size.
      schedule: "1f1b", "gpipe" or "zb".
      virtual_stages: v, the number of chunks that each device has of the model, stage r·p + d being
        chunk r of device d (interleaved); the idle time becomes v times shorter, m must be a
        multiple of p.
      stash: what is kept of a microbatch until its backward: "input", the input of the stage, which
        is then run again; or "residual", everything that the backward reads and that depends on the
        input. None is "input" for 1f1b, and "residual" for gpipe and zb.
      data_axis: the mesh axis over which the batch is split, if any.
      grad_reduce: "mean" averages the gradients over the data axis; None leaves each worker's own,
        with the workers as a new leading axis, sharded over `data_axis`: for an optimizer that
        does its own communication. The loss is the mean in both cases.

    The arguments of f:
      params: what `stack_stages` gives, leaves (p·v, …) or (v, p, …); for a list of functions the
        list of their params; or `PipelineParams(stages, shared)`, for weights that several stages
        and the loss have in common.
      inputs: a tree of arrays (batch, …), the whole batch; m times the number of data workers must
        divide it.
      targets: as `inputs`.
      rng: a random key, for dropout. A stage function gets
        fold_in(fold_in(rng, microbatch), stage), with the microbatch counted in the order of the
        whole batch, over all data workers.

    Returns (of f): the loss, and gradients in the structure and dtypes of params; they are summed
    in float32 or wider. Integer leaves get float0.

    Memory per device: the weights, their gradients, and the stash: min(m·v, 2v·p − 1) microbatches,
    with gpipe m·v of them. A list of functions takes p·v times its largest member, for weights,
    stash and what is passed on: the price of running unlike stages as one program.

    Raises, when it is made or when it is traced, naming the argument:
      ValueError: an axis that the mesh has not, a number of stages that does not fit it, a batch
        that cannot be split, m that p does not divide where v > 1, a stage that changes shape or
        dtype, a loss that is not a scalar, an unknown schedule, stash or grad_reduce.
      TypeError: arguments of the wrong kind, a loss that is not real.

    Source: as `plan`. The phases as three scans, with the vjp of each stage taken explicitly, are
    this library's: differentiating through one scan gives gpipe only.
    """
    stage_fns, alike_stages = _stage_functions(stage_fn)
    if not callable(loss_fn):
        raise TypeError(f"loss_fn must be a function (outputs, targets) -> loss; got {loss_fn!r}")
    _check_axes(mesh, axis_name, data_axis)
    timetable = plan(mesh.shape[axis_name], num_microbatches, virtual_stages, schedule)
    if not alike_stages and len(stage_fns) != timetable.num_stages * virtual_stages:
        raise ValueError(
            f"stage_fn: {len(stage_fns)} functions for {timetable.num_stages} devices along "
            f"{axis_name!r} with virtual_stages={virtual_stages}; "
            f"{timetable.num_stages * virtual_stages} are needed"
        )
    if stash is None:
        stash = "input" if schedule == "1f1b" else "residual"
    _check_choice("stash", stash, _STASHES)
    _check_choice("grad_reduce", grad_reduce, _REDUCTIONS)

    pipeline = _Pipeline(
        stage_fns,
        alike_stages,
        loss_fn,
        mesh,
        axis_name,
        timetable,
        Kept(stash, timetable.splits),
        data_axis,
        grad_reduce,
    )
    compiled = jax.jit(pipeline.value_and_grad)

    def value_and_grad(
        params: Any, inputs: Any, targets: Any = _PAIRED, *, rng: Any = None
    ) -> tuple[jax.Array, Any]:
        """Return the loss and the gradients of the batch; see `pipeline_value_and_grad`."""
        if targets is _PAIRED:
            if not isinstance(inputs, list | tuple) or len(inputs) != 2:
                raise TypeError(
                    "targets are missing: the batch must be two arguments, inputs and targets, or "
                    f"the pair (inputs, targets); got {type(inputs).__name__} alone"
                )
            inputs, targets = inputs
        return compiled(params, inputs, targets, rng)

    return value_and_grad


def _stage_functions(stage_fn: Any) -> tuple[tuple[Callable[..., Any], ...], bool]:
    """Return the stage functions, and whether one stands for all."""
    if callable(stage_fn):
        return (stage_fn,), True
    if isinstance(stage_fn, list | tuple) and stage_fn and all(map(callable, stage_fn)):
        return tuple(stage_fn), False
    raise TypeError(
        f"stage_fn must be a function (params, x) -> x or a list of them; got {stage_fn!r}"
    )


def _check_choice(name: str, value: Any, allowed: tuple[Any, ...]) -> None:
    if value not in allowed:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, allowed))}; got {value!r}")


def _check_axes(mesh: Any, axis_name: Any, data_axis: Any) -> None:
    if not isinstance(mesh, Mesh):
        raise TypeError(f"mesh must be a jax.sharding.Mesh; got {mesh!r}")
    for argument, name in (("axis_name", axis_name), ("data_axis", data_axis)):
        if name not in mesh.axis_names and not (argument == "data_axis" and name is None):
            axes = tree.listed(mesh.axis_names)
            raise ValueError(
                f"{argument} must be an axis of the mesh, which has {axes}; got {name!r}"
            )
    if axis_name == data_axis:
        raise ValueError(f"data_axis must be another axis than axis_name; both are {axis_name!r}")


@dataclasses.dataclass(frozen=True)
class _Pipeline:
    """The arguments of `pipeline_value_and_grad`, checked."""

    stage_fns: tuple[Callable[..., Any], ...]
    alike: bool
    loss_fn: Callable[..., Any]
    mesh: Mesh
    axis_name: str
    plan: Plan
    kept: Kept
    data_axis: str | None
    grad_reduce: str | None

    @property
    def workers(self) -> int:
        """The size of the data axis."""
        return 1 if self.data_axis is None else self.mesh.shape[self.data_axis]

    @property
    def _layout(self) -> Layout:
        apart = self.data_axis if self.grad_reduce is None else None
        return Layout(self.mesh, self.axis_name, self.plan, apart)

    def value_and_grad(
        self, params: Any, inputs: Any, targets: Any, rng: Any
    ) -> tuple[jax.Array, Any]:
        """Return the loss and the gradients, like `params`."""
        self._check_batch(inputs, targets)
        tied = isinstance(params, PipelineParams)
        stages, shared = params if tied else (params, None)
        self._check_keywords(tied, rng is not None)
        layout = self._layout
        own = layout.fold(stages) if self.alike else layout.pack(stages)
        # Shapes alone: how the arrays are sharded outside means nothing inside of shard_map.
        shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), stages)
        by_worker = P(self.data_axis)
        given = (own, shared, inputs, targets, rng)
        specs = (P(None, self.axis_name), P(), by_worker, by_worker, P())
        lead = layout.lead
        run = jax.shard_map(
            partial(self._on_device, shapes),
            mesh=self.mesh,
            in_specs=specs,
            out_specs=(P(), (P(*lead, None, self.axis_name), P(*lead))),
            # Stage functions need not say what varies; `_reduced` sums what has to be summed.
            check_vma=False,
        )
        loss, (own_gradient, shared_gradient) = run(*map(layout.place, given, specs))
        grads = (layout.unfold if self.alike else layout.unpack)(stages, own_gradient)
        if tied:
            grads = PipelineParams(grads, layout.like(shared, shared_gradient))
        return loss, grads

    def _on_device(
        self, shapes: Any, own: Any, shared: Any, inputs: Any, targets: Any, rng: Any
    ) -> tuple[jax.Array, Any]:
        """Run the pipeline; `shapes` are those of unlike stages' params."""
        m = self.plan.num_microbatches

        def split(x: jax.Array) -> jax.Array:
            return x.reshape(m, x.shape[0] // m, *x.shape[1:])

        worker = 0 if self.data_axis is None else lax.axis_index(self.data_axis)
        batch = Batch(jax.tree.map(split, inputs), jax.tree.map(split, targets), worker * m, rng)
        weights = Weights(jax.tree.map(lambda x: x[:, 0], own), shared)
        example = Weights(jax.tree.map(lambda x: x[0], weights.own), shared)
        model = self._model(shapes, example, at_microbatch(batch, 0, 0))
        loss, gradient = Engine(self.plan, model, self.axis_name, weights, batch).run()
        loss, gradients = self._reduced(loss, gradient, weights)
        return loss.astype(model.loss), gradients

    def _model(self, shapes: Any, weights: Weights, at: At) -> Model:
        stages = self.plan.num_stages * self.plan.virtual_stages
        fns = [partial(_call_stage, fn, _keywords(fn)) for fn in self.stage_fns]
        loss_fn = partial(_call_loss, self.loss_fn, _keywords(self.loss_fn))
        if self.alike:
            return alike(fns[0], loss_fn, self.kept, stages, weights, at)
        return unlike(fns, loss_fn, self.kept, shapes, weights, at)

    def _reduced(
        self, loss: jax.Array, gradient: Gradient, weights: Weights
    ) -> tuple[jax.Array, Any]:
        """Return means over the batch from this device's sums: the only reductions there are."""
        loss, shared = lax.psum((loss, gradient.shared), self.axis_name)
        gradient = gradient._replace(shared=shared)
        if self.data_axis is not None:
            loss = lax.pmean(loss, self.data_axis)
            if self.grad_reduce == "mean":
                gradient = lax.pmean(gradient, self.data_axis)
        m = self.plan.num_microbatches
        own, shared = (
            [(g / m).astype(w.dtype) for g, w in zip(grads, inexact_leaves(of), strict=True)]
            for grads, of in zip(gradient, weights, strict=True)
        )
        own = [g[:, None] for g in own]
        if self._layout.lead:
            own, shared = jax.tree.map(lambda g: g[None], (own, shared))
        return loss / m, (own, shared)

    def _check_batch(self, inputs: Any, targets: Any) -> None:
        named = [("inputs", x) for x in jax.tree.leaves(inputs)]
        named += [("targets", x) for x in jax.tree.leaves(targets)]
        if not jax.tree.leaves(inputs):
            raise ValueError("inputs must hold at least one array")
        size = jnp.shape(named[0][1])[:1]
        for name, x in named:
            if jnp.shape(x)[:1] != size or not size:
                raise ValueError(
                    f"{name}: every array must have the batch as its leading axis; got shape "
                    f"{jnp.shape(x)}, and {jnp.shape(named[0][1])} before"
                )
        m = self.plan.num_microbatches
        if size[0] % (m * self.workers) or not size[0]:
            workers = f" on {self.workers} data workers" if self.data_axis is not None else ""
            raise ValueError(
                f"inputs: a batch of {size[0]} cannot be split into num_microbatches={m}{workers}"
            )

    def _check_keywords(self, shared: bool, rng: bool) -> None:
        for name, given, fns in (
            ("shared", shared, (*self.stage_fns, self.loss_fn)),
            ("rng", rng, self.stage_fns),
        ):
            if given and not any(name in _keywords(fn) for fn in fns):
                raise ValueError(f"{name} was given, but no function has a parameter {name!r}")


def _keywords(fn: Callable[..., Any]) -> frozenset[str]:
    """Return which of `shared` and `rng` a function has as parameters."""
    try:
        parameters = inspect.signature(fn).parameters
    except (TypeError, ValueError):  # a callable without a signature
        return frozenset()
    return frozenset({"shared", "rng"} & set(parameters))


def _call_stage(
    fn: Callable[..., Any], keywords: frozenset[str], weights: Weights, x: Any, key: Any
) -> Any:
    options = {"shared": weights.shared, "rng": key}
    given = {k: v for k, v in options.items() if k in keywords and v is not None}
    return fn(weights.own, x, **given)


def _call_loss(
    fn: Callable[..., Any], keywords: frozenset[str], outputs: Any, targets: Any, shared: Any
) -> jax.Array:
    given = {"shared": shared} if "shared" in keywords and shared is not None else {}
    return fn(outputs, targets, **given)
