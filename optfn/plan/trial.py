"""One way of a training step: compiled from shapes, then estimated, or measured on devices."""

import dataclasses
import functools
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import jax
import numpy as np
import optax
from jax.sharding import Mesh

from optfn.core import tree
from optfn.core.types import Batch, Leaf, LossFn, Params, PyTree
from optfn.mesh.compilers.chips import find_chip
from optfn.mesh.compilers.memories import is_on_host
from optfn.mesh.layout import processes
from optfn.plan.memory import count_bytes, count_host_bytes, find_host_seconds
from optfn.plan.step_estimate import estimate_step
from optfn.train.state import TrainState
from optfn.train.step import TrainStep, make_train_step

Way: TypeAlias = Mapping[str, Any]  # options of `make_train_step`

NOT_COMPILED = "not compiled: too much is kept"
_OUT_OF_MEMORY = "RESOURCE_EXHAUSTED"


@dataclasses.dataclass(frozen=True)
class Trial:
    """The figures of `tune` for one way of a step, in bytes and seconds of a device.

    way: the options of `make_train_step`.
    batch_size: the number of examples in a batch of all devices.
    kept: bytes of params, state and batch; None if the way failed before they were known.
    temporaries: bytes beside them; None if the way was not compiled.
    fits: whether both fit into the memory; None if the memory, or the sum, is not known.
    compute, exposed: seconds of compute, and of the communication that compute waits for; None
      unless the step was estimated.
    seconds: of a step; None if they are not known.
    spread: the least and the greatest seconds of a step that was measured; None if `seconds` were
      not measured.
    compile_seconds: of the compilation; None without one.
    host_seconds: of moving a state to the device and back, which are in `exposed` and `seconds`; 0
      with the state on the device.
    problem: why a number is missing, or ""; an error begins with its type.
    """

    way: Way
    batch_size: int | None = None
    kept: int | None = None
    temporaries: int | None = None
    fits: bool | None = None
    compute: float | None = None
    exposed: float | None = None
    seconds: float | None = None
    spread: tuple[float, float] | None = None
    compile_seconds: float | None = None
    host_seconds: float = 0.0
    problem: str = ""

    @property
    def is_measured(self) -> bool:
        """Whether `seconds` were measured, and not estimated."""
        return self.spread is not None

    @property
    def is_usable(self) -> bool:
        """Whether the seconds are known, and the way fits, as far as the memory is known."""
        return self.fits is not False and self.seconds is not None

    @property
    def examples_per_second(self) -> float | None:
        """The examples of all devices in a second of steps, or None if their number or the seconds
        are not known."""
        if self.seconds is None or self.batch_size is None:
            return None
        return self.batch_size / self.seconds


@dataclasses.dataclass(frozen=True)
class TuneArguments:
    """The arguments of `tune` that all ways of a step share, checked."""

    loss_fn: LossFn | None
    tx: optax.GradientTransformation
    params: Params
    mesh: Mesh
    options: Mapping[str, Any]
    model_state: PyTree
    memory: float | None
    measure: int | None

    def try_way(self, way: Way, batch: Batch) -> tuple[Trial, Callable[[Trial], Trial]]:
        """Compile a way of the step, and estimate it or measure its first step. An error, or too
        little memory, is the `problem` of the trial that is returned. The processes of a run agree
        on it.

        Returns:
          The trial, and a function that measures one more step for it, or returns it unchanged if
          its seconds are not measured.
        """
        trial, run = Trial(way, batch_size=find_batch_size(batch)), None
        try:
            trial, run = self._compile(trial, batch)
        except Exception as error:  # of any kind: from the user's loss, or the compiler
            trial = _add_problem(trial, error)
        trial, taken = _agree(trial, self.mesh), list[float]()

        def measure(trial: Trial) -> Trial:
            # If one process cannot compile a step, the step would wait for it for ever.
            if run is None or trial.problem or trial.fits is False:
                return trial
            try:
                taken.append(run())
                spread = min(taken), max(taken)
                middle = statistics.median(taken)
                trial = dataclasses.replace(trial, seconds=middle, spread=spread)
            except Exception as error:
                trial = _add_problem(trial, error)
            return _agree(trial, self.mesh)

        return measure(trial), measure

    def _compile(self, trial: Trial, batch: Batch) -> tuple[Trial, Callable[[], float] | None]:
        """Return a trial with its bytes, and if it fits with its estimated seconds, or with a
        function that measures the seconds of a step."""
        options = {"model_state": self.model_state is not None, **self.options, **trial.way}
        step = make_train_step(self.loss_fn, self.tx, mesh=self.mesh, **options)
        state, examples = step.shapes(self.params, batch, self.model_state)
        kept = count_bytes([x for x in jax.tree.leaves((state, examples)) if not is_on_host(x)])
        trial = dataclasses.replace(trial, kept=kept)
        if self.memory is not None and kept > self.memory:
            return dataclasses.replace(trial, fits=False, problem=NOT_COMPILED), None
        lowered = step.lower(self.params, batch, self.model_state)
        start = time.perf_counter()
        compiled = lowered.compile()
        seconds = time.perf_counter() - start
        found: Any = compiled.memory_analysis()
        outputs = found.output_size_in_bytes - found.alias_size_in_bytes
        kept, beside = found.argument_size_in_bytes, found.temp_size_in_bytes + max(0, outputs)
        fits = None if self.memory is None else kept + beside <= self.memory
        trial = dataclasses.replace(
            trial, kept=kept, temporaries=beside, fits=fits, compile_seconds=seconds
        )
        if fits is False:
            return trial, None
        if self.measure is not None:
            return trial, functools.partial(self._measure, step, compiled, batch)
        try:
            estimate = estimate_step(compiled)
        except ValueError as error:
            return dataclasses.replace(trial, problem=f"not estimated: {error}"), None
        link = self._find_host_seconds(step, state, examples)
        if link is None:
            problem = "not estimated: the speed of the link to the host is not known"
            return dataclasses.replace(trial, problem=problem), None
        exposed = sum(estimate.exposed.values()) + link
        estimated = dataclasses.replace(
            trial, compute=estimate.compute, exposed=exposed, seconds=estimate.seconds + link,
            host_seconds=link,
        )  # fmt: skip
        return estimated, None

    def _find_host_seconds(self, step: TrainStep, state: TrainState, batch: Batch) -> float | None:
        """Return the seconds of moving the state of a step to the device and back, 0 if it lies
        there, or None if the speed of the link is not known."""
        if step.options.state_memory is None:
            return 0.0
        program = step.compiled.trace(*step.list_arguments(state, batch)).jaxpr.jaxpr
        assert step.layout is not None
        return find_host_seconds(count_host_bytes(program, state, step.layout)[1], self.mesh)

    def _measure(self, step: TrainStep, compiled: jax.stages.Compiled, batch: Batch) -> float:
        """Run the compiled step twice from new arrays, and return the seconds of the second."""
        params, model_state, batch = jax.tree.map(
            _make_array, (self.params, self.model_state, batch)
        )
        state = step.init(params, *(() if model_state is None else (model_state,)))
        batch = step.place_batch(batch, state)
        state, _ = jax.block_until_ready(compiled(state, batch))
        start = time.perf_counter()
        jax.block_until_ready(compiled(state, batch))
        return time.perf_counter() - start


