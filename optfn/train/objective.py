"""The loss of a training step and its gradients, from any of the forms that users write."""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P

from optfn import sparse
from optfn.autodiff.named_segments import recompute_function
from optfn.leaves import leafwise, mismatch, tree
from optfn.leaves.packed import unpack, unpacked
from optfn.leaves.tree import Pattern
from optfn.leaves.types import Batch, Leaf, LossFn, Params, PyTree, Updates
from optfn.mesh import AxisName, axes
from optfn.parallel.data_parallel import batch_spec, mean_or_first, mean_over_workers
from optfn.parallel.sharding import Sharding, is_spec
from optfn.sparse.tables import Owners


class Values(NamedTuple):
    """What a loss function gives: the loss, and with it the new model state and auxiliary data."""

    loss: jax.Array
    model_state: PyTree = None
    aux: PyTree = None


class Objective(NamedTuple):
    """What a step minimizes, two functions of (params, model_state, batch, *keys).

    value: gives the Values.
    value_and_grad: gives the Values and the gradients.
    """

    value: Callable[..., Values]
    value_and_grad: Callable[..., tuple[Values, Updates]]


@dataclasses.dataclass(frozen=True)
class Form:
    """What a loss function takes and gives beside params, the batch and the loss."""

    has_model_state: bool
    has_aux: bool

    def arguments(self, model_state: PyTree, *others: Any) -> tuple[Any, ...]:
        """Return what follows the params in a call."""
        # A new tree for each call: equinox marks a State as used up.
        return (jax.tree.map(lambda x: x, model_state), *others) if self.has_model_state else others

    @property
    def result(self) -> str:
        """What the function has to return, for errors."""
        rest = {
            (False, False): "",
            (False, True): "aux",
            (True, False): "model_state",
            (True, True): "(model_state, aux)",
        }[self.has_model_state, self.has_aux]
        return f"(loss, {rest})" if rest else "loss"

    def values(self, who: str, returned: Any, model_state: PyTree) -> Values:
        """Return what a function gave, checked.

        Args:
          who: the function's name in errors.
          returned: what it gave.
          model_state: the one it was given; the new one must be like it.

        Raises:
          TypeError: it is not of this form, or the loss is not a real number.
          ValueError: the loss is not a scalar, or the model state has changed its structure.
        """
        if not (self.has_model_state or self.has_aux):
            if isinstance(returned, tuple):
                raise TypeError(
                    f"{who} returned a tuple; pass has_aux=True if it gives (loss, aux), "
                    "model_state=True if it gives (loss, model_state)"
                )
            return Values(_loss(who, returned))
        loss, rest = self._pair(who, returned)
        if not self.has_model_state:
            return Values(_loss(who, loss), aux=rest)
        new, aux = self._pair(who, rest) if self.has_aux else (rest, None)
        _check_model_state(who, new, model_state)
        return Values(_loss(who, loss), new, aux)

    def _pair(self, who: str, returned: Any) -> Any:
        if isinstance(returned, tuple) and len(returned) == 2:
            return returned
        flags = {"model_state": self.has_model_state, "has_aux": self.has_aux}
        given = " and ".join(f"{name}=True" for name, flag in flags.items() if flag)
        raise TypeError(
            f"with {given}, {who} must return {self.result}; got a value of type "
            f"{type(returned).__name__}"
        )


def _loss(who: str, loss: Any) -> jax.Array:
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


def _check_model_state(who: str, new: PyTree, old: PyTree) -> None:
    """Raise a ValueError unless the new model state has the arrays of the old one."""
    tree.check_same_structure(who, "the new model_state", new, "the old one", old)
    for path, a, b in zip(tree.paths(old), tree.flatten(new)[0], tree.flatten(old)[0], strict=True):
        if tree.is_masked(b):
            continue
        a, b = jax.typeof(jnp.asarray(a)), jax.typeof(jnp.asarray(b))
        if (a.shape, a.dtype) != (b.shape, b.dtype):
            raise ValueError(
                f"{who}: the new model_state has {a.dtype}{list(a.shape)} at {path!r}, the old one "
                f"{b.dtype}{list(b.shape)}; they must agree"
            )


