"""Evaluations of a run: when they are due, which one is the best, and means over batches."""

import functools
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeAlias

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from optfn.checkpoint.state_dict import averaged_model_state, averaged_params
from optfn.core import checks
from optfn.core.types import Batch, Leaf, OptState, Params, PyTree
from optfn.leaves.packed import unpack
from optfn.loss.mean import check_mean, is_mean
from optfn.mesh.state.names import iterate_nodes
from optfn.run.history import History
from optfn.run.options import EPOCH, FitArguments, LoopOptions
from optfn.run.position import Saved
from optfn.run.progress import count_examples
from optfn.tables.sharded_table import to_logical
from optfn.train.numeric_batch import convert_batch
from optfn.train.state import TrainState
from optfn.transforms.plateau import is_evaluation_plateau, record_evaluation

# Whether averaged params are evaluated, or the name of the average, or a function that reads them.
Average: TypeAlias = bool | str | Callable[[OptState, Params], Params]


class Evaluator:
    """Evaluates a run when it is due, and records the best evaluation.

    options: the arguments of `fit`; `evaluate` gets a model state too, if the state has one.
    history: where results are recorded; it may have those from before a restart.
    monitored: the monitored number of each evaluation, by its step.
    best, best_step: the best of these numbers, and its step.
    provisional: the step of an evaluation that a part of the run made only because it ended there;
      it counts for nothing once the run goes on. None if there is none.
    first: the step that the run began at, and its evaluation, if its state has been evaluated.
    """

    def __init__(self, options: FitArguments, history: History, saved: Saved) -> None:
        self.options, self.history, self.per_call = options, history, options.step.local_steps
        state = options.state
        if options.evaluate is not None:
            has_model_state = state.model_state is not None
            arguments = ["params", "model_state"] if has_model_state else ["params"]
            checks.check_signature("evaluate", options.evaluate, arguments)
        if options.evaluate_average:
            _check_average(state, options.evaluate_average)
        self.has_plateau = _check_plateaus(state.opt_state, options)
        name = "" if options.monitor is None else f"/{options.monitor}"
        self.key = f"evaluation{name}"
        self.sign = -1 if options.mode == "max" else 1
        self.provisional, self.first = saved.provisional, saved.first
        self._read_earlier()

    def _read_earlier(self) -> None:
        """Forget the best evaluation, and record all evaluations of the history again, a
        provisional one without counting it for `patience`."""
        self.monitored: dict[int, float] = {}
        self.best, self.best_step, self.no_better = self.worst, 0, 0
        if self.first is not None:
            self._record(int(self.first[0]), self.first[1], is_extra=True)
        earlier = self.history.earlier
        for n, value in zip(
            earlier.get("evaluation_step", ()), earlier.get(self.key, ()), strict=False
        ):
            self._record(int(n), float(value), is_extra=int(n) == self.provisional)

    def go_on(self) -> bool:
        """Drop the provisional evaluation, which an unbroken run does not make, and tell whether
        there was one."""
        if self.provisional is None:
            return False
        self.history.drop_last_evaluation()
        self.provisional = None
        self._read_earlier()
        return True

    @property
    def worst(self) -> float:
        """The worst value that there is: ∞, or −∞ with `mode="max"`."""
        return self.sign * math.inf

    def is_better(self, value: float, than: float) -> bool:
        """Tell whether one monitored value is better than another, with False if one of them is
        NaN."""
        return self.sign * value < self.sign * than

    def is_due(self, n: int, ends_epoch: Callable[[], bool]) -> bool:
        """Tell whether the call that ended with step n passed a multiple of `evaluate_every`, or
        for "epoch" ended an epoch, with False if evaluations are off."""
        every = self.options.evaluate_every
        if self.options.evaluate is None or every is None:
            return False
        if every == EPOCH:
            return ends_epoch()
        return n // int(every) > (n - self.per_call) // int(every)

    @property
    def gave_up(self) -> bool:
        """Whether the last `patience` evaluations were no better than the best, False without
        `patience`."""
        return self.options.patience is not None and self.no_better >= self.options.patience

    def has_seen(self, n: int) -> bool:
        """Tell whether the state after step n has been evaluated, with True if there is no
        `evaluate`."""
        found = self.history.evaluations
        return self.options.evaluate is None or bool(found and found[-1]["evaluation_step"] == n)

    def __call__(self, n: int, state: TrainState, *, is_provisional: bool) -> dict[str, float]:
        """Call `evaluate` on the state after step n, record the result, and return its values by
        their names in the history. A provisional one does not count for `patience`.

        Raises:
          ValueError: there are several numbers, and `monitor` does not name one of them.
        """
        values = self._numbers(state)
        if self.key in values:
            self._record(n, values[self.key], is_extra=is_provisional)
        # A run that ends evaluates its last state, also between two evaluations that are due.
        self.provisional = n if is_provisional else None
        self.history.evaluations.append({"evaluation_step": n, **values})
        return values

    def tell_plateaus(self, n: int, state: TrainState) -> TrainState:
        """Return the state after step n with its evaluation recorded for the plateaus that watch
        it, or unchanged if there are none."""
        if not self.has_plateau:
            return state
        return state._replace(opt_state=record_evaluation(state.opt_state, self.monitored[n]))

    def has_been_due(self, n: int) -> bool:
        """Tell whether n steps contain a multiple of `evaluate_every`, with False if that is not an
        integer."""
        every = self.options.evaluate_every
        return isinstance(every, int) and n >= every

    def record_first(self, state: TrainState) -> None:
        """Evaluate the state that the run begins with, and compare it with the evaluations so far,
        without an entry in the history. That has evaluations of steps only."""
        self.first = [int(state.step), self._numbers(state)[self.key]]
        self._record(int(state.step), self.first[1], is_extra=True)

    def _numbers(self, state: TrainState) -> dict[str, float]:
        """Call `evaluate` on a state and return the values by their names in the history, or raise
        a ValueError if `monitor` is needed and names none of them.

        Raises:
          ValueError: there are several numbers, and `monitor` does not name one of them.
        """
        assert self.options.evaluate is not None
        model_state = () if state.model_state is None else (self._select_model_state(state),)
        params = _select_params(state, self.options.evaluate_average)
        result = self.options.evaluate(to_logical(unpack(params)), *model_state)
        named = _find_parts("evaluate", result, lambda: 1)
        values = {
            "evaluation" + (f"/{k}" if k else ""): _divide_by_weight(*x) for k, x in named.items()
        }
        if self.key in values:
            return values
        is_needed = _ranks_states(self.options) or self.has_plateau
        if is_needed or self.options.monitor is not None:
            if not isinstance(result, Mapping):
                raise ValueError(
                    f"monitor={self.options.monitor!r} names a number of a dict; evaluate gives "
                    "a number alone: leave monitor out"
                )
            keys = ", ".join(sorted(named))
            raise ValueError(
                f"monitor must name one of the numbers that evaluate returns, {keys}; "
                f"got {self.options.monitor!r}"
            )
        return values

    def _select_model_state(self, state: TrainState) -> PyTree:
        """Return the model state that is evaluated, which is its average if averaged params are
        evaluated, and else the state's model state."""
        average = self.options.evaluate_average
        if not average or callable(average):
            return state.model_state
        name = average if isinstance(average, str) else None
        return averaged_model_state(state.opt_state, state.model_state, name)

    def _record(self, n: int, value: float, *, is_extra: bool = False) -> None:
        """Record the value of step n, as the best if it is better, and else as one without
        improvement, which an extra evaluation does not count as."""
        self.monitored[n] = value
        if not is_extra:
            self.no_better += 1
        if self.is_better(value, self.best):
            self.best, self.best_step, self.no_better = value, n, 0

    def warn_of_mode(self) -> None:
        """Warn if evaluations are compared without a given `mode`, and the monitored value went the
        wrong way in all of three or more of them. A run may overfit from the first step on."""
        values = list(self.monitored.values())
        wrong = all(self.is_better(a, b) for a, b in itertools.pairwise(values))
        is_open = self.options.mode is None and _ranks_states(self.options)
        if is_open and len(values) > 2 and wrong:
            checks.warn(
                f"{self.key} rose from each evaluation to the next, {values[0]:g} to "
                f"{values[-1]:g} in {len(values)}. Without mode= the smallest is the best, here "
                'the first: pass mode="max" if it should rise, or mode="min" if that is right'
            )


