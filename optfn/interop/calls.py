"""Transformations as the calls that made them, for messages and `repr`s."""

from collections.abc import Iterator

import optax

from optfn import core
from optfn.core import checks
from optfn.core.printing import call_text


def show_transform(tx: optax.GradientTransformation) -> str:
    """Return the call that made `tx` as text, or for a transformation of another library the name
    of its factory, as in "optax.masked(…)". Such a transformation does not keep its call."""
    if isinstance(tx, core.Transform):
        name, positional, named = tx.call
        shown = tuple(map(_show_argument, positional))
        return call_text(name, shown, {k: _show_argument(x) for k, x in named.items()})
    for function in tx:  # nested in the factory, but for those that several factories share
        factory, *nested = getattr(function, "__qualname__", "").split(".<locals>.")
        if nested and factory != "with_extra_args_support":
            return f"{checks.package(function.__module__)}.{factory}(…)"
    return f"optax.{type(tx).__name__}(…)"


def iterate_links(tx: optax.GradientTransformation) -> Iterator[core.Transform]:
    """Yield `tx` and the transformations inside of it, if they are optfn's."""
    if isinstance(tx, core.Transform):
        yield tx
        for link in tx.inner:
            yield from iterate_links(link)


def _show_argument(x: object) -> object:
    """Return a transformation as its text, or the argument itself."""
    return _Shown(show_transform(x)) if isinstance(x, optax.GradientTransformation) else x


class _Shown(str):
    """The text of a transformation in the `repr` of a call with it."""

    def __repr__(self) -> str:
        return str(self)
