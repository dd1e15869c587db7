"""The options of the loop, and their checks."""

import dataclasses
import datetime
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from typing import Any, Literal, TypeAlias

import jax
import numpy as np
import optax

from optfn.core import checks
from optfn.core.types import Batch, LossFn, OptState, Params, PyTree
from optfn.run.log import Logs
from optfn.run.shuffled import Shuffled
from optfn.train.options import StepOptions
from optfn.train.state import TrainState
from optfn.train.step import TrainStep

Bool: TypeAlias = bool | np.bool_ | np.ndarray | jax.Array
# (step, state, metrics) -> True to end the run.
Callback: TypeAlias = Callable[[int, TrainState, dict[str, Any]], Bool | None]

# The value of `evaluate_every` for an evaluation at the end of each epoch.
EPOCH = "epoch"
# `count_tokens`: the weight of the loss.
WEIGHT = "weight"
# The name, in the history, of the reason for the end of the run.
STOPPED = "stopped"

# Words in the names of numbers that are the better, the larger they are.
_RISING = {
    *("accuracy", "acc", "auc", "auroc", "auprc", "f1", "precision", "recall", "iou", "miou"),
    *("dice", "bleu", "rouge", "psnr", "ssim", "reward", "r2", "ndcg", "mrr"),
}


def _count_examples(batch: Batch) -> int | None:
    """Return the length of the leading axes of a batch, from the leaves that have a shape, or None
    if lengths differ or no leaf has a leading axis."""
    shapes: list[tuple[int, ...]] = [getattr(x, "shape", ()) for x in jax.tree.leaves(batch)]
    lengths = {shape[0] for shape in shapes if len(shape)}
    return lengths.pop() if len(lengths) == 1 else None


