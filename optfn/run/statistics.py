"""Batch statistics of a model, estimated anew for params that were not trained with them."""

import functools
from collections.abc import Callable, Iterable
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from optfn.core import checks, tree
from optfn.core.numerics import wide_dtype
from optfn.core.types import Batch, LossFn, Params, PyTree
from optfn.leaves.packed import unpack
from optfn.leaves.patterns import Pattern, check_pattern, match_names
from optfn.loss.keys import fold_in
from optfn.loss.loss_form import Inputs, LossForm
from optfn.run.progress import count_examples
from optfn.train import numeric_batch, worker_step

# Arrays by their numbers among the leaves of the model state.
Arrays: TypeAlias = dict[int, Any]
# From values of the statistics to their responses, which have two rows: the values after a batch,
# and after the same batch once more. Beside them are the dtypes that the model returns.
Respond: TypeAlias = Callable[[Arrays], tuple[Arrays, Arrays]]

# How far a response may be from the response of a running average, relative to it.
_TOLERANCE = 1e-3
# How much of an estimate may be rounding of the model's results.
_ROUNDING = 0.02


def estimate_statistics(
    loss_fn: LossFn,
    params: Params,
    model_state: PyTree,
    batches: Iterable[Batch],
    *,
    has_aux: bool = False,
    rng: bool | int | jax.Array = False,
    only: Pattern | None = None,
) -> PyTree:
    """Run the loss on `batches` and return the model state with the mean of the batch statistics,
    each batch weighted by its examples.

        s = ∑ nᵦ·xᵦ/∑ nᵦ    xᵦ the statistics of batch b, nᵦ its examples

    Averaged params (`exponential_moving_average`, `model_average`) need statistics for themselves:
    the statistics of the last params belong to different activations. With `evaluate_average`,
    `minimize` averages the statistics too; this function is for runs without that average.

    torch's `update_bn` weights all batches alike.

    xᵦ is the value that batch b does not change when it comes once more. A model returns m·s + c
    for a statistic s, and its results for two values of s determine m and c, the first time and
    the second. So neither its momentum matters, nor a correction for the start, as haiku makes it,
    nor statistics from before.

    Args:
      loss_fn: the loss function of the training, (params, model_state, batch[, key]) ->
        (loss, model_state). It is compiled once, and calls the model as in training.
      params: the parameters, such as `averaged_params(state.opt_state, state.params)`. Packed ones
        are unpacked for the loss.
      model_state: the model state after training; arrays that are not floating-point stay as they
        are.
      batches: an iterable of batches, such as a part of the training data.
      has_aux: whether `loss_fn` returns (loss, (model_state, aux)).
      rng: as for `make_train_step`, if the loss takes a key: batch i gets `fold_in(key, i)`.
      only: a pattern of paths of the model state; unselected arrays stay as they are. None selects
        all floating-point arrays.

    Returns:
      A model state like `model_state`.

    Raises:
      ValueError: an array of the model state is no running average of the batches, such as the
        vectors of a spectral norm: leave it out by `only`; the model rounds it to a narrow dtype;
        or `batches` is empty.
    """
    form = LossForm(has_model_state=True, has_aux=checks.flag("has_aux", has_aux))
    first_key = worker_step.make_key(rng)
    leaves, structure = jax.tree.flatten(model_state)
    chosen = _select_arrays(model_state, check_pattern("only", only))
    respond_to = _make_response(loss_fn, form, unpack(params), model_state)
    # Wide, however narrow the statistics are.
    zeros = {i: jnp.zeros_like(leaves[i], wide_dtype(leaves[i].dtype)) for i in chosen}
    total: Arrays = {}
    slopes: Arrays = {}
    count = 0
    for number, batch in enumerate(map(numeric_batch.convert_batch, batches)):
        key = None if first_key is None else fold_in(first_key, number)
        respond = functools.partial(respond_to, batch, key)
        of_zeros, dtypes = respond(zeros)
        # The findings from the first batch must be true of the second.
        if number < 2:
            slopes = slopes or _find_slopes(respond, of_zeros)
            _check_averages(chosen, respond, of_zeros, slopes, dtypes)
        size = count_examples(batch) or 1
        total = {i: total.get(i, 0) + size * x for i, x in of_zeros.items()}
        count += size
    if not count:
        raise ValueError("estimate_statistics: batches must hold at least one batch")
    for i in chosen:
        leaves[i] = _find_lasting(leaves[i], total[i] / count, slopes[i])
    return jax.tree.unflatten(structure, leaves)


def _select_arrays(model_state: PyTree, only: Pattern | None) -> dict[int, str]:
    """Return the paths of the arrays that are estimated, by their index among the leaves: all
    floating-point ones, or those that `only` matches."""
    names = None if only is None else match_names(only, model_state, "only")
    named = enumerate(tree.arrays_with_paths(model_state))
    return {
        i: path for i, (path, x) in named if tree.is_inexact(x) and (names is None or path in names)
    }


