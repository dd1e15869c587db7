"""Sharding constraints of a model inside a `shard_map`, whose axes mean nothing to one device.

A model may constrain its arrays over all axes of a mesh. Inside a `shard_map` over some of these
axes an array is what one device has along them, and JAX refuses the constraint.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.extend.core as jex
from jax.sharding import AbstractMesh, NamedSharding
from jax.sharding import PartitionSpec as P

from optfn.collectives.axes import manual_axes, restrict_spec
from optfn.core.types import PyTree
from optfn.jaxprs.equations import Atom, Equation, Jaxpr, Variable


def drop_manual_constraints(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Return fn, whose sharding constraints hold along the axes that no `shard_map` has bound.

    Outside of a `shard_map`, and if no constraint names an axis that it has bound, fn runs as it
    is. Otherwise JAX refuses the constraint; fn is then traced as if the compiler handled all axes,
    and its equations run with the remaining axes of each constraint.
    """

    @functools.wraps(fn)
    def run(*args: Any) -> Any:
        if not manual_axes():
            return fn(*args)
        leaves, structure = jax.tree.flatten(args)  # equinox marks a State that fn reads as used
        try:
            return fn(*args)
        except ValueError as error:
            if not _is_about_manual_axes(error):
                raise
        return _run_without(fn, jax.tree.unflatten(structure, leaves))

    return run


def _is_about_manual_axes(error: ValueError) -> bool:
    text = str(error)
    return "with_sharding_constraint" in text and "Manual" in text


def _run_without(fn: Callable[..., Any], args: PyTree) -> Any:
    """Return fn(*args) with constraints along the axes that are left to the compiler only."""
    mesh = jax.sharding.get_abstract_mesh()
    sizes, names = tuple(mesh.shape.values()), mesh.axis_names
    bound = [(name, mesh.shape[name]) for name in names if name in mesh.manual_axes]
    with jax.sharding.use_abstract_mesh(AbstractMesh(sizes, names)):  # all axes are Auto
        trace = jax.make_jaxpr(fn, axis_env=bound, return_shape=True)
        closed, shape = trace(*jax.tree.map(_shape_of, args))
    program = jex.ClosedJaxpr(_rewrite(closed.jaxpr, mesh), closed.consts)
    results = jex.jaxpr_as_fun(program)(*jax.tree.leaves(args))
    return jax.tree.unflatten(jax.tree.structure(shape), results)


def _shape_of(x: Any) -> jax.ShapeDtypeStruct:
    """Return the shape and dtype of an array, without the mesh in its type."""
    return jax.ShapeDtypeStruct(x.shape, x.dtype, weak_type=getattr(x, "weak_type", False))


def _rewrite(jaxpr: Jaxpr, mesh: AbstractMesh) -> Jaxpr:
    """Return a jaxpr for a mesh, with constraints along its Auto axes, also in inner jaxprs."""
    same: dict[Variable, Atom] = {}  # a result without a constraint is the operand

    def replace(atom: Atom) -> Atom:
        return same.get(atom, atom) if isinstance(atom, jex.Var) else atom

    equations: list[Equation] = []
    for equation in jaxpr.eqns:
        # An equation has the mesh of its trace in its context, beside options that it keeps.
        with equation.ctx.manager, jax.sharding.use_abstract_mesh(mesh):
            context = type(equation.ctx)()
        params = {name: _rewrite_inner(x, mesh) for name, x in equation.params.items()}
        operands = [replace(atom) for atom in equation.invars]
        if equation.primitive.name == "sharding_constraint":
            placement = _restrict(equation.params["sharding"], mesh)
            if placement is None:
                same[equation.outvars[0]] = operands[0]
                continue
            params |= {"sharding": placement, "context_mesh": mesh}
        equations.append(equation.replace(invars=operands, params=params, ctx=context))
    return jaxpr.replace(eqns=equations, outvars=[replace(atom) for atom in jaxpr.outvars])


def _restrict(placement: Any, mesh: AbstractMesh) -> NamedSharding | None:
    """Return a sharding along the Auto axes of a mesh; None if nothing of it is left."""
    spec = restrict_spec(getattr(placement, "spec", P()), mesh.auto_axes)
    return NamedSharding(mesh, spec) if any(spec) else None


def _rewrite_inner(x: Any, mesh: AbstractMesh) -> Any:
    """Return a param of an equation, with jaxprs in it rewritten."""
    if isinstance(x, jex.ClosedJaxpr):
        return jex.ClosedJaxpr(_rewrite(x.jaxpr, mesh), x.consts)
    if isinstance(x, jex.Jaxpr):
        return _rewrite(x, mesh)
    are_jaxprs = isinstance(x, tuple) and x and isinstance(x[0], jex.ClosedJaxpr)
    return tuple(_rewrite_inner(branch, mesh) for branch in x) if are_jaxprs else x
