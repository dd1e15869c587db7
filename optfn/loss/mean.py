"""A loss that is a mean: a total, and the weight that divides it."""

from collections.abc import Callable
from typing import Any, NamedTuple, NoReturn, TypeGuard

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from optfn.core import numerics, tree
from optfn.core.checks import show
from optfn.core.types import Leaf, Params, PyTree
from optfn.loss.jaxprs.dependence import find_dependent_leaves
from optfn.mesh.collectives.axes import Axes, axis_size


class Mean(NamedTuple):
    """A mean, total/weight, that the examples of a batch have a part in.

        mean = ∑ total / ∑ weight

    Return it as a loss, as a number of aux, or from an evaluation, where a plain number would be a
    mean over examples that count alike. The sums run over all examples of an update: over workers,
    microbatches, and the calls of `accumulate`; the gradient is the quotient's. Examples of weight
    0 add nothing, whatever their total. An update whose weights add up to 0 changes no param.

    total: the sum, a real scalar, such as the loss of all tokens.
    weight: the divisor of the sum, a real scalar or integer ≥ 0, such as the number of tokens.

    >>> import jax.numpy as jnp, optfn
    >>> def loss_fn(params, batch):
    ...     x, mask = batch
    ...     return optfn.Mean(jnp.sum(mask * (x * params) ** 2), jnp.sum(mask))
    >>> step = optfn.make_train_step(loss_fn, optfn.sgd(0.1), microbatches=2)
    >>> batch = jnp.arange(4.0), jnp.array([1.0, 1.0, 0.0, 1.0])
    >>> state, metrics = step(step.init(jnp.ones(())), batch)
    >>> round(float(metrics["loss"]), 3), int(metrics["weight"])
    (3.333, 3)
    """

    total: Any
    weight: Any


def _refuse_arithmetic(mean: Mean, other: object) -> NoReturn:
    """Raise a TypeError for any arithmetic with a `Mean`, which is no number, but two sums over all
    devices and microbatches."""
    raise TypeError(
        "a Mean has no arithmetic: its two sums go on over devices and microbatches before they "
        "are divided. Scale it by its total, Mean(0.5 * total, weight). Add losses that are means "
        "over different examples as in docs/loop.md, by a weight for each example"
    )


for _name in ("add", "radd", "sub", "rsub", "mul", "rmul", "truediv"):
    setattr(Mean, f"__{_name}__", _refuse_arithmetic)


def is_mean(x: object) -> TypeGuard[Mean]:
    """Tell whether an object is a `Mean`."""
    return isinstance(x, Mean)


def check_mean(who: str, mean: Mean) -> Mean:
    """Return the `Mean` as arrays, with the total in float32 or wider and 0 where the weight is 0,
    and raise an error unless both are real and of one shape.

    Raises:
      TypeError: a number is not real, or is something else than a number.
      ValueError: they have different shapes.
    """
    for name, x in mean._asdict().items():
        if not isinstance(x, jax.Array | np.ndarray | np.generic | float | int):
            raise TypeError(f"{who}: the {name} of a Mean must be a number; got {show(x)}")
        if jnp.issubdtype(jnp.result_type(x), jnp.complexfloating):
            raise TypeError(f"{who}: the {name} of a Mean must be real; got {jnp.result_type(x)}")
    if jnp.shape(mean.total) != jnp.shape(mean.weight):
        raise ValueError(
            f"{who}: total and weight of a Mean must have the same shape; got "
            f"{jnp.shape(mean.total)} and {jnp.shape(mean.weight)}"
        )
    dtype = jnp.result_type(mean.total)
    is_float = jnp.issubdtype(dtype, jnp.floating)
    dtype = numerics.accumulator_dtype(dtype) if is_float else numerics.scalar_dtype()
    total, weight = jnp.asarray(mean.total, dtype), jnp.asarray(mean.weight)
    return Mean(jnp.where(weight == 0, 0, total), weight)