def _ranks_states(options: LoopOptions) -> bool:
    """Tell whether the run compares its evaluations, for `patience` or `keep_best`."""
    return options.patience is not None or options.keep_best


def _check_plateaus(opt_state: OptState, options: LoopOptions) -> bool:
    """Tell whether a `reduce_on_plateau` watches the evaluation, and raise a ValueError if there is
    none to watch or the modes differ.

    Raises:
      ValueError: there is no evaluation to watch, or the loop compares evaluations in the opposite
        mode.
    """
    found = [*iterate_nodes(is_evaluation_plateau, opt_state)]
    if not found:
        return False
    if options.evaluate is None or options.evaluate_every is None:
        raise ValueError(
            'reduce_on_plateau(monitor="evaluation") needs evaluate and evaluate_every, for an '
            "evaluation to watch"
        )
    modes = {"min" if x.sign > 0 else "max" for x in found}
    if (options.mode or _ranks_states(options)) and modes != {mode := options.mode or "min"}:
        raise ValueError(
            f"mode is {mode!r} in this run, and {min(modes)!r} in reduce_on_plateau, which watches "
            "the same evaluation; pass the same mode to both"
        )
    return True


def _check_average(state: TrainState, average: Average) -> None:
    """Raise a ValueError unless the optimizer's state has the average that `evaluate` is to get."""
    try:
        jax.eval_shape(functools.partial(_read_average, average=average), state)
    except ValueError as error:
        raise ValueError(f"evaluate_average={average!r}: {error}") from error


