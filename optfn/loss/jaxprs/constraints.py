"""Sharding constraints of a loss along axes that a `shard_map` has bound.

Inside a `shard_map` an array is the shard of one device, and JAX refuses a constraint that divides
it along a bound ("Manual") axis. There the constraint means nothing, so `drop_bound_axes` drops it:

1. It traces the function as if the compiler handled all axes. JAX then takes every constraint.
2. It writes the bound axes into the program: into types and meshes, and out of the constraints.
   Constraints along the remaining axes stay.
3. It runs the program.

Functions that a custom derivative keeps for later still hold the mesh of step 1, so the traced
function must be the whole gradient, which has called them.
"""

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
import jax.extend.core as jex
import numpy as np
from jax.extend import source_info_util
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from optfn.core.types import PyTree
from optfn.loss.jaxprs import primitives
from optfn.loss.jaxprs.primitives import Atom, Equation, Variable
from optfn.mesh.collectives.axes import to_axes


def drop_bound_axes(fn: Callable[..., PyTree], *args: PyTree) -> PyTree:
    """Return fn(*args), or, if JAX refuses its sharding constraints along bound axes, trace it
    again, drop them, and run the program that remains.

    Raises:
      ValueError: `fn` has shardings as types, which it can have along explicit axes only; or it has
        constraints that JAX refuses on any mesh, though it runs without a mesh.
    """
    mesh = jax.sharding.get_abstract_mesh()
    try:
        return fn(*args)
    except ValueError as error:
        closed, shape = _trace_with_constraints(error, mesh, fn, args)
    bound = _Binding(mesh).bind_program(closed)
    results = jex.jaxpr_as_fun(bound)(*jax.tree.leaves(args))
    return jax.tree.unflatten(jax.tree.structure(shape), results)


def _trace_with_constraints(
    error: ValueError, mesh: AbstractMesh, fn: Callable[..., PyTree], args: PyTree
) -> tuple[jex.ClosedJaxpr, PyTree]:
    """Trace fn(*args) as if the compiler handled all axes, and return its program and the shapes of
    its results, or raise an error that bound axes do not explain.

    Three further meshes are tried: the meshes where the function can be traced show the use of an
    axis that JAX has refused.

    Args:
      error: the error where some axes of `mesh` are bound; raised again if they did not cause it.
    """
    shapes = jax.tree.map(_type_without_placement, args)
    use_mesh = jax.sharding.use_abstract_mesh

    def trace(other: AbstractMesh) -> tuple[jex.ClosedJaxpr, PyTree]:
        # A mesh of another size may follow an empty one only.
        with use_mesh(AbstractMesh((), ())), use_mesh(other):
            return jax.make_jaxpr(fn, return_shape=True)(*shapes)

    if not mesh.manual_axes:
        raise error
    left: Exception = error  # the error that remains where JAX takes all constraints
    try:
        traced = trace(mesh.update_axis_types(dict.fromkeys(mesh.manual_axes, AxisType.Auto)))
    except NameError:  # The function uses a bound axis by its name.
        pass
    except Exception as error_with_constraints:
        left = error_with_constraints
    else:
        if not any(_find_constraints(traced[0], mesh.manual_axes)):
            raise error
        return traced
    raise _explain_refusal(error, mesh, trace) or left


def _explain_refusal(
    error: ValueError, mesh: AbstractMesh, trace: Callable[[AbstractMesh], Any]
) -> ValueError | None:
    """Return a ValueError with a remedy if the function has shardings as types, or runs only
    without a mesh, and None if it fails without a mesh too.

    Args:
      error: the error that JAX has raised.
      mesh: the abstract mesh, whose manual axes are bound.
      trace: traces the function on another mesh.
    """

    def trace_or_none(other: AbstractMesh) -> Any:
        try:
            return trace(other)
        except Exception:
            return None

    # Explicit axes divide arrays evenly, as axes of size 1 do.
    of_one = AbstractMesh((1,) * len(mesh.axis_names), mesh.axis_names, mesh.axis_types)
    explicit = of_one.update_axis_types(dict.fromkeys(mesh.manual_axes, AxisType.Explicit))
    alone = trace_or_none(AbstractMesh((), ()))
    if trace_or_none(explicit) is not None or (alone is not None and _has_types(alone[0])):
        return _with_cause(
            error,
            "the loss gives arrays shardings as types (jax.sharding.reshard, out_sharding=). JAX "
            "has these along explicit axes only, and inside a worker data_axis is not explicit. "
            'Pass partitioner="compiler" beside mesh, or use jax.lax.with_sharding_constraint and '
            "a mesh with Auto axes",
        )
    if alone is None:
        return None
    return _with_cause(
        error,
        "the loss runs without a mesh, but JAX refuses a sharding constraint in it, as of a "
        "box of flax whose names are not those of the mesh, or more than the axes of the array "
        "(nn.DenseGeneral makes a kernel flat). Correct the constraint, or leave all of them "
        "out in the loss: with jax.sharding.use_abstract_mesh("
        "jax.sharding.AbstractMesh((), ())): ..",
    )