def _find_sizes(batches: object) -> set[int]:
    """Return the counts of examples in a batch that are known before the first batch is drawn, an
    empty set if none are."""
    if isinstance(batches, Shuffled):
        return batches.sizes
    if isinstance(batches, list | tuple):
        return {n for n in map(_count_examples, batches) if n}
    # A DataLoader of torch over a dataset of known length.
    size, dataset = getattr(batches, "batch_size", None), getattr(batches, "dataset", None)
    if not isinstance(size, int) or not isinstance(dataset, Sized):
        return set()
    last = 0 if getattr(batches, "drop_last", False) else len(dataset) % size
    return {n for n in (min(size, len(dataset)), last) if n}


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoopOptions:
    """The options of the loop, which `fit` and `minimize` take.

    Args:
      steps: the most steps to take, counted from `state`; None: until `batches` ends.
      epochs: how many times to iterate over `batches`, which must then be something like a list or
        a DataLoader; ≥ 1. None: once. With `epochs`, the number of the epoch, from 1, is in the
        history, the log and the progress bar.
      prefetch: 1 to read the next batch, and place it on the devices, as soon as a step has begun;
        0 to read it after the step and its callback. With 1, a run that a callback, `patience` or a
        signal ends has read a batch that it does not use. A checkpoint does not count that batch,
        and an error of `batches` is raised at the step of its batch.
      progress: whether to show a bar with loss, learning rate and examples per second on the
        terminal (by tqdm, if it is installed). Without a terminal, lines `step <n> loss <number>`
        are printed, one for each evaluation among them. You are also told if the run resumes, was
        already finished, or ends early, and why.
      evaluate: a function params -> a number or a dict of numbers; with `model_state` its arguments
        are (params, model_state). It is called every `evaluate_every` steps and at the end.
        `over_batches(fn, batches)` makes one that takes the mean over batches.
      evaluate_average: whether `evaluate` gets the averaged params in place of the params; a text
        names the average, if tx has several (`averaged_params`), and a function of (opt_state,
        params) returns them, such as `optax.contrib.schedule_free_eval_params`. The history, the
        log, `monitor`, `patience` and `keep_best` then judge the average; the state that is
        returned is the whole training state, with both. The model state's floating-point arrays
        are averaged with the same weights: by `minimize`, or by a step with
        `average_model_state=True`. With local steps, the average belongs into `outer`.
      evaluate_every: the number of steps between evaluations, ≥ 1; "epoch" evaluates after each of
        the `epochs`; None evaluates only at the end.
      monitor: if `evaluate` returns a dict, the key of the number that compares evaluations;
        `patience` and `keep_best` then need it.
      mode: "min" if that number should fall, such as a loss; "max" if it should rise, such as an
        accuracy. None: "min", with a warning if `monitor` is the name of a number that should rise.
        Without `mode` you get a warning as well if it rose in all of three or more evaluations.
      patience: end the run when this many evaluations in a row were no better than the best, ≥ 1.
        If you start such a run again from its checkpoint, it takes no further step. An evaluation
        of a state where an earlier run was stopped, between two multiples of
        `evaluate_every` or within an epoch, does not count.
      keep_best: whether to return the state with the best evaluation instead of the last one. It is
        kept as a copy on the devices and, with `checkpoint`, in `checkpoint`/best. A run that
        resumes compares the state kept there, the one that it resumes from, and those that it
        evaluates. If an earlier evaluation was better, but its state was not kept because
        `keep_best` was off, the best of these is returned, and a warning names the better step.
      callback: a function (step, state, metrics), called after each step, with metrics as Python
        numbers. If it returns True, the run ends. It cannot replace the state, so returning one is
        an error. The next step overwrites the state, so copy the arrays that you keep. A callback
        waits for each step, to read the metrics.
      log: where to write the metrics of each step during the run. A path: a file with one JSON
        object per line, which a run that resumes continues, and a new run overwrites; in a run
        of several processes, process 0 writes it. For TensorBoard: the SummaryWriter of
        tensorboardX, torch or flax, or any object with `flush()` and either
        `add_scalar(name, value, step)` or `scalar(name, value, step)`. For Weights & Biases: the
        run of `wandb.init()`, or any object with `log(numbers, step=)`. Or a list of these. About
        every ten seconds, and at the end of a shorter run, it has "examples_per_second" too, the
        mean since the last such number, and on TPUs and H100s "model_flops_utilization"
        (docs/loop.md).
      count_tokens: a function batch -> the number of its tokens, an integer, such as
        `lambda batch: batch["ids"].size`; it gets each batch as `batches` gives it. Or "weight",
        the weight of a loss that is a `Mean`. The log then has "tokens_per_second".
      report: an HTML file with the curves of the run, a table of its numbers, the optimizer's
        state, versions and devices; see `optfn.plot.report`. It is written about once a minute and
        at the end, even if an error ends the run. Needs matplotlib.
      checkpoint: a directory for checkpoints, which are written in the background
        (`save_checkpoint`). If it has one already, the run resumes from it, with results that are
        bit-identical to the results of a run that was never stopped. Pass the same batches: the
        used ones are skipped. They are not even read if the iterator of `batches` has `get_state`
        and `set_state`, as iterators of grain do, because the checkpoint has its state. `steps`
        includes the steps made before. The learning rate comes from the checkpoint; if `state` has
        another number, you get a warning. In a run of several processes each writes its files, so
        on a disk that they share, pass `f"{directory}/{jax.process_index()}"`; a directory that
        serves several of them is an error. If state is divided over processes and orbax is
        installed, all name one directory.
      save_every: the number of steps between checkpoints, ≥ 1, or the time between them, such as
        `datetime.timedelta(minutes=10)`. The last step is saved as well.
      keep: how many checkpoints to keep in the directory, ≥ 1; older ones are removed. One whose
        params or loss are not finite does not count (`save_checkpoint`).
      save_frozen: whether checkpoints have the params that are not trained
        (`ParamAttr(trainable=False)`). False: they have checksums in their place. A run that
        resumes takes these params from `params` or `state`, and names those that differ in an
        error.
      resume: whether the run may resume. If False, checkpoints in the directory are an error.
      on_nonfinite: the consequence of a loss that is NaN or infinite. "warn": you get one warning,
        with the first such step and remedies. "stop": the run ends with a FloatingPointError,
        which says the same, once the log is written. The loop finds such a loss when it reads
        losses, for the bar, the log, a callback, a save, or the history. If tx leaves steps out
        whose gradients are not finite (`skip_nonfinite`, `dynamic_loss_scale`), neither happens.
    """

    steps: int | None = None
    epochs: int | None = None
    prefetch: Literal[0, 1] = 1
    progress: bool = True
    evaluate: Callable[..., Any] | None = None
    evaluate_average: bool | str | Callable[[OptState, Params], Params] = False
    evaluate_every: int | Literal["epoch"] | None = None
    monitor: str | None = None
    mode: Literal["min", "max"] | None = None
    patience: int | None = None
    keep_best: bool = False
    callback: Callback | None = None
    log: Logs = None
    count_tokens: Callable[[Batch], int] | str | None = None
    report: str | os.PathLike[str] | None = None
    checkpoint: str | os.PathLike[str] | None = None
    save_every: int | datetime.timedelta = 100
    keep: int = 2
    save_frozen: bool = True
    resume: bool = True
    on_nonfinite: Literal["warn", "stop"] = "warn"


