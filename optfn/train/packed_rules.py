"""Rules that a buffer of several leaves would change, found by running them before the first step.

A transformation of another library, or a rule that a user writes, sees a buffer as one flat array.
A norm, a mean or a product of an array would cover all leaves together. A mask or a label by the
axes, the size or the path of an array would choose another rule. So a few steps run on the tree and
on the buffers, and their updates are compared. Transformations of optfn look up where each leaf
begins, and need no such run.
"""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from optfn import core
from optfn.core import checks, numerics, tree
from optfn.core.traits import traits_of
from optfn.core.types import Leaf, OptState, Params, PyTree, Updates
from optfn.interop.calls import show_transform
from optfn.leaves.layout import PackedLayout
from optfn.leaves.nodes import Packed
from optfn.leaves.packed import make_packed_layout, unpack
from optfn.loss.jaxprs.equations import draws_random_numbers
from optfn.mesh.state.names import iterate_nodes
from optfn.wrappers.attributes import ParamAttr

_REMEDY = (
    "Leave packed=True out, or use transformations of optfn, which know the leaves of a buffer, "
    "such as optfn.lamb, optfn.lars, optfn.muon and optfn.clip_by_norm, with exclude= or "
    "param_attrs= in the place of masks and labels"
)
# The decades of the elements of params and of gradients: large params show a small decay, and
# gradients of all sizes the limit of a clip.
_DECADES_OF_PARAMS, _DECADES_OF_GRADIENTS = (-1.0, 3.0), (-3.0, 3.0)
# The second update depends on the state that the first one left. Where gradients are accumulated,
# the first updates are 0.
_STEPS_WITH_UPDATE, _MOST_STEPS = 2, 32
# Updates may differ by this part of the largest one of their leaf: in float64 sums in another order
# differ by 1e-15, and by 1e-7 where a rule casts them to float32.
_LEAST_TOLERANCE = 1e-5


def refuse_changed_rules(argument: str, tx: optax.GradientTransformation, params: Params) -> None:
    """Run `tx` on `params` and on their buffers, and raise a ValueError if updates differ. Rules of
    optfn, and rules that cannot be judged, pass. A rule that cannot run outside of a training step,
    draws random numbers, or has moments in 8 bits is not judged.

    Two steps run on a CPU, eagerly and in float64, on the tree and on its buffers, with params and
    gradients of the true shapes and of drawn values. A rule that changes only later is not seen.

    Args:
      argument: the name of `tx` in the message, "tx" or "outer".
      tx: the optimizer.
      params: the tree before it is packed, arrays or their shapes.

    Raises:
      ValueError: an update of a leaf differs. The message names the leaf.
    """
    if _is_of_optfn(tx):
        return
    # `TrainStep.lower` traces `init`.
    eagerly = jax.ensure_compile_time_eval if checks.is_traced(params) else nullcontext
    with eagerly(), _on_cpu():
        problem = _describe_change(tx, params)
    if problem:
        raise ValueError(
            f"{argument}={show_transform(tx)} cannot be combined with packed=True: {problem}. "
            f"{_REMEDY}"
        )


def _is_of_optfn(tx: object) -> bool:
    """Tell whether `tx` and all transformations inside it are optfn's."""
    if not isinstance(tx, core.Transform) or checks.package(tx.module) != "optfn":
        return False
    return all(map(_is_of_optfn, _list_inside(tx)))


def _list_inside(tx: object) -> list[Any]:
    """Return the transformations among the arguments of the call that made one of optfn, and in its
    attributes, or [] for another one."""
    if not isinstance(tx, core.Transform):
        return []
    _, positional, named = tx.call
    attrs = (named.get("param_attrs") or {}).values()
    penalties = (attr.regularization for attr in attrs if isinstance(attr, ParamAttr))
    # optax.MultiSteps is not a transformation, but has both functions.
    found = (*positional, *named.values(), *penalties)
    return [x for x in found if hasattr(x, "init") and hasattr(x, "update")]


def _on_cpu() -> Any:
    """Return a context that makes arrays on a CPU, or one without effect if this process may not
    use a CPU."""
    try:
        return jax.default_device(jax.local_devices(backend="cpu")[0])
    except RuntimeError:  # JAX_PLATFORMS leaves CPUs out
        return nullcontext()


def _describe_change(tx: optax.GradientTransformation, params: Params) -> str:
    """Return the change that packing `params` makes to updates of `tx`, with the leaf, or "" if
    none is found or the rule cannot run."""
    for is_wide in (True, False):
        with jax.enable_x64(True) if is_wide else nullcontext():
            trial = _Trial(optax.with_extra_args_support(tx), params, is_wide)
            try:
                return trial.compare()
            # The rule needs the axes of a mesh, arguments that only a step has, or float32.
            except Exception:
                continue
    # An exchange needs axes, but the rules beside it may not.
    foreign = (x for x in _list_inside(tx) if not _is_of_optfn(x))
    return next(filter(None, (_describe_change(x, params) for x in foreign)), "")