def _with_cause(error: ValueError, words: str) -> ValueError:
    """Return a ValueError of `words` and JAX's message, with JAX's error as its cause."""
    explained = ValueError(f"{words}. JAX says: {error}")
    explained.__cause__ = error
    return explained


@contextlib.contextmanager
def name_refused_constraints(trace: Callable[[], Any]) -> Iterator[None]:
    """Turn a ValueError of the `with` block into an error that names the first NamedSharding that
    JAX refuses, or raise it unchanged if the traced program has no NamedSharding.

    JAX refuses these constraints only when it lowers a program for its devices.

    Args:
      trace: returns the jaxpr of the program. It is called after an error.

    Raises:
      ValueError: a NamedSharding of a mesh constrains an array inside a `shard_map`, where axes of
        that mesh are bound. The mesh does not say so, and the trace takes it.
    """
    try:
        yield
    except ValueError as error:
        try:
            found = next(_find_constraints(trace(), ()), None)
        except Exception:
            found = None  # The trace itself has raised the error.
        if found is None:
            raise
        where, spec = source_info_util.summarize(found[0].source_info), found[1].spec
        raise ValueError(
            f"the loss constrains an array by a NamedSharding of a mesh, with the spec {spec} "
            f"({where}), which JAX refuses inside a worker. Write the PartitionSpec alone, "
            "jax.lax.with_sharding_constraint(x, P(...)), which a worker drops along data_axis; or "
            f'pass partitioner="compiler" beside mesh. JAX says: {error}'
        ) from error


def _find_constraints(
    program: Any, bound: Sequence[str]
) -> Iterator[tuple[Equation, NamedSharding]]:
    """Yield each equation, to any depth, that constrains an array by a NamedSharding, and the
    sharding, if the sharding's mesh lacks the mark of an axis that is bound.

    Args:
      bound: the axes that are bound where the program runs; a `shard_map` in it binds further ones.
    """
    for equation in primitives.drop_constants(program).eqns:
        constraint = primitives.as_constraint(equation)
        if constraint is not None and isinstance(constraint.sharding, NamedSharding):
            sharding = constraint.sharding
            if not {*bound} <= {*sharding.mesh.abstract_mesh.manual_axes}:
                yield equation, sharding
        within = *bound, *primitives.find_bound_axes(equation)
        for inner in primitives.find_inner_jaxprs(equation):
            yield from _find_constraints(inner, within)


def _has_types(program: Any) -> bool:
    """Tell whether an equation of a program, or of a function inside, gives its result a sharding
    as a type."""
    equations = primitives.walk(primitives.drop_constants(program))
    return any(map(primitives.has_sharding_as_type, equations))


def _type_without_placement(x: Any) -> jax.ShapeDtypeStruct:
    """Return the shape and dtype of an array or a number, and whether it is weakly typed, without
    its sharding."""
    kind = jax.typeof(x)
    return jax.ShapeDtypeStruct(kind.shape, kind.dtype, weak_type=kind.weak_type)


