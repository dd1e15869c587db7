"""Context variables that hold a value while a block runs."""

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar

from optfn.core.checks import T


@contextlib.contextmanager
def hold(variable: ContextVar[T], value: T) -> Iterator[None]:
    """Let a variable hold a value within a `with` block, and the value before it afterwards."""
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)