# Gives the params that a function sees, for the time in which it is traced.
Whole: TypeAlias = Callable[[Params], contextlib.AbstractContextManager[Params]]


def of_loss(
    loss_fn: LossFn,
    form: Form,
    whole: Whole = contextlib.nullcontext,
    *,
    tables: Pattern | None = None,
    owners: Owners | None = None,
    recompute: Sequence[str] | None = None,
) -> Objective:
    """Return the objective of a loss function; its gradients are those of `jax.value_and_grad`.

    Args:
      loss_fn: (params, batch) -> loss, or another form.
      form: what it takes and gives beside.
      whole: gives the params that it sees; gradients are those of the params before.
      tables: leaves that are looked up only; see `sparse.value_and_grad`.
      owners: the workers that keep their rows, where they are sharded.
      recompute: names of values that are kept for the backward pass.
    """

    def value(params: Params, model_state: PyTree, *others: Any) -> Values:
        with whole(params) as seen:
            returned = loss_fn(seen, *form.arguments(model_state, *others))
        return form.values("loss_fn", returned, model_state)

    def loss_and_rest(*arguments: Any) -> tuple[jax.Array, tuple[PyTree, PyTree]]:
        loss, *rest = value(*arguments)
        return loss, tuple(rest)

    transform = None
    if recompute is not None:
        transform = functools.partial(recompute_function, names=recompute, argument="recompute")
    if tables is not None:
        differentiated = sparse.value_and_grad(
            loss_and_rest, tables, has_aux=True, transform=transform, owners=owners
        )
    else:
        function = loss_and_rest if transform is None else transform(loss_and_rest)
        differentiated = jax.value_and_grad(function, has_aux=True, allow_int=True)

    def value_and_grad(*arguments: Any) -> tuple[Values, Updates]:
        (loss, rest), grads = differentiated(*arguments)
        return Values(loss, *rest), grads

    if owners is not None:  # the loss alone would look up a worker's part as if it were the table
        return Objective(lambda *arguments: value_and_grad(*arguments)[0], value_and_grad)
    return Objective(value, value_and_grad)


def of_value_and_grad(
    function: Callable[..., Any], form: Form, whole: Whole = contextlib.nullcontext
) -> Objective:
    """Return the objective of a user's own (params, batch) -> (loss, gradients).

    Its gradients are those of the params that it sees, which `whole` gives.
    """

    def value_and_grad(params: Params, model_state: PyTree, batch: Batch) -> tuple[Values, Updates]:
        with whole(params) as seen:
            result = function(seen, *form.arguments(model_state, batch))
        if not (isinstance(result, tuple | list) and len(result) == 2):
            raise TypeError(f"value_and_grad must return the pair ({form.result}, gradients)")
        returned, grads = result
        values = form.values("the value of value_and_grad", returned, model_state)
        mismatch.check_params("value_and_grad", grads, "", "gradient")
        return values, jax.tree.map(_as_array, grads)

    return Objective(lambda *arguments: value_and_grad(*arguments)[0], value_and_grad)


def _as_array(x: Leaf) -> Leaf:
    return jnp.asarray(x) if isinstance(x, int | float) else x


def of_packed(objective: Objective) -> Objective:
    """Return the objective as a function of packed params, with packed gradients."""

    def value(packed: Params, *others: Any) -> Values:
        return objective.value(unpack(packed), *others)

    return Objective(value, unpacked(objective.value_and_grad))


