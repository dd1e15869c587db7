"""How many programs XLA compiles within a block, counted by JAX itself.

Entries of a cache are no compilations: a program with the same types can be compiled again, for
arrays that are committed to a device.
"""

import contextlib
from collections.abc import Iterator

import jax

_EVENT = "/jax/core/compile/backend_compile_duration"


class Count:
    """The number of compilations so far."""

    def __init__(self) -> None:
        self.value = 0
        self.is_open = True

    def add(self, event: str, seconds: float, **about: object) -> None:
        """Count an event, while the block runs."""
        self.value += self.is_open and event == _EVENT


@contextlib.contextmanager
def count_compilations() -> Iterator[Count]:
    """Yield a count of the programs that XLA compiles within the block."""
    count = Count()
    jax.monitoring.register_event_duration_secs_listener(count.add)
    try:
        yield count
    finally:
        # JAX has no public way to take a listener away.
        count.is_open = False