@dataclasses.dataclass(frozen=True)
class FitArguments(LoopOptions):
    """The arguments of `fit`, checked."""

    step: TrainStep
    state: TrainState
    batches: Iterable[Batch]

    def __post_init__(self) -> None:
        checks.instance("step", self.step, TrainStep, "a TrainStep, as make_train_step returns it")
        for name in ("progress", "keep_best", "save_frozen", "resume"):
            checks.flag(name, getattr(self, name))
        if not isinstance(self.save_every, datetime.timedelta):
            checks.count("save_every", self.save_every)
        elif self.save_every <= datetime.timedelta():
            raise ValueError(f"save_every must be longer than 0; got {self.save_every}")
        checks.count("keep", self.keep)
        checks.choice("prefetch", self.prefetch, (0, 1))
        checks.choice("on_nonfinite", self.on_nonfinite, ("warn", "stop"))
        for name in ("steps", "epochs", "patience"):
            if getattr(self, name) is not None:
                checks.count(name, getattr(self, name))
        if self.callback is not None:
            checks.check_signature("callback", self.callback, ("step", "state", "metrics"))
        if self.count_tokens is not None:
            if self.count_tokens != WEIGHT:
                checks.check_signature("count_tokens", self.count_tokens, ("batch",))
            if self.log is None:
                raise ValueError("count_tokens needs log, which has the tokens per second")
        self._check_evaluation()

    def _check_evaluation(self) -> None:
        """Raise an error for an option of evaluations that is wrong, or useless without `evaluate`,
        and warn if `monitor` should rise and `mode` is not given."""
        if self.mode is not None:
            checks.choice("mode", self.mode, ("min", "max"))
        words = set(re.split(r"[^a-z0-9]+", str(self.monitor).lower()))
        if self.mode is None and words & _RISING:
            checks.warn(
                f"monitor={self.monitor!r} looks like a number that should rise, but without mode= "
                'the smallest evaluation is the best: pass mode="max", or mode="min" if that is '
                "right"
            )
        checks.instance("evaluate", self.evaluate, Callable | None, "a function of params")
        average = self.evaluate_average
        if not (isinstance(average, bool | str) or callable(average)) or average == "":
            raise TypeError(
                "evaluate_average must be True, False, or the name of an average, or a function of "
                f"(opt_state, params); got {checks.show(average)}"
            )
        if self.evaluate_every == EPOCH:
            if self.epochs is None:
                raise ValueError(
                    'evaluate_every="epoch" needs epochs=, the number of passes over batches'
                )
        elif self.evaluate_every is not None:
            checks.count("evaluate_every", self.evaluate_every)
        # Without evaluations these options would have no effect.
        for name in ("evaluate_average", "evaluate_every", "patience", "keep_best"):
            if getattr(self, name) not in (None, False) and self.evaluate is None:
                raise ValueError(f"{name} needs evaluate, a function of params")

    def check_batches(self) -> None:
        """Raise a TypeError unless `batches` is an iterable of batches, and a ValueError unless
        `epochs`, `local_steps` and the workers can take them.

        With `epochs` it must be possible to iterate again. Rounds of `local_steps` must divide
        `steps`, and workers the batches whose sizes are known.
        """
        batches, local_steps = self.batches, self.step.local_steps
        if self.steps is not None and self.steps % local_steps:
            raise ValueError(
                f"steps must be a multiple of local_steps, {local_steps}, because a run can stop "
                f"only between rounds; got {self.steps}"
            )
        if not isinstance(batches, Iterable) and not hasattr(batches, "__getitem__"):
            hint = ": call it, to pass its result" if callable(batches) else ""
            raise TypeError(f"batches must be an iterable; got {checks.show(batches)}{hint}")
        if isinstance(batches, Mapping):
            raise TypeError(
                f"batches must be an iterable of batches; got {checks.show(batches)}, which is "
                "one batch: put it into a list"
            )
        if self.epochs is not None and isinstance(batches, Iterator):
            raise ValueError(
                f"epochs={self.epochs} needs batches that can be iterated again, such as a list or "
                f"a DataLoader; got {checks.show(batches)}, which ends after one pass"
            )
        self.step.check_batch_sizes(_find_sizes(batches))


@dataclasses.dataclass(frozen=True)
class MinimizeArguments(LoopOptions, StepOptions):
    """The arguments of `minimize`, which `make_train_step` and `fit` check."""

    loss_fn: LossFn | None
    tx: optax.GradientTransformation
    params: Params
    batches: Iterable[Batch]
    _: dataclasses.KW_ONLY
    model_state: PyTree = None

    def of(self, options: type[StepOptions | LoopOptions]) -> dict[str, Any]:
        """Return the values of the fields of `options`, StepOptions or LoopOptions, by name."""
        return {f.name: getattr(self, f.name) for f in dataclasses.fields(options)}
