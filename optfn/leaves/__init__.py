"""Kinds of leaves, and what is done with those that are not plain arrays."""

from typing import Any


def __getattr__(name: str) -> Any:
    """Return `leafwise`, which has moved, with a warning."""
    if name != "leafwise":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import warnings

    from optfn.core import leafwise

    text = "optfn.leaves.leafwise is optfn.core.leafwise now; the old name goes in version 0.3"
    warnings.warn(text, DeprecationWarning, stacklevel=2)
    return leafwise
