"""The inputs and results of a loss function, with checks of the results."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from optfn.core import tree
from optfn.core.checks import show
from optfn.core.types import Batch, Params, PyTree
from optfn.loss.mean import Mean, check_mean, is_mean


class Inputs(NamedTuple):
    """The arrays that a step computes its loss and gradients from.

    `shard_map` takes arrays as arguments only, so the step and the loss factor are here as well,
    and one tree of PartitionSpecs divides them all.

    params: the params as they are stored: a tree, packed, or the shards of a device.
    model_state: the arrays that the model has besides params; None without `model_state=True`.
    batch: the examples.
    key: the random key of the loss; None if the loss takes no key.
    step: the index of the training step, int32.
    packet: the number of the step, or of a microbatch, among all, int32, which may wrap around. A
      compressor rounds the packets of each in another way.
    loss_factor: the step multiplies gradients by it, for `dynamic_loss_scale`; else None.
    """

    params: Params
    model_state: PyTree
    batch: Batch
    key: jax.Array | None
    step: jax.Array
    packet: jax.Array
    loss_factor: jax.Array | None


class Values(NamedTuple):
    """The results of a loss function.

    loss: the Mean that a loss function returns; further out the mean over all parts, or a share of
      it.
    model_state: the new model state.
    aux: auxiliary data, with a Mean where the loss function returns one.
    weight: the sum of the weights of all parts, if the loss is a Mean; else None.
    """

    loss: Any
    model_state: PyTree = None
    aux: PyTree = None
    weight: jax.Array | None = None


@dataclasses.dataclass(frozen=True)
class LossForm:
    """The arguments and results of a loss function besides params, batch and loss."""

    has_model_state: bool
    has_aux: bool
    has_step: bool = False

    def list_arguments(self, inputs: Inputs) -> list[Any]:
        """Return the arguments after the params in a call: of model state, batch, key and index of
        the step the ones that the function takes."""
        arguments = [inputs.batch]
        if self.has_model_state:
            # Make a new tree for each call, because equinox marks a State as used up.
            arguments.insert(0, jax.tree.map(lambda x: x, inputs.model_state))
        if inputs.key is not None:
            arguments.append(inputs.key)
        if self.has_step:
            arguments.append(inputs.step)
        return arguments

    @property
    def result(self) -> str:
        """The results that the function must return, as error messages show them."""
        rest = {
            (False, False): "",
            (False, True): "aux",
            (True, False): "model_state",
            (True, True): "(model_state, aux)",
        }[self.has_model_state, self.has_aux]
        return f"(loss, {rest})" if rest else "loss"

    def check_result(self, who: str, returned: Any, model_state: PyTree) -> Values:
        """Return a function's results as `Values`, with None for a result that this form lacks.
        Raise an error unless they have this form, with a real scalar loss.

        Args:
          who: the function's name in errors.
          returned: its results.
          model_state: the model state passed to it; the new one must have the same arrays.

        Raises:
          TypeError: the results are not of this form, or the loss is not a real number.
          ValueError: the loss is not a scalar, or the model state has changed its structure.
        """
        if not (self.has_model_state or self.has_aux):
            if isinstance(returned, tuple) and not is_mean(returned):
                raise TypeError(
                    f"{who} returned a tuple; pass has_aux=True if it returns (loss, aux). If it "
                    "returns (loss, model_state), pass model_state=True to make_train_step, or the "
                    "arrays, model_state=…, to minimize"
                )
            return Values(_check_loss(who, returned))
        loss, rest = self._check_pair(who, returned)
        new, aux = None, rest
        if self.has_model_state:
            new, aux = self._check_pair(who, rest) if self.has_aux else (rest, None)
            # A model state may be a pair itself. A first element with the arrays of the model
            # state shows that the second is aux.
            is_pair = isinstance(rest, tuple) and len(rest) == 2 and not is_mean(rest)
            is_pair &= tree.paths(rest) != tree.paths(model_state)
            if not self.has_aux and is_pair and tree.paths(rest[0]) == tree.paths(model_state):
                raise TypeError(
                    f"{who} returned (loss, (model_state, aux)); pass has_aux=True for that"
                )
            _check_model_state(who, new, model_state)
        _check_aux_leaves(who, aux)
        return Values(_check_loss(who, loss), new, _check_means(who, aux))

    def _check_pair(self, who: str, returned: Any) -> Any:
        """Return a pair unchanged, and raise a TypeError that shows the form needed for anything
        else."""
        if isinstance(returned, tuple) and len(returned) == 2 and not is_mean(returned):
            return returned
        flags = {"model_state": self.has_model_state, "has_aux": self.has_aux}
        given = " and ".join(f"{name}=True" for name, flag in flags.items() if flag)
        raise TypeError(f"with {given}, {who} must return {self.result}; got {_describe(returned)}")


def _describe(returned: Any) -> str:
    """Return a description for an error, which is the shape of a JAX array, or the type of another
    value, with the length of a tuple."""
    if isinstance(returned, jax.Array):
        return f"an array of shape {returned.shape}"
    if is_mean(returned):
        return "a Mean"
    size = f" of length {len(returned)}" if isinstance(returned, tuple) else ""
    return f"a value of type {type(returned).__name__}{size}"


def _check_loss(who: str, loss: Any) -> Any:
    """Return the loss as an array or a `Mean` of arrays, and raise a ValueError unless it is a
    scalar, or a TypeError unless it is a real floating-point number."""
    if isinstance(loss, Mean):
        mean = check_mean(who, loss)
        return Mean(_check_loss(f"{who}, in a Mean,", mean.total), mean.weight)
    if not isinstance(loss, jax.Array | np.ndarray | np.generic | float | int):
        raise TypeError(
            f"{who} must return a real scalar as the loss; got {loss!r} of type "
            f"{type(loss).__name__}"
        )
    if jnp.shape(loss) != ():
        raise ValueError(f"{who} must return a scalar; got an array of shape {jnp.shape(loss)}")
    if not jnp.issubdtype(jnp.result_type(loss), jnp.floating):
        raise TypeError(f"{who} must return a real number; got dtype {jnp.result_type(loss)}")
    return jnp.asarray(loss)


def _check_aux_leaves(who: str, aux: PyTree) -> None:
    """Raise a TypeError unless all leaves of aux are arrays or numbers, which holds for None
    because it has no leaves."""
    for path, x in tree.arrays_with_paths(aux):
        if not isinstance(x, jax.Array | np.ndarray | np.generic | float | int):
            at = f" at {path!r}" if path else ""
            raise TypeError(f"{who}: aux must consist of arrays and numbers; got {show(x)}{at}")


def _check_means(who: str, aux: PyTree) -> PyTree:
    """Return aux with each Mean as a Mean of arrays, its weight in the dtype of its total."""

    def check(x: Mean) -> Mean:
        total, weight = check_mean(f"{who}, in aux", x)
        # Integers of aux are added up, and not averaged.
        return Mean(total, weight.astype(total.dtype))

    return tree.replace_nodes(is_mean, check, aux)


def _check_model_state(who: str, new: PyTree, old: PyTree) -> None:
    """Raise a ValueError unless the new model state has the structure, shapes and dtypes of the old
    one, masked leaves left out."""
    tree.check_same_structure(who, "the new model_state", new, "the old one", old)
    for place, b, a in tree.items(old, new):
        if tree.is_masked(b):
            continue
        # As arrays: a Python number has the dtype that JAX gives it.
        a, b = jax.typeof(jnp.asarray(a)), jax.typeof(jnp.asarray(b))
        if (a.shape, a.dtype) != (b.shape, b.dtype):
            raise ValueError(
                f"{who}: the new model_state has {a.dtype}{list(a.shape)} at {place!r}, but the "
                f"old one has {b.dtype}{list(b.shape)}; they must agree"
            )