def take_share(mean: Mean, axes: Axes) -> tuple[jax.Array, jax.Array]:
    """Return a device's share of the mean over the devices along `axes`, or the quotient without
    axes, which is 0 if all weights are 0, and the sum of the weights.

        share = N·total / ∑ weight,  N the number of devices

    The mean of the shares is ∑ total / ∑ weight, and the mean of their gradients its gradient.
    """
    total, weight = mean.total, mean.weight.astype(mean.total.dtype)
    totals, weights = lax.stop_gradient((total, weight))
    if axes:
        totals, weights = lax.psum((totals, weights), axes)
    quotient = totals / nonzero(weights)
    return _divide(total, weight, _divisor_of_share(weights, axes), quotient), weights


def take_part(mean: Mean, weights: jax.Array, axes: Axes) -> jax.Array:
    """Return N·weight/∑ weight. This factor turns the quotient of a device, total/weight, or its
    gradient, into the device's share of the mean over N devices.

    Args:
      mean: the device's mean.
      weights: the sum of the weights, as `take_share` returns it.
      axes: the axes of the devices.
    """
    return mean.weight.astype(weights.dtype) / _divisor_of_share(weights, axes)


def hold_undefined(weight: jax.Array, new: PyTree, before: PyTree) -> PyTree:
    """Return a new model state, but if the weight is 0, each number that is not finite as it was
    before: the statistics of a device or a microbatch without examples are 0/0."""

    def hold(x: Leaf, old: Leaf) -> Leaf:
        if not tree.is_inexact(x):
            return x
        return jnp.where((weight == 0) & ~jnp.isfinite(x), old, x)

    return jax.tree.map(hold, new, before)


def _divisor_of_share(weights: jax.Array, axes: Axes) -> jax.Array:
    """Return the mean of the weights over the devices along `axes`, from their sum, which counts as
    1 if it is 0, or that sum without axes."""
    return nonzero(weights) / (axis_size(axes) if axes else 1)


@jax.custom_vjp
def _divide(
    total: jax.Array, weight: jax.Array, divisor: jax.Array, quotient: jax.Array
) -> jax.Array:
    """Return total/divisor, with the gradient of a share of ∑ total / ∑ weight, where divisor and
    quotient are constants.

    A weight that no param changes has no gradient, and then XLA drops the sum of totals too.
    """
    return total / divisor


_divide.defvjp(
    lambda total, weight, divisor, quotient: (total / divisor, (divisor, quotient)),
    lambda kept, g: (g / kept[0], -g * kept[1] / kept[0], *map(jnp.zeros_like, kept)),
)


def nonzero(weight: jax.Array) -> jax.Array:
    """Return a weight, or 1 for 0, so that a total of 0 without weight has the mean 0."""
    return jnp.where(weight == 0, 1, weight)


def average_by_weight(values: jax.Array, weights: jax.Array) -> jax.Array:
    """Return ∑ weight·value / ∑ weight along the leading axis, or 0 where all weights are 0."""
    return jnp.sum(weights * values, 0) / nonzero(jnp.sum(weights, 0))


def divide_means(values: PyTree) -> PyTree:
    """Replace each Mean by its quotient, NaN for 0/0."""
    return tree.replace_nodes(is_mean, lambda x: x.total / x.weight, values)


def check_constant_weight(weight_of: Callable[[Params], Any], params: Params) -> None:
    """Trace the gradient of a weight with respect to params, without running it, and raise a
    ValueError if a param may have one.

    Args:
      weight_of: params -> weight.
      params: the params, or their shapes and dtypes.
    """

    def pull_back(params: Params, factor: jax.Array) -> Params:
        weight, pull = jax.vjp(weight_of, params)
        return pull(factor.astype(weight.dtype))

    marks = jax.tree.map(lambda x: False, params), True
    scalar = jax.ShapeDtypeStruct((), jnp.float32)
    if any(jax.tree.leaves(find_dependent_leaves(pull_back, (params, scalar), marks))):
        raise ValueError(
            "the weight of the loss, a Mean, depends on the params, and with microbatches or "
            "`accumulate` its gradient needs the loss of all of them first. Stop it, "
            "optfn.Mean(total, jax.lax.stop_gradient(weight)), or take the whole batch at once"
        )
