"""The objective of a step that is left to the compiler, which divides the loss over a mesh.

The loss sees whole arrays, as on one device, and XLA divides the work by the placements of params
and batch, and by the constraints in the model.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from optfn.core import tree
from optfn.core.types import Leaf, LeafKind, Updates
from optfn.loss.loss_form import Inputs, Values
from optfn.loss.microbatches import SplitExamples, split_array, split_in_order
from optfn.loss.objective import Objective
from optfn.mesh.collectives.mesh import constrain_sharding, count_devices, show_explicit_axes
from optfn.mesh.layout.data_parallel import batch_spec
from optfn.mesh.layout.mesh_layout import Layout


def show_axes_to_loss(objective: Objective, layout: Layout) -> Objective:
    """Wrap an objective so that it sees the explicit axes of the mesh, with params by the layout's
    specs, examples divided over the data axes, and the remaining arrays whole.

    In the rest of the step these axes are hidden.
    """

    def run(inputs: Inputs) -> tuple[Values, Updates]:
        whole: Any = P()
        batch = jax.tree.map(lambda x: batch_spec(x, layout.data_axes), inputs.batch)
        params = layout.param_specs(inputs.params)
        specs = Inputs(params, whole, batch, whole, whole, whole, whole)
        return show_explicit_axes(objective, layout.mesh, (specs,))(inputs)

    return run


def constrain_gradients(objective: Objective, layout: Layout) -> Objective:
    """Make an objective constrain its gradients to the sharding of the layout, except rows,
    integers, and leaves that need padding.

    Otherwise the compiler may keep whole gradients of params that are whole, although the state is
    divided.
    """

    def run(inputs: Inputs) -> tuple[Values, Updates]:
        values, grads = objective(inputs)

        def constrain(g: Leaf, spec: P) -> Leaf:
            if isinstance(g, LeafKind) or not tree.is_inexact(g):
                return g
            padded = layout.pad_shape(jnp.shape(g), spec)
            return constrain_sharding(g, layout.mesh, spec) if padded == g.shape else g

        return values, tree.map(constrain, grads, layout.gradient_specs(inputs.params))

    return run


def split_over_devices(layout: Layout) -> SplitExamples:
    """Return the function that splits arrays into microbatches with examples of every device, or
    all in order if devices and microbatches together do not divide one of them.

    Slices in order would each lie on few devices, which would send examples to the rest. An example
    may have several rows, which must come with it.
    """
    devices = count_devices(layout.mesh, layout.data_axes)

    def interleave(x: jax.Array, count: int) -> jax.Array:
        by_device = jnp.reshape(x, (devices, count, -1, *x.shape[1:]))
        slices = split_array(jnp.swapaxes(by_device, 0, 1).reshape(x.shape), count)
        return constrain_sharding(slices, layout.mesh, P(None, layout.data_axes))

    def split(arrays: list[jax.Array], count: int) -> list[jax.Array]:
        if any(x.shape[0] % (devices * count) for x in arrays):
            return split_in_order(arrays, count)
        return [interleave(x, count) for x in arrays]

    return split
