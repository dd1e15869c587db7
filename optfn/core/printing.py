"""Calls as text, as `repr` shows them."""

import dataclasses
from typing import Any

import jax

from optfn.core import checks


def call_text(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """Return a call as it might be written, "adam(0.001, eps_hat=False)", with functions by their
    names and traced arrays by their shapes."""

    def text(x: Any) -> str:
        if callable(x) and hasattr(x, "__qualname__"):
            return str(x.__qualname__)
        is_tracer = isinstance(x, jax.Array) and checks.is_traced(x)
        return f"<traced {x.aval.str_short()}>" if is_tracer else repr(x)

    shown = [*map(text, args), *(f"{k}={text(v)}" for k, v in kwargs.items())]
    return f"{name}({', '.join(shown)})"


def list_changed_fields(x: Any) -> list[str]:
    """Return the fields of a dataclass that differ from their defaults as "name=value"."""
    values = ((field, getattr(x, field.name)) for field in dataclasses.fields(x))
    return [f"{field.name}={value!r}" for field, value in values if value != field.default]
