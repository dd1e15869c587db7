"""Checks of arguments.

The values of Python and NumPy numbers are checked at once. A JAX array may be traced, so only its
shape and dtype are checked; its value never decides a branch.
"""

import inspect
import math
import os
import sys
import warnings
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias, TypeGuard, TypeVar, cast

import jax
import jax.numpy as jnp
import numpy as np

T = TypeVar("T")

# A hyper-parameter as users pass it: a Python or NumPy number, or a 0-d JAX array, traced or not.
Number: TypeAlias = float | int | np.number | np.ndarray | jax.Array
# A checked hyper-parameter, as rules take it: a Python float, or a real 0-d array.
Scalar: TypeAlias = float | jax.Array
# A function of the 0-based step (int32) that returns a rate.
Schedule: TypeAlias = Callable[[Any], Any]


def show(value: object, most: int = 100) -> str:
    """Return `value` and its type for an error message, cut after `most` characters."""
    text = " ".join(repr(value).split())
    text = text if len(text) <= most else f"{text[:most]}…"
    return f"{text} of type {type(value).__name__}"


def package(module: str) -> str:
    """Return the first word of a module's name: the package of the module."""
    return module.partition(".")[0]


def warn(message: str) -> None:
    """Warn at the line outside of optfn, optax and JAX that called the library."""
    frame, level = sys._getframe(1), 2
    inner = ("optfn", "optax", "jax", "contextlib")
    # The number of frames differs with JAX's version and with `jit`, so count them here.
    while frame.f_back is not None and package(str(frame.f_globals.get("__name__"))) in inner:
        frame, level = frame.f_back, level + 1
    warnings.warn(message, UserWarning, stacklevel=level)


def is_host_number(value: object) -> TypeGuard[float]:
    """Tell whether `value` is a Python or NumPy number of shape () (a bool is not)."""
    if isinstance(value, bool | np.bool_):
        return False
    if isinstance(value, np.ndarray):
        return value.shape == () and np.issubdtype(value.dtype, np.number)
    return isinstance(value, int | float | np.integer | np.floating)


def is_traced(values: Any) -> bool:
    """Tell whether any array of a tree is traced: under `jit`, `vmap` or a derivative."""
    return has_tracer(jax.tree.leaves(values))


def has_tracer(arrays: Iterable[Any]) -> bool:
    """Tell whether any of these arrays is traced."""
    for x in arrays:  # noqa: SIM110  (a generator takes twice as long, in each call of a step)
        if isinstance(x, jax.core.Tracer):
            return True
    return False


class Range(NamedTuple):
    """The values that an argument may have: their text in an error, and the test of a float."""

    text: str
    holds: Callable[[float], bool]


FINITE = Range("finite", math.isfinite)
POSITIVE = Range("> 0 and finite", lambda x: 0 < x < math.inf)
NONNEGATIVE = Range(">= 0 and finite", lambda x: 0 <= x < math.inf)
ABOVE_ONE = Range("> 1 and finite", lambda x: 1 < x < math.inf)
UNIT = Range("in [0, 1]", lambda x: 0 <= x <= 1)
BELOW_ONE = Range("in [0, 1)", lambda x: 0 <= x < 1)
INSIDE_UNIT = Range("in (0, 1)", lambda x: 0 < x < 1)
SHARE = Range("in (0, 1]", lambda x: 0 < x <= 1)


def number(name: str, value: object, allowed: Range = FINITE) -> Scalar:
    """Return `value`, a real host number in the `allowed` range as a float and a real scalar of JAX
    unchanged, or raise a TypeError or a ValueError.

    Raises:
      TypeError: it is not a real number.
      ValueError: it is NaN or out of range, or an array that is not 0-d.
    """
    if not is_host_number(value):
        return _real_scalar(name, value)
    if not allowed.holds(x := float(value)):
        raise ValueError(f"{name} must be {allowed.text}; got {x!r}")
    return x