def _select_params(state: TrainState, average: Average) -> Params:
    """Return the params that are evaluated: the state's params, or with `average` their average,
    which on a mesh has the shardings of the params.

    Args:
      state: the state that is evaluated.
      average: True, the name of the average, or a function of (opt_state, params); False for the
        params themselves.
    """
    if not average:
        return state.params

    def place(x: jax.Array, param: jax.Array) -> jax.Array:
        # The compiler divides the average as the optimizer's state is divided; `evaluate` may rely
        # on the layout of the params.
        on_mesh = isinstance(param.sharding, NamedSharding)
        return jax.device_put(x, param.sharding) if on_mesh else x

    return jax.tree.map(place, _read_average(state, average), state.params)


def _read_average(state: TrainState, average: Average) -> Params:
    """Return the averaged params of a state, of the average with this name, for True of the only
    one, or from a function, and raise a ValueError without an average."""
    if callable(average):
        return average(state.opt_state, state.params)
    name = average if isinstance(average, str) else None
    return averaged_params(state.opt_state, state.params, name=name)


def _check_number(who: str, key: str, value: Any) -> float:
    """Return as a float the scalar that `who` returned, and raise a TypeError for anything else."""
    is_array = isinstance(value, jax.Array | np.ndarray)
    if not (checks.is_host_number(value) or is_array) or np.shape(value):
        name = f" for {key!r}" if key else ""
        raise TypeError(
            f"{who} must return a number or a dict of numbers; got {checks.show(value)}{name}"
        )
    return float(value)


def over_batches(
    fn: Callable[..., Any], batches: Iterable[Batch]
) -> Callable[..., float | dict[str, float]]:
    """Return a function for the argument `evaluate` of `fit` that compiles `fn`, runs it on each
    batch, and returns its mean over all examples, or by a `Mean`'s weights.

        evaluate(params) = Σ nᵦ·fn(params, b) / Σ nᵦ,  nᵦ the examples of batch b

    The examples of a batch are counted along its leading axis, so a short last batch counts by its
    size. Where `fn` returns an `optfn.Mean`, the result is Σ total / Σ weight, such as the mean
    over the tokens of all batches. `fn` is compiled by `jax.jit`, once for each shape of a batch.
    Params keep their sharding, and packed ones are unpacked for `fn`.

    Args:
      fn: a function (params, batch) -> a mean over the examples of the batch, an `optfn.Mean`, or a
        dict of these; with model state, its arguments are (params, model_state, batch).
      batches: an iterable that can be iterated again, such as a list or a DataLoader.

    Raises:
      TypeError: `batches` is not iterable, or `fn` returns something else than a number or a dict
        of numbers.
      ValueError: `batches` ends after one pass, or is empty; the arrays of a batch do not have
        leading axes of the same length; or `fn` returns different keys for different batches.

    >>> import jax.numpy as jnp, optfn
    >>> evaluate = optfn.over_batches(lambda w, x: jnp.mean(w * x), [jnp.ones(3), jnp.zeros(1)])
    >>> evaluate(jnp.array(2.0))
    1.5
    """
    checks.instance("over_batches: fn", fn, Callable, "a function (params, batch)")
    checks.instance("over_batches: batches", batches, Iterable, "an iterable")
    if isinstance(batches, Iterator):
        raise ValueError(
            "over_batches: each evaluation iterates over batches again, so pass a list or a "
            f"DataLoader; got {checks.show(batches)}, which ends after one pass"
        )
    compiled = jax.jit(fn)

    def evaluate(*arguments: Any) -> float | dict[str, float]:
        names = ("params", "model_state")[: len(arguments)]
        hint = ". It gets no random key: evaluate without dropout, or bind a key of your own"
        checks.check_signature("over_batches: fn", fn, (*names, "batch"), hint=hint)
        arguments, rows = tuple(map(unpack, arguments)), []
        for batch in map(convert_batch, batches):
            # Reading the numbers waits for the device, so that one batch at most is under way. CPU
            # devices need that, since they share their threads; see `TrainStep`.
            result = compiled(*arguments, _place_beside(arguments, batch))
            if isinstance(result, tuple) and not is_mean(result):
                raise TypeError(
                    "over_batches: fn must return a number or a dict of numbers; got a tuple. For "
                    "a loss_fn that returns (loss, aux) or (loss, model_state), pass "
                    "lambda *arguments: loss_fn(*arguments)[0]"
                )
            count = functools.partial(_check_num_examples, batch)
            rows.append(_find_parts("over_batches: fn", result, count))
        return _average_rows(rows)

    return evaluate


