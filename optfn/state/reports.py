"""The metrics of a training step that states in an optimizer's state report.

The type of a state declares them, and the step, its rounds and the history read the declarations:

    @traits(reports={"ratio": Report("spike_ratio", several="max")})
    class MyState(NamedTuple):
        ratio: jax.Array
        inner_state: OptState
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.tree_util import PyTreeDef

from optfn.collectives.devices import Workers
from optfn.core.traits import Report, reporting_types, traits_of
from optfn.core.tree import join, leaves_with_paths
from optfn.core.types import OptState
from optfn.state.names import iterate_nodes as iterate_nodes


def collect_reports(opt_state: OptState) -> dict[str, jax.Array]:
    """Return the metrics that a state reports, by name."""
    found: dict[tuple[str, str], list[jax.Array]] = {}
    for node in iterate_nodes(lambda x: traits_of(x).reports, opt_state):
        for field, report in traits_of(node).reports.items():
            if report is not None:
                for path, x in leaves_with_paths(getattr(node, field)):
                    found.setdefault((join(report.metric, path), report.several), []).append(x)
    return {
        name: values[0] if len(values) == 1 else getattr(jnp, way)(jnp.stack(values))
        for (name, way), values in found.items()
        if way or len(values) == 1
    }


def reduce_over_round(metrics: Mapping[str, jax.Array], workers: Workers) -> dict[str, jax.Array]:
    """Return the reported metrics of a round from those of its steps, (steps,) on each worker."""
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
    """Return the fields of a state that end a run once they are not 0."""
    leaves, structure = jax.tree.flatten(opt_state)
    return [flag._replace(value=leaves[flag.value]) for flag in _find_flags(structure)]


def set_flags(opt_state: OptState, metrics: Mapping[str, jax.Array]) -> OptState:
    """Return a state whose flags that end a run are those of the metrics."""
    leaves, structure = jax.tree.flatten(opt_state)
    for flag in _find_flags(structure):
        leaves[flag.value] = metrics[flag.metric]
    return jax.tree.unflatten(structure, leaves)


@functools.cache
def _find_flags(structure: PyTreeDef) -> list[Flag]:
    """Return the flags of a state, each with its position among the leaves as its value."""
    numbered = jax.tree.unflatten(structure, range(structure.num_leaves))
    return [
        Flag(i, report.metric, functools.partial(report.error, node), report.is_lasting)
        for node in iterate_nodes(lambda x: traits_of(x).reports, numbered)
        for field, report in traits_of(node).reports.items()
        if report is not None and report.error
        for i in jax.tree.leaves(getattr(node, field))
    ]


def is_curve(name: str) -> bool:
    """Tell whether a metric is a reported number, and no flag: the history has it."""
    report = _find_report(name)
    return report is not None and report.several != "any" and report.error is None


def _find_report(name: str) -> Report | None:
    """Return the report of a metric, by the first word of its name."""
    for _, reports in reporting_types():
        for report in reports.values():
            if report is not None and report.metric == name.partition("/")[0]:
                return report
    return None