def find_memory(mesh: Mesh) -> float | None:
    """Return the bytes of memory of a device of a mesh, the least of all processes. The devices say
    it, or else the constants of their kind; None if there are no such constants."""
    here = [x for x in mesh.devices.flat if x in jax.local_devices()]  # a topology has none
    limit = (here[0].memory_stats() or {}).get("bytes_limit", 0) if here else 0
    if processes.is_on_all_processes(mesh):
        limit = int(processes.gather_values([limit >> 20]).min()) << 20
    chip = find_chip(mesh.devices.flat[0].device_kind)
    return float(limit) if limit else None if chip is None else chip.memory


def _agree(trial: Trial, mesh: Mesh) -> Trial:
    """Return a trial as all processes of a mesh know it: with the longest times, and failed if it
    failed in one. On the devices of one process, return it unchanged."""
    if not processes.is_on_all_processes(mesh):
        return trial
    times = [trial.seconds or 0.0, *(trial.spread or (0.0, 0.0))]
    micros = [round(1e6 * x) for x in times]
    found = processes.gather_values([*micros, trial.problem != "", trial.fits is False])
    slowest, least, greatest, failed, full = found.max(axis=0)
    if full:
        trial = dataclasses.replace(trial, fits=False)
    if failed:
        problem = trial.problem or f"failed in process {int(np.argmax(found[:, 3]))}"
        return dataclasses.replace(trial, seconds=None, spread=None, problem=problem)
    spread = (least / 1e6, greatest / 1e6) if greatest else None
    return dataclasses.replace(trial, seconds=slowest / 1e6 if slowest else None, spread=spread)


def _add_problem(trial: Trial, error: Exception) -> Trial:
    """Return a trial with the type and the first 300 characters of an error as its problem, which
    does not fit if memory was lacking."""
    problem = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
    fits = False if _OUT_OF_MEMORY in str(error) else trial.fits
    return dataclasses.replace(trial, fits=fits, problem=problem, seconds=None, spread=None)


def find_batch_size(batch: Batch) -> int | None:
    """Return the length of the first axis of a batch, or None if its arrays have no axes."""
    return next((x.shape[0] for x in jax.tree.leaves(batch) if np.ndim(x)), None)


def _make_array(x: Leaf) -> Leaf:
    """Return an array of a ShapeDtypeStruct: 0.01 for floats, 0 for integers. Arrays are returned
    unchanged. All elements share the memory of one."""
    if not isinstance(x, jax.ShapeDtypeStruct):
        return x
    if tree.is_key(x):
        return jax.random.split(jax.random.key(0), x.shape) if x.shape else jax.random.key(0)
    return np.broadcast_to(np.asarray(0.01 if tree.is_inexact(x) else 0, x.dtype), x.shape)
