"""How often XLA compiles, by the events of `jax.monitoring`.

An entry of a cache of JAX is not a compilation: equal placements may have an entry each.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator
from weakref import WeakKeyDictionary

import jax.monitoring

from optfn.train.step import TrainStep

# The functions that XLA has compiled so far, by name, in order.
_compiled: list[str] = []
# How often each step has been compiled in its calls.
_of_step: WeakKeyDictionary[TrainStep, int] = WeakKeyDictionary()


def _note(event: str, duration: float, fun_name: str = "", **_: object) -> None:
    if event == "/jax/core/compile/backend_compile_duration":
        _compiled.append(fun_name)


@contextlib.contextmanager
def programs(function: Callable) -> Iterator[list[str]]:
    """Give a list to which the name of a function is added each time that it is compiled."""
    found, before = [], len(_compiled)
    try:
        yield found
    finally:
        name = f"jit({function.__name__})"
        found += [compiled for compiled in _compiled[before:] if compiled == name]


class Count:
    """The number of programs that XLA has compiled since the count was made."""

    def __init__(self) -> None:
        self._before = len(_compiled)
        self._after: int | None = None

    @property
    def value(self) -> int:
        return (len(_compiled) if self._after is None else self._after) - self._before

    def end(self) -> None:
        self._after = len(_compiled)


@contextlib.contextmanager
def count_compilations() -> Iterator[Count]:
    """Give the count of all programs that XLA compiles within the block."""
    count = Count()
    try:
        yield count
    finally:
        count.end()


def compilations(step: TrainStep) -> int:
    """Return how often a step has been compiled by its calls."""
    return _of_step.get(step, 0)


def _counting(call: Callable) -> Callable:
    @functools.wraps(call)
    def counted(step, *arguments):
        with programs(step.compiled) as found:
            result = call(step, *arguments)
        _of_step[step] = compilations(step) + len(found)
        return result

    return counted


jax.monitoring.register_event_duration_secs_listener(_note)
TrainStep.dispatch = _counting(TrainStep.dispatch)
