"""Packages that optfn can do without."""

import importlib
from typing import Any

from optfn.core import checks


def optional_module(name: str, extra: str) -> Any:
    """Import and return a module of an optional package, or raise an ImportError, with the extra to
    install if the package is missing.

    Raises:
      ModuleNotFoundError: the package is not installed; the error names the extra.
      ImportError: it is installed, and importing it fails.
    """
    try:
        return importlib.import_module(name)
    except ImportError as error:
        if isinstance(error, ModuleNotFoundError) and f"{name}.".startswith(f"{error.name}."):
            raise ModuleNotFoundError(
                f'{checks.package(name)} is not installed: pip install ".[{extra}]" in a clone of '
                "optfn"
            ) from error
        raise ImportError(
            f"{checks.package(name)} is installed, but importing {name} fails: {error}"
        ) from error
