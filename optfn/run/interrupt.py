"""Signals that end a run after the current step."""

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType
from typing import Any

import jax
from jax.experimental import multihost_utils


class Interrupt:
    """The signal that ends a run, if one came."""

    def __init__(self, is_shared: bool) -> None:
        self.name = ""
        self.of_all_processes = is_shared and bool(
            jax.config.values["jax_enable_preemption_service"]
        )

    def is_due(self, call: int) -> bool:
        """Tell whether a signal ends the run after this call, with the same answer in all processes
        where JAX's preemption service tells them of it. All must call it."""
        if self.of_all_processes:
            if not multihost_utils.reached_preemption_sync_point(call):
                return False
            self.name = self.name or "SIGTERM"
        return bool(self.name)


@contextlib.contextmanager
def catch_signals(is_shared: bool) -> Iterator[Interrupt]:
    """Set handlers that record the first SIGINT or SIGTERM in the object that is yielded, and reset
    them after that signal and at the end. The next signal acts as usual.

    Signals that the program handles itself are left to it. In a run of several processes, JAX takes
    SIGTERM as a notice of preemption, and the processes agree on the step to stop after; SIGINT is
    turned into such a notice.

    Args:
      is_shared: whether the run is one of several processes.
    """
    interrupt = Interrupt(is_shared)
    usual: dict[signal.Signals, Any] = {
        signal.SIGINT: signal.default_int_handler,
        signal.SIGTERM: signal.SIG_DFL,
    }
    ours = [s for s, handler in usual.items() if signal.getsignal(s) == handler]
    if threading.current_thread() is not threading.main_thread():  # only the main one may set them
        ours = []
    elif interrupt.of_all_processes:
        ours = [signal.SIGINT] if len(ours) == 2 else []
    elif jax.process_count() > 1:
        # Alone, a process would stop, and the rest would wait for it in their next collective.
        ours = []

    def catch(number: int, frame: FrameType | None) -> None:
        interrupt.name = signal.Signals(number).name
        release()
        if interrupt.of_all_processes:
            signal.raise_signal(signal.SIGTERM)

    def release() -> None:
        for s in ours:
            signal.signal(s, usual[s])

    for s in ours:
        signal.signal(s, catch)
    try:
        yield interrupt
    finally:
        release()