class _Trial:
    """Steps of a transformation on a tree and on its buffers, side by side.

    Args:
      tx: the transformation.
      params: the tree; only its shapes and dtypes are read.
      is_wide: whether leaves are float64 or complex128 in place of their dtypes.
    """

    def __init__(
        self, tx: optax.GradientTransformationExtraArgs, params: Params, is_wide: bool
    ) -> None:
        self.tx = tx
        self.layout: PackedLayout = make_packed_layout(params)
        self.compared = [i for buffer in self.layout.buffers for i in buffer.leaves]
        self.leaves = tree.leaves(params)
        self.is_wide = is_wide
        self.rng = np.random.default_rng(0)

    def compare(self) -> str:
        """Run steps on tree and buffers, and return the first difference of their updates, or "" if
        there is none or the rule is random or in 8 bits."""
        forms = self._make_tree, self._make_packed
        start = self._draw(_DECADES_OF_PARAMS)
        states = [self.tx.init(self._make_tree(start))]
        try:
            states.append(self.tx.init(self._make_packed(start)))
        except Exception:
            return (
                "its init takes the tree and not flat buffers of its leaves, as with labels or a "
                "mask that have the structure of the tree"
            )
        if any(iterate_nodes(lambda x: traits_of(x).spans_buffers, states[0])):
            return ""  # moments in 8 bits have a scale for a buffer, as `pack` says
        with_update = 0
        for _ in range(_MOST_STEPS):
            params = self._draw(_DECADES_OF_PARAMS)
            grads = self._draw(_DECADES_OF_GRADIENTS, is_gradient=True)
            found = [
                self._update(form, params, grads, state)
                for form, state in zip(forms, states, strict=True)
            ]
            # NumPy takes thousands of leaves apart in the time of a few of JAX's dispatches.
            on_tree, on_buffers = (tree.leaves(unpack(jax.device_get(u))) for u, _ in found)
            problem = self._describe_difference(on_tree, on_buffers, _tolerance_of(states[0]))
            if problem:
                # Leaves of different shapes draw different numbers, by the same rule.
                arguments = self._make_tree, params, grads, states[0]
                return "" if draws_random_numbers(self._update, *arguments) else problem
            states = [state for _, state in found]
            with_update += any(np.any(on_tree[i]) for i in self.compared)
            if with_update == _STEPS_WITH_UPDATE:
                break
        return ""

    def _draw(self, decades: tuple[float, float], is_gradient: bool = False) -> list[Leaf]:
        """Return leaves of NumPy whose elements lie in some decades, with 0 for a leaf that is in
        no buffer and float0 for the gradient of an integer."""
        drawn: list[Leaf] = [
            numerics.float0_zeros(jnp.shape(x))
            if is_gradient and not tree.is_inexact(x)
            else np.zeros(jnp.shape(x), x.dtype)
            for x in self.leaves
        ]
        for i in self.compared:
            x = self.leaves[i]
            size = 10 ** self.rng.uniform(*decades, x.shape)
            numbers = self.rng.choice([-1.0, 1.0], x.shape) * size
            if jnp.issubdtype(x.dtype, jnp.complexfloating):
                numbers = numbers * np.exp(1j * self.rng.uniform(0, np.pi, x.shape))
            drawn[i] = numbers if self.is_wide else numbers.astype(x.dtype)
        return drawn

    def _make_tree(self, leaves: Sequence[Leaf]) -> PyTree:
        """Return the leaves as a tree of JAX's arrays."""
        return self.layout.structure.unflatten([_to_device(x) for x in leaves])

    def _make_packed(self, leaves: Sequence[Leaf]) -> Packed:
        """Return the leaves in buffers."""
        buffers = [
            jnp.asarray(np.concatenate([leaves[i].ravel() for i in buffer.leaves]))
            for buffer in self.layout.buffers
        ]
        frozen = [_to_device(leaves[i]) for i in self.layout.frozen]
        return Packed(buffers, frozen, self.layout)

    def _update(
        self,
        form: Callable[[Sequence[Leaf]], PyTree],
        params: Sequence[Leaf],
        grads: Sequence[Leaf],
        state: OptState,
    ) -> tuple[Updates, OptState]:
        """Return updates and the next state, of the tree or its buffers, for the loss ⟨g, p⟩."""

        def loss(p: Sequence[Leaf], xp: Any) -> Any:
            return sum(xp.sum(p[i] * grads[i]).real for i in self.compared)

        extra = {
            "value": jnp.asarray(loss(params, np)),
            "grad": form(grads),
            "value_fn": lambda p: loss(tree.leaves(unpack(p)), jnp),
        }
        updates, state = self.tx.update(extra["grad"], state, form(params), **extra)
        return updates, state

    def _describe_difference(
        self, on_tree: Sequence[Leaf], on_buffers: Sequence[Leaf], tolerance: float
    ) -> str:
        """Return the first leaf whose updates differ by more than a part of their largest element,
        with an element of both, or "" if all agree."""
        for i in self.compared:
            a, b = on_tree[i], on_buffers[i]
            if not np.issubdtype(a.dtype, np.complexfloating):
                a, b = a.astype(np.float64), b.astype(np.float64)  # bfloat16 too
            finite = np.abs(a[np.isfinite(a)])
            largest = finite.max() if finite.size else 0.0
            same = np.isclose(a, b, rtol=0.0, atol=tolerance * largest, equal_nan=True)
            if not same.all():
                at = np.unravel_index(np.argmin(same), same.shape)
                return (
                    f"of an element of leaf {self.layout.paths[i]!r} the update is {a[at]:.4g}, "
                    f"and {b[at]:.4g} in a flat buffer of leaves, as with a norm, a mean or a "
                    "product of a leaf, or a mask or a label by its axes, size or path"
                )
        return ""


def _tolerance_of(state: OptState) -> float:
    """Return the tolerated difference of updates, as a part of the largest update: some units of
    the last place of the narrowest moments, which optfn rounds at random."""
    dtypes = {x.dtype for x in jax.tree.leaves(state) if tree.is_inexact(x)}
    return max([_LEAST_TOLERANCE, *(4 * float(jnp.finfo(dtype).eps) for dtype in dtypes)])


def _to_device(x: Leaf) -> Leaf:
    """Return a leaf as an array of JAX, or unchanged if its dtype is float0."""
    return x if x.dtype == jax.dtypes.float0 else jnp.asarray(x)