def _real_scalar(name: str, value: object) -> Scalar:
    """Return `value` if it is a real array of shape (), or raise a ValueError for another shape and
    a TypeError for anything else."""
    if isinstance(value, jax.Array | np.ndarray):
        if value.shape != ():
            raise ValueError(f"{name} must be a scalar; got an array of shape {value.shape}")
        if jnp.issubdtype(value.dtype, jnp.floating) or jnp.issubdtype(value.dtype, jnp.integer):
            return cast("jax.Array", value)  # a NumPy array here has a dtype of JAX
        raise TypeError(f"{name} must be a real number; got an array of dtype {value.dtype}")
    raise TypeError(f"{name} must be a number; got {show(value)}")


def nonnegative(name: str, value: object) -> Scalar:
    """Return `value` if it is a number in [0, ∞) or a real scalar of JAX, or raise as `number` does
    otherwise."""
    return number(name, value, NONNEGATIVE)


def positive(name: str, value: object) -> Scalar:
    """Return `value` if it is a number > 0 and finite or a real scalar of JAX, or raise as `number`
    does otherwise."""
    return number(name, value, POSITIVE)


def decay(name: str, value: object) -> Scalar:
    """Return `value`, the factor of a moving average, if it is a number in [0, 1) or a real scalar
    of JAX, or raise as `number` does otherwise."""
    return number(name, value, BELOW_ONE)


def count(
    name: str, value: object, *, low: int = 1, hint: str = "make it a static argument"
) -> int:
    """Return `value` as an int if it is a Python or NumPy integer ≥ `low`, or raise a ValueError if
    it is less and a TypeError otherwise.

    It must be static, because shapes depend on it. The error for an array of JAX has the hint.
    """
    if isinstance(value, bool | np.bool_) or not isinstance(value, int | np.integer):
        advice = f" ({hint})" if isinstance(value, jax.Array) else ""
        raise TypeError(f"{name} must be a Python integer{advice}; got {show(value)}")
    if value < low:
        raise ValueError(f"{name} must be >= {low}; got {value}")
    return int(value)


def instance(name: str, value: object, kinds: Any, wanted: str) -> Any:
    """Return `value` if it is an instance of `kinds`, as for `isinstance`, else raise a TypeError
    that it must be `wanted`, such as "a mapping"."""
    if not isinstance(value, kinds):
        raise TypeError(f"{name} must be {wanted}; got {show(value)}")
    return value


def flag(name: str, value: object) -> bool:
    """Return `value` as a bool if it is a Python or NumPy bool, else raise a TypeError. It must be
    static, because the program depends on it."""
    return bool(instance(name, value, bool | np.bool_, "True or False"))


def check_signature(
    name: str,
    function: Any,
    arguments: Sequence[str],
    keywords: Iterable[str] = (),
    hint: str = "",
) -> None:
    """Raise a TypeError unless `function` is a function that takes these arguments, or accept one
    of C that does not tell its signature.

    The error about the arguments ends with `hint`.
    """
    instance(name, function, Callable, f"a function ({', '.join(arguments)})")
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # one of C, which does not tell
        return
    try:
        signature.bind(*arguments, **dict.fromkeys(keywords))
    except TypeError as error:
        given = ", ".join([*arguments, *(f"{keyword}=" for keyword in keywords)])
        raise TypeError(
            f"{name} is called with ({given}); it takes {signature}: {error}{hint}"
        ) from None


def check_call(function: Callable[..., Any], args: Any, kwargs: Any, error: TypeError) -> None:
    """Raise `error`, a TypeError, again with the names of the arguments if the given ones do not
    fit, and do nothing if they fit."""
    signature = inspect.signature(function)
    try:
        signature.bind(*args, **kwargs)
    except TypeError:
        names = ", ".join(signature.parameters)
        raise TypeError(f"{error}; its arguments are {names}") from None


def choice(name: str, value: T, options: Sequence[T]) -> T:
    """Return `value` if it is one of `options`, else raise a ValueError that lists them."""
    if value not in options:
        allowed = ", ".join(map(repr, options))
        raise ValueError(f"{name} must be one of {allowed}; got {value!r}")
    return value


def path(name: str, value: object) -> Path:
    """Return `value` as a Path if it is a path and not empty, else raise a TypeError."""
    if not isinstance(value, str | os.PathLike) or not os.fspath(value):
        raise TypeError(f"{name} must be a path; got {show(value)}")
    return Path(value)
