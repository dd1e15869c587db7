"""The metrics of a training step that states in an optimizer's state report.

The type of a state declares them, and the step, its rounds and the history read the declarations:

    @traits(reports={"ratio": Report("spike_ratio", several="max")})
    class MyState(NamedTuple):
        ratio: jax.Array
        inner_state: OptState
"""

import functools
import itertools
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import PyTreeDef

from optfn.core import checks
from optfn.core.traits import Report, reporting_types, traits_of
from optfn.core.tree import join, leaves_with_paths
from optfn.core.types import OptState
from optfn.mesh.collectives.devices import Workers
from optfn.mesh.state.names import iterate_nodes as iterate_nodes


def collect_reports(opt_state: OptState) -> dict[str, jax.Array]:
    """Return the metrics that a state reports, by name, with several of one name reduced as
    declared, or left out without a declaration."""
    found: dict[tuple[str, str], list[jax.Array]] = {}
    for node in iterate_nodes(lambda x: traits_of(x).reports, opt_state):
        for field, report in traits_of(node).reports.items():
            if report is not None:
                for path, x in leaves_with_paths(getattr(node, field)):
                    found.setdefault((join(report.metric, path), report.several), []).append(x)
    reports = {}
    for (name, way), values in found.items():
        if len(values) == 1:
            reports[name] = values[0]
        elif way:
            reports[name] = getattr(jnp, way)(jnp.stack(values))
    return reports


def reduce_over_round(metrics: Mapping[str, jax.Array], workers: Workers) -> dict[str, jax.Array]:
    """Reduce the metrics of a round's steps, (steps,), to one value each, over workers too, and
    leave out metrics whose report does not say how."""
    reduced = {}
    for name, x in metrics.items():
        if (report := _find_report(name)) and (way := report.rounds):
            reduced[name] = getattr(workers, way)(getattr(jnp, way)(x))
    return reduced


class Flag(NamedTuple):
    """A field of a state that ends a run once it is not 0.

    value: a scalar, or an array with one element for each worker, (N,).
    metric: its name among the metrics of a step.
    error: the value -> the error.
    is_lasting: whether it keeps its value once it is not 0.
    """

    value: Any
    metric: str
    error: Callable[[int], Exception]
    is_lasting: bool


def get_flags(opt_state: OptState) -> list[Flag]:
    """Return the fields that end a run once they are not 0, with their values."""
    leaves, structure = jax.tree.flatten(opt_state)
    return [flag._replace(value=leaves[flag.value]) for flag in find_flags(structure)]


def set_flags(opt_state: OptState, metrics: Mapping[str, jax.Array]) -> OptState:
    """Return the state with each flag that ends a run replaced by the metric of its name, or raise
    a KeyError if `metrics` lacks it."""
    leaves, structure = jax.tree.flatten(opt_state)
    for flag in find_flags(structure):
        leaves[flag.value] = metrics[flag.metric]
    return jax.tree.unflatten(structure, leaves)


def raise_flags(flags: Iterable[Flag]) -> None:
    """Raise the error of the first flag that is not 0, on any worker that this process reads, or do
    nothing if there is none."""
    for flag in flags:
        value = read_local(flag.value)
        if np.any(value):
            raise flag.error(int(np.max(value)))


def raise_lasting_flags(opt_state: OptState) -> None:
    """Raise the error of the first flag of a state that keeps its value and is not 0, and do not
    read traced flags."""
    flags = get_flags(opt_state)
    raise_flags(x for x in flags if x.is_lasting and not checks.is_traced(x.value))


def read_local(x: Any) -> np.ndarray[Any, Any]:
    """Return an array on the host, or only the shard or copy of this process's first device if
    processes divide it."""
    is_spread = isinstance(x, jax.Array) and not x.is_fully_addressable
    return np.asarray(x.addressable_data(0) if is_spread else x)


def is_ready(x: Any) -> bool:
    """Tell whether the value of an array can be read without waiting, as NumPy's always can."""
    return not isinstance(x, jax.Array) or bool(x.is_ready())  # type: ignore[attr-defined]


@functools.cache
def find_flags(structure: PyTreeDef) -> list[Flag]:
    """Return the flags of a structure, with leaf positions as values."""
    # Positions instead of arrays: the cache must not keep a state alive.
    numbered = jax.tree.unflatten(structure, range(structure.num_leaves))
    flags = []
    for node in iterate_nodes(lambda x: traits_of(x).reports, numbered):
        for field, report in traits_of(node).reports.items():
            if report is not None and report.error:
                # `node` has positions for arrays; an error may read its paths only.
                error = functools.partial(report.error, node)
                places = jax.tree.leaves(getattr(node, field))
                flags += [Flag(i, report.metric, error, report.is_lasting) for i in places]
    return flags


def is_curve(name: str) -> bool:
    """Tell whether a type reports a metric that neither ends a run nor is combined by "any", so
    that the history keeps it."""
    report = _find_report(name)
    return report is not None and report.several != "any" and report.error is None


def _find_report(name: str) -> Report | None:
    """Return the report whose metric is the first word of a name, or None if no type declares
    it."""
    metric = name.partition("/")[0]
    declared = itertools.chain.from_iterable(x.values() for _, x in reporting_types())
    return next((x for x in declared if x is not None and x.metric == metric), None)