def _place_beside(arguments: PyTree, batch: Batch) -> Batch:
    """Copy the arrays of a batch that lie on one device to the mesh of the arguments, as a training
    step takes them, or return the batch unchanged if the arguments lie on one device too."""
    placed = (x.sharding for x in jax.tree.leaves(arguments) if isinstance(x, jax.Array))
    found = (x for x in placed if isinstance(x, NamedSharding) and x.num_devices > 1)
    if (sharding := next(found, None)) is None:
        return batch
    whole = NamedSharding(sharding.mesh, PartitionSpec())

    def place(x: Leaf) -> Leaf:
        is_alone = isinstance(x, jax.Array) and x.sharding.num_devices == 1
        return jax.device_put(x, whole) if is_alone else x

    return jax.tree.map(place, batch)


def _check_num_examples(batch: Batch) -> int:
    """Return the length that the leading axes of a batch have in common, or raise a ValueError if
    they differ."""
    count = count_examples(batch)
    if count is None or not all(map(np.ndim, jax.tree.leaves(batch))):
        shapes = ", ".join(str(np.shape(x)) for x in jax.tree.leaves(batch))
        raise ValueError(
            "over_batches counts the examples of a batch along the leading axis of its arrays, "
            f"which must all have the same length; got shapes {shapes}"
        )
    return count


def _divide_by_weight(total: float, weight: float) -> float:
    """Return total / weight, NaN for 0/0."""
    return total / weight if weight else math.nan


def _find_parts(
    who: str, result: object, count_examples: Callable[[], int]
) -> dict[str, tuple[float, float]]:
    """Return (total, weight) by key for each value that `who` returned, a single value under the
    key "", where the weight of a plain number is the count of examples, or raise a TypeError if one
    is no number."""
    named = result if isinstance(result, Mapping) else {"": result}

    def parts_of(key: str, value: object) -> tuple[float, float]:
        if is_mean(value):
            total, weight = (_check_number(who, key, x) for x in check_mean(who, value))
            return total, weight
        count = count_examples()
        # A mean over no examples is 0/0.
        return (count * _check_number(who, key, value) if count else 0.0), count

    return {str(key): parts_of(str(key), value) for key, value in named.items()}


def _average_rows(rows: list[dict[str, tuple[float, float]]]) -> float | dict[str, float]:
    """Return ∑ total / ∑ weight by key, NaN for 0/0, or the value alone if "" is the only key, and
    raise a ValueError without any batch."""
    if not rows:
        raise ValueError("over_batches: batches has no examples")
    first = rows[0]
    if any(row.keys() != first.keys() for row in rows):
        keys = " and ".join(sorted({str(sorted(row)) for row in rows}))
        raise ValueError(f"over_batches: fn must return the same keys for each batch; got {keys}")
    means = {}
    for key in first:
        means[key] = _divide_by_weight(*map(sum, zip(*(row[key] for row in rows), strict=True)))
    return means[""] if list(means) == [""] else means
