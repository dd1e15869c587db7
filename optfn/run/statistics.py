"""Batch statistics of a model, estimated anew for params that were not trained with them."""

import functools
from collections.abc import Iterable
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp

from optfn.core import checks, tree
from optfn.core.types import Batch, LossFn, Params, PyTree
from optfn.leaves.patterns import Pattern, check_pattern, match_names
from optfn.loss.loss_form import Inputs, LossForm
from optfn.mesh.collectives.axes import Axes
from optfn.run.progress import count_examples
from optfn.train.numeric_batch import convert_batch
from optfn.train.worker_step import make_key_of

# Arrays of the model state by their numbers.
Arrays: TypeAlias = dict[int, Any]

# How far the model state may be from m·s + f(0), relative to it, to count as a running average.
_TOLERANCE = 1e-3


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
    each batch weighted by its examples, and with its other arrays unchanged.

        s = ∑ nᵦ·xᵦ/∑ nᵦ    xᵦ the statistics of batch b, nᵦ its examples

    Averaged params need statistics of their own (`exponential_moving_average`, `model_average`):
    those of the last params belong to other activations. With `evaluate_average`, `minimize`
    averages the statistics too; this function is for where you do not want an average of them.

    torch's `update_bn` weights all batches alike.

    A model returns m·s + (1 − m)·xᵦ for statistics s. From its results for 0 and for 1 we find m
    and xᵦ, so the momentum of the model does not matter, and statistics from before do not count.

    Args:
      loss_fn: the loss function of the training, (params, model_state, batch[, key]) ->
        (loss, model_state). It is compiled once, and calls the model as in training.
      params: the parameters, such as `averaged_params(state.opt_state, state.params)`.
      model_state: the model state after training; arrays that are not floating-point stay as they
        are.
      batches: an iterable of batches, such as a part of the training data.
      has_aux: whether `loss_fn` returns (loss, (model_state, aux)).
      rng: as for `make_train_step`, if the loss takes a key: batch i gets `fold_in(key, i)`.
      only: a pattern of paths of the model state; all other arrays stay as they are. None selects
        all floating-point arrays.

    Returns:
      A model state like `model_state`.

    Raises:
      ValueError: an array of the model state is no running average of the batches, such as the
        vectors of a spectral norm: leave it out by `only`; or `batches` is empty.
    """
    form = LossForm(has_model_state=True, has_aux=checks.flag("has_aux", has_aux))
    key_of = make_key_of(rng, Axes())
    leaves, structure = jax.tree.flatten(model_state)
    chosen = _select_arrays(model_state, check_pattern("only", only))

    @jax.jit
    def advance(
        params: Params, old: list[Any], arrays: Arrays, batch: Batch, key: jax.Array | None
    ) -> Arrays:
        """Return the chosen arrays after a batch, from `arrays` in place of the old ones."""
        state = jax.tree.unflatten(structure, [arrays.get(i, x) for i, x in enumerate(old)])
        inputs = Inputs(params, state, batch, key, jnp.zeros((), jnp.int32), None)
        returned = loss_fn(params, *form.list_arguments(inputs))
        new = jax.tree.leaves(form.check_result("loss_fn", returned, state).model_state)
        return {i: new[i] for i in chosen}

    total: Arrays = {}
    kept: Arrays = {}
    count = 0
    for number, batch in enumerate(map(convert_batch, batches)):
        key = None if key_of is None else key_of(jnp.asarray(number))
        run = functools.partial(advance, params, leaves, batch=batch, key=key)
        of_zeros = run({i: jnp.zeros_like(leaves[i]) for i in chosen})
        if not kept:
            of_ones = run({i: jnp.ones_like(leaves[i]) for i in chosen})
            kept = {i: of_ones[i] - of_zeros[i] for i in chosen}
            _check_averages(chosen, leaves, run({}), kept, of_zeros)
        size = count_examples(batch) or 1
        total = {i: total.get(i, 0) + size * of_zeros[i] for i in chosen}
        count += size
    if not count:
        raise ValueError("estimate_statistics: batches must hold at least one batch")
    for i in chosen:
        # An array that the model returns as it came has m = 1.
        rest = jnp.where(kept[i] == 1, 1, 1 - kept[i])
        leaves[i] = jnp.where(kept[i] == 1, leaves[i], total[i] / (count * rest))
    return jax.tree.unflatten(structure, leaves)


def _select_arrays(model_state: PyTree, only: Pattern | None) -> dict[int, str]:
    """Return the paths of the arrays that are estimated, by their index among the leaves: all
    floating-point ones, or those that `only` matches."""
    names = None if only is None else match_names(only, model_state, "only")
    named = enumerate(tree.arrays_with_paths(model_state))
    return {
        i: path for i, (path, x) in named if tree.is_inexact(x) and (names is None or path in names)
    }


def _check_averages(
    chosen: dict[int, str], leaves: list[Any], new: Arrays, kept: Arrays, of_zeros: Arrays
) -> None:
    """Raise a ValueError that names the array unless each new one is a running average, m·s plus
    what the model returns for 0."""
    for i, path in chosen.items():
        found, expected = new[i], kept[i] * leaves[i] + of_zeros[i]
        size = jnp.abs(found) + jnp.abs(expected) + jnp.abs(of_zeros[i])
        if not bool(jnp.all(jnp.abs(found - expected) <= _TOLERANCE * size)):
            raise ValueError(
                f"estimate_statistics: the model does not average {path!r} of the model state over "
                "batches, so it has no estimate; leave it out by only=, a pattern of paths"
            )
