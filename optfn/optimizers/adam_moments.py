"""Adam's moments in other storages than float32, and with an exact lazy update."""

from optfn import core
from optfn.core.checks import Number
from optfn.transforms.catch_up_adam import scale_by_catch_up_adam
from optfn.transforms.quantized_adam import scale_by_quantized_adam
from optfn.transforms.stored import check_moment_dtype


def exact_lazy_or_quantized_adam(
    b1: Number, b2: Number, eps: Number, eps_hat: bool, moment_dtype: str | None, lazy: object
) -> core.Unchecked:
    """Return Adam's exact lazy link if `moment_dtype` is None, else the one with moments of this
    dtype, and raise a ValueError if `lazy` is set too or invalid.

    Raises:
      ValueError: both are asked for, or `lazy` is another value.
    """
    if not (isinstance(lazy, bool) or (isinstance(lazy, str) and lazy == "exact")):
        raise ValueError(f'lazy must be False, True or "exact"; got {lazy!r}')
    dtype = check_moment_dtype("moment_dtype", moment_dtype)
    if dtype is None:
        return scale_by_catch_up_adam.unchecked(b1, b2, eps, eps_hat=eps_hat)
    if lazy:
        raise ValueError(f"lazy={lazy!r} needs float32 moments; got {moment_dtype=}")
    return scale_by_quantized_adam.unchecked(b1, b2, eps, eps_hat=eps_hat, dtype=dtype)