def _make_response(
    loss_fn: LossFn, form: LossForm, params: Params, model_state: PyTree
) -> Callable[[Batch, jax.Array | None, Arrays], tuple[Arrays, Arrays]]:
    """Return the function from a batch, its key and values of the statistics to their responses."""
    leaves, structure = jax.tree.flatten(model_state)

    def call_loss(state: list[Any], params: Params, batch: Batch, key: jax.Array | None) -> Any:
        given = jax.tree.unflatten(structure, state)
        zero = jnp.zeros((), jnp.int32)
        inputs = Inputs(params, given, batch, key, zero, zero, None)
        return loss_fn(params, *form.list_arguments(inputs))

    @jax.jit
    def check(*inputs: Any) -> None:
        form.check_result("loss_fn", call_loss(*inputs), model_state)

    @jax.jit
    def advance(*inputs: Any) -> list[Any]:
        _, rest = call_loss(*inputs)
        return jax.tree.leaves(rest[0] if form.has_aux else rest)

    def respond(batch: Batch, key: jax.Array | None, start: Arrays) -> tuple[Arrays, Arrays]:
        check.eval_shape(leaves, params, batch, key)
        state = [start.get(i, x) for i, x in enumerate(leaves)]
        once = advance(state, params, batch, key)
        dtypes = {i: once[i].dtype for i in start}
        once = [x.astype(start[i].dtype) if i in start else x for i, x in enumerate(once)]
        twice = advance(once, params, batch, key)
        rows = {i: jnp.stack([once[i], twice[i].astype(x.dtype)]) for i, x in start.items()}
        return rows, dtypes

    return respond


def _find_largest(responses: Arrays) -> float:
    """Return the largest magnitude in the responses, or 1 if all are 0."""
    return max((float(jnp.max(jnp.abs(x), initial=0)) for x in responses.values()), default=0) or 1


def _find_slopes(respond: Respond, of_zeros: Arrays) -> Arrays:
    """Return m of both times, from the responses to zeros and to a number as large as these."""
    largest = _find_largest(of_zeros)
    of_equal, _ = respond({i: jnp.full_like(x[0], largest) for i, x in of_zeros.items()})
    return {i: (of_equal[i] - x) / largest for i, x in of_zeros.items()}


def _find_lasting(old: Any, of_zeros: Any, slopes: Any) -> Any:
    """Return the value that is the same after both times, or the old one if the model returns it
    as it came."""
    (m, again), (c, then) = slopes, of_zeros
    s = jnp.where(m == again, 0, (then - c) / jnp.where(m == again, 1, m - again))
    return jnp.where(_is_kept(of_zeros, slopes), old, m * s + c).astype(old.dtype)


def _is_kept(of_zeros: Any, slopes: Any) -> jax.Array:
    """Tell whether the model returns an array as it came."""
    return jnp.all(slopes == 1) & jnp.all(of_zeros == 0)


def _check_averages(
    chosen: dict[int, str], respond: Respond, of_zeros: Arrays, slopes: Arrays, dtypes: Arrays
) -> None:
    """Raise a ValueError that names the array unless its responses to random numbers fit a running
    average, of the array itself or of another one, and are exact enough for an estimate."""
    draw, largest = np.random.default_rng(0), _find_largest(of_zeros)
    start = {
        i: jnp.asarray(draw.uniform(0, largest, x[0].shape), x.dtype) for i, x in of_zeros.items()
    }
    responses, _ = respond(start)
    for i, path in chosen.items():
        c, m, epsilon = of_zeros[i], slopes[i], float(jnp.finfo(dtypes[i]).eps)
        # An average that is corrected for its start is computed from another array.
        sources = [start[i], *(s for s in start.values() if s.shape == start[i].shape)]
        tolerance = max(_TOLERANCE, 4 * epsilon)
        is_average = any(_are_close(responses[i], m * s, c, tolerance) for s in sources)
        is_exact = jnp.all(epsilon * jnp.abs(m[0]) <= _ROUNDING * jnp.abs(m[0] - m[1]))
        if is_average and (is_exact or _is_kept(c, m)):
            continue
        if is_average and dtypes[i].itemsize < 4:
            raise ValueError(
                f"estimate_statistics: the model returns {path!r} of the model state in "
                f"{dtypes[i]}, which hides its momentum; keep it in float32, or leave it out by "
                "only=, a pattern of paths"
            )
        raise ValueError(
            f"estimate_statistics: the model does not average {path!r} of the model state over "
            "batches, so it has no estimate; leave it out by only=, a pattern of paths"
        )


def _are_close(found: Any, kept: Any, added: Any, tolerance: float) -> bool:
    """Tell whether found = kept + added, to a tolerance relative to the three."""
    size = jnp.abs(found) + jnp.abs(kept) + jnp.abs(added)
    return bool(jnp.all(jnp.abs(found - kept - added) <= tolerance * size))