def of_workers(make: Callable[[Whole], Objective], sharding: Sharding, params: Params) -> Objective:
    """Return the objective of all workers, a function of whole arrays that lie on a mesh.

    Loss and gradients are means over the workers. Each worker gathers the params that it needs, and
    gets the part of the gradients that it keeps.

    Args:
      make: returns the objective of one worker.
      sharding: where params lie.
      params: of their shapes.
    """
    specs, grad_specs = sharding.of_params(params), sharding.of_gradients(params)
    tables = sharding.is_table(params)
    objective = make(lambda parts: sharding.whole(parts, specs, tables))
    axis_name = sharding.data_axis

    def mean(values: Values) -> Values:
        loss, aux = mean_over_workers((values.loss, values.aux), axis_name)
        return Values(loss, mean_or_first(values.model_state, axis_name), aux)

    def value(params: Params, model_state: PyTree, batch: Batch, *keys: jax.Array) -> Values:
        return mean(objective.value(params, model_state, batch, *_own_keys(keys, axis_name)))

    def value_and_grad(
        params: Params, model_state: PyTree, batch: Batch, *keys: jax.Array
    ) -> tuple[Values, Updates]:
        values, grads = objective.value_and_grad(
            params, model_state, batch, *_own_keys(keys, axis_name)
        )
        grads = sharding.own_part(grads, params, grad_specs)
        # No device gives back a float0.
        return mean(values), tree.map_arrays(lambda g: g if tree.is_inexact(g) else None, grads)

    def run(function: Callable[..., Any], out_specs: PyTree, *arguments: Any) -> Any:
        batch, *keys = arguments[2:]
        in_specs = (
            jax.tree.map(sharding.on_workers, specs, is_leaf=is_spec),
            P(),
            jax.tree.map(lambda x: batch_spec(x, axis_name), batch),
            *[P()] * len(keys),
        )
        return jax.shard_map(
            function,
            mesh=sharding.mesh,
            in_specs=in_specs,
            out_specs=out_specs,
            axis_names=frozenset(axes(axis_name)),
            check_vma=False,
        )(*arguments)

    def whole_value_and_grad(params: Params, *arguments: Any) -> tuple[Values, Updates]:
        out_specs = jax.tree.map(
            lambda p, spec: sharding.on_workers(spec) if tree.is_inexact(p) else None,
            params,
            grad_specs,
        )
        values, grads = run(value_and_grad, (P(), out_specs), params, *arguments)

        def filled(p: Leaf, g: Leaf) -> Leaf:
            return mismatch.no_gradient(jnp.shape(p)) if g is None else g

        return values, jax.tree.map(filled, params, grads)

    return Objective(functools.partial(run, value, P()), whole_value_and_grad)


def _own_keys(keys: Sequence[jax.Array], axis_name: AxisName) -> list[jax.Array]:
    """Return keys that are different on each worker."""
    return [jax.random.fold_in(key, lax.axis_index(axis_name)) for key in keys]


def value_fn(
    objective: Objective, axis_name: AxisName, *arguments: Any
) -> Callable[[Params], jax.Array]:
    """Return params -> loss on the batch of a step, as transforms that search a line call it.

    Args:
      objective: what the step minimizes.
      axis_name: the mesh axes over whose workers loss and gradients are averaged; None for none.
      *arguments: model state, batch and keys of the step.
    """

    @jax.custom_vjp
    def loss(params: Params) -> jax.Array:
        return mean_over_workers(objective.value(params, *arguments).loss, axis_name)

    def forward(params: Params) -> tuple[jax.Array, Updates]:
        values, grads = objective.value_and_grad(params, *arguments)
        return mean_over_workers((values.loss, grads), axis_name)

    def backward(grads: Updates, cotangent: jax.Array) -> tuple[Updates]:
        def scaled(g: Leaf) -> Leaf:
            if not tree.is_inexact(g):
                return mismatch.no_gradient(jnp.shape(g))
            return cotangent.astype(g.dtype) * g

        return (tree.map_arrays(scaled, leafwise.densify(grads)),)

    loss.defvjp(forward, backward)
    return loss