class _Binding:
    """Writes the bound axes of a mesh into programs that were traced without them.

    Args:
      mesh: the abstract mesh inside the `shard_map`.
    """

    def __init__(self, mesh: AbstractMesh) -> None:
        self._real, self._axes = mesh, mesh.manual_axes
        # The calls of a jitted function share its jaxpr, and XLA gets it once. The old jaxprs and
        # contexts are kept, so that no new object gets their ids.
        self._found: dict[int, tuple[Any, Any]] = {}

    def bind_program(self, x: Any) -> Any:
        """Return a jaxpr with bound axes in all its types, meshes and shardings, the same object
        each time it is given the same jaxpr."""
        if id(x) not in self._found:
            self._found[id(x)] = x, self._rewrite(x)
        return self._found[id(x)][1]

    def _rewrite(self, program: Any) -> Any:
        """Return a copy of a jaxpr, closed or not, with bound axes and without the constraints that
        mean nothing."""
        jaxpr = primitives.drop_constants(program)
        values: dict[Variable, Atom] = {}

        def define(names: Iterable[Variable]) -> list[Variable]:
            made = [type(v)(self._type(v.aval)) for v in names]
            values.update(zip(names, made, strict=True))
            return made

        def read(atoms: Iterable[Atom]) -> list[Atom]:
            return [self._literal(a) if isinstance(a, jex.Literal) else values[a] for a in atoms]

        constants, inputs = define(jaxpr.constvars), define(jaxpr.invars)
        equations = []
        for e in jaxpr.eqns:
            if self._means_nothing(e):
                values |= zip(e.outvars, read(e.invars), strict=True)
                continue
            params = {name: self._param(x) for name, x in e.params.items()}
            arguments = read(e.invars)
            equations.append(
                e.replace(arguments, define(e.outvars), params=params, ctx=self._context(e.ctx))
            )
        new = jaxpr.replace(
            constvars=constants,
            invars=inputs,
            outvars=read(jaxpr.outvars),
            eqns=equations,
            debug_info=jaxpr.debug_info,
        )
        return program.replace(jaxpr=new) if isinstance(program, jex.ClosedJaxpr) else new

    def _literal(self, a: jex.Literal) -> jex.Literal:
        """Return a literal with bound axes in its type."""
        # JAX keeps literals as a subclass of NumPy's array that has a type, with the old mesh.
        value = np.asarray(a.val) if isinstance(a.val, np.ndarray) else a.val
        return jex.Literal(value, self._type(a.aval))

    def _means_nothing(self, equation: Equation) -> bool:
        """Tell whether an equation is a constraint on a mesh whose axes are all bound, and asks for
        no layout in memory."""
        constraint = primitives.as_constraint(equation)
        if constraint is None or constraint.has_layout:
            return False
        sharding = constraint.sharding
        is_on_mesh = isinstance(sharding, NamedSharding)
        return is_on_mesh and set(sharding.mesh.axis_names) <= set(self._axes)

    def _param(self, x: Any) -> Any:
        """Return a param of an equation with bound axes in its jaxprs, meshes and shardings, also
        in tuples and lists."""
        if isinstance(x, jex.Jaxpr | jex.ClosedJaxpr):
            return self.bind_program(x)
        if isinstance(x, AbstractMesh | Mesh):
            return self._mesh(x)
        if isinstance(x, NamedSharding):
            return self._sharding(x)
        if isinstance(x, tuple) and hasattr(x, "_fields"):  # the functions of custom_linear_solve
            return type(x)(*map(self._param, x))
        return type(x)(map(self._param, x)) if type(x) in (tuple, list) else x

    def _mesh(self, mesh: AbstractMesh | Mesh) -> AbstractMesh | Mesh:
        """Return the abstract mesh with bound axes as manual ones, or a mesh that has different
        axes, such as the empty one, unchanged."""
        if mesh.axis_names != self._real.axis_names:  # such as the empty mesh
            return mesh
        return mesh.abstract_mesh.update_axis_types(dict.fromkeys(self._axes, AxisType.Manual))

    def _sharding(self, sharding: NamedSharding) -> NamedSharding:
        """Return a sharding on the mesh with bound axes, whose spec has these axes left out."""
        entries: list[Any] = []
        for entry in sharding.spec:
            if entry is not P.UNCONSTRAINED:
                entry = tuple(axis for axis in to_axes(entry) if axis not in self._axes) or None
            entries.append(entry)
        mesh, kind = self._mesh(sharding.mesh), sharding.memory_kind
        return NamedSharding(mesh, P(*entries), memory_kind=kind)

    def _type(self, aval: Any) -> Any:
        """Return an abstract value with bound axes in its sharding, or unchanged if it has none."""
        sharding = getattr(aval, "sharding", None)
        return aval if sharding is None else aval.update(sharding=self._sharding(sharding))

    def _context(self, context: Any) -> Any:
        """Return the context of an equation, such as its precision, on the mesh with bound axes,
        the same object for the same context."""
        if id(context) not in self._found:
            mesh: Any = self._mesh(context.cur_abstract_mesh)
            with context.manager, jax.sharding.use_abstract_mesh(mesh):
                self._found[id(context)] = context, type(context)()
        return self._found[id(context)][1]
