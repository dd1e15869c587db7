"""Which way of a step is the fastest that fits: each is compiled, and they are put in order."""

import contextlib
import dataclasses
import functools
import itertools
import json
import math
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import optax
from jax.sharding import Mesh

from optfn import core
from optfn.core import checks, tree
from optfn.core.types import Batch, LossFn, Params, PyTree
from optfn.interop.modules import check_split
from optfn.leaves.contents import runs_by_name
from optfn.mesh.collectives.axes import Axes, join_axes
from optfn.mesh.collectives.mesh import count_devices
from optfn.mesh.compilers.memories import PINNED_HOST
from optfn.mesh.compilers.options import overlap_options
from optfn.mesh.layout.sharding import sharded
from optfn.mesh.state.inventory import find_whole_matrices
from optfn.plan.trial import NOT_COMPILED, Trial, TuneArguments, Way, find_batch_size, find_memory

# Steps whose seconds differ by less are said to be equal, because estimates know no better.
_EQUAL = 0.03
_MICROBATCHES = 1, 2, 4, 8
# From this many leaves on, of at most this many bytes on average, `packed=True` is tried.
_MANY_LEAVES, _SMALL_BYTES = 200, 1 << 16
_TITLES = (
    "way", "batch", "GB kept", "GB temporaries", "fits", "compute ms", "exposed ms", "step ms",
    "examples/s", "compile s",
)  # fmt: skip


def _shown(option: object) -> object:
    """Return an option, or its `repr` if it is a NamedTuple, which JSON would make a list of."""
    return repr(option) if hasattr(option, "_fields") else option


@dataclasses.dataclass(frozen=True)
class Tuning:
    """The ways that `tune` has tried, in the order of their steps.

    `print` shows them as a table. Steps that differ by at most 3 % are equal, and measured ones
    whose spreads overlap, and the simpler way comes first: "≈" marks a step that equals the step in
    the row above. A measured step has "m" and its spread, the least and the greatest milliseconds.
    Ways that do not fit, and ways that failed, come last.

    rows: the figures of each way.
    memory: the bytes of memory of a device; None if they are not known.
    is_complete: whether all ways were tried; False after Ctrl-C.
    """

    rows: tuple[Trial, ...]
    memory: float | None
    is_complete: bool = True

    @property
    def best(self) -> dict[str, Any]:
        """The options of the first way, for `make_train_step`.

        Raises:
          ValueError: no way has seconds that are known, and fits.
        """
        if not (self.rows and self.rows[0].is_usable):
            raise ValueError(f"tune: no way fits and has a time that is known:\n{self}")
        return dict(self.rows[0].way)

    def to_json(self) -> str:
        """Return the table as JSON. An option that JSON has no value for is its `repr`."""
        rows = [
            vars(row) | {"way": {k: _shown(v) for k, v in row.way.items()}} for row in self.rows
        ]
        return json.dumps(vars(self) | {"rows": rows}, default=repr)

    def __str__(self) -> str:
        """Return the table, the problems of ways, and the memory."""
        pairs = itertools.pairwise([None, *self.rows])
        table = [_TITLES, *(_list_cells(x, above) for above, x in pairs if x)]
        widths = [max(map(len, column)) for column in zip(*table, strict=True)]
        lines = [
            "  ".join([cells[0].ljust(widths[0]), *map(str.rjust, cells[1:], widths[1:])])
            for cells in table
        ]
        for problem in dict.fromkeys(x.problem for x in self.rows if x.problem):
            of_ways = dict.fromkeys(describe_way(x.way) for x in self.rows if x.problem == problem)
            lines.append(f"{'; '.join(of_ways)}: {problem}")
        for row in self.rows:
            if row.host_seconds and row.seconds:
                # So many times its products take four fifths of a step.
                count = math.ceil(4 * row.host_seconds / (row.seconds - row.host_seconds))
                lines.append(
                    f"{describe_way(row.way)}: the state takes {1e3 * row.host_seconds:.4g} ms to "
                    f"the device and back in a step, a fifth of one with {count} such batches as "
                    "microbatches"
                )
        memory = "not known" if self.memory is None else f"{self.memory / 1e9:.3g} GB"
        lines.append(f"memory of a device: {memory}")
        return "\n".join(lines if self.is_complete else [*lines, "interrupted: not all were tried"])


def tune(
    loss_fn: LossFn | None,
    tx: optax.GradientTransformation,
    params: Params,
    batch: Batch,
    mesh: Mesh,
    *,
    ways: Sequence[Way] | None = None,
    options: Mapping[str, Any] | None = None,
    model_state: PyTree = None,
    memory: float | None = None,
    measure: int | None = None,
    batch_sizes: Sequence[int] | None = None,
    progress: bool = True,
) -> Tuning:
    """Compile a step in several ways, and return the ways in the order of their seconds, or with
    `batch_sizes` of examples a second. Ways that do not fit or fail come last.

    Nothing is allocated without `measure`, and `mesh` may be of devices that you do not have, as
    `jax.experimental.topologies` describes them. A way that keeps more bytes than a device has is
    not compiled, and a way that fails is a row with its reason. Ctrl-C returns the ways that were
    tried. In a run of several processes all call it, and all get the same order.

    `estimate_step` reads the seconds from the schedules of TPUs and GPUs; with `measure` they are
    measured. If a compiler ends the process, the last line of the progress names the way.

    Args:
      loss_fn: as for `make_train_step`; None if `options` has `value_and_grad`.
      tx: an optimizer.
      params: arrays or ShapeDtypeStructs.
      batch: the batch of all devices, arrays or ShapeDtypeStructs.
      mesh: the devices.
      ways: mappings of options of `make_train_step`. None: nothing divided, "state" and "params",
        and with two data axes both along the last one alone; with hundreds of small leaves
        `packed`; both with `whole=` for stacked matrices that `tx` needs whole. Microbatches are
        doubled up to 8 until a way fits, and a way that fits is tried with `overlap_options` too.
        If none fits, all are tried with the state on the host, `state_memory`.
        Microbatches change a loss over pairs of examples, and batch statistics: give ways without
        them then.
      options: the options of `make_train_step` that all ways share.
      model_state: the model state, arrays or ShapeDtypeStructs; None: the loss takes none.
      memory: the bytes of memory of a device; None: the figure of the device, or the constant of
        its kind.
      measure: k, how many steps of each way are run, each after one that does not count. The ways
        take turns, and the median of their steps counts. Shapes are run as arrays of constants.
        None: the seconds are estimated.
      batch_sizes: lengths of the batch's first axis; a way is tried with each, in this order, until
        one does not fit. Rows are then in the order of examples a second. None: the batch's length.
      progress: whether to show a bar, and without a terminal a line for each way.

    Raises:
      TypeError, ValueError: an argument that is wrong for all ways.

    >>> import jax.numpy as jnp, optfn
    >>> loss_fn = lambda p, x: jnp.mean((x @ p) ** 2)
    >>> tuning = optfn.distributed.tune(
    ...     loss_fn, optfn.adam(1e-3), jnp.ones((64, 64)), jnp.ones((8, 64)),
    ...     optfn.distributed.data_mesh(1), ways=[{"packed": 1}, {}], measure=2, progress=False,
    ... )
    >>> tuning.best, tuning.rows[1].problem
    ({}, 'TypeError: packed must be True or False; got 1 of type int')
    """
    tx = core.check_transform("tune: tx", tx)
    check_split("tune", params)
    checks.instance("tune: mesh", mesh, Mesh, "a jax.sharding.Mesh of devices")
    measure = None if measure is None else checks.count("tune: measure", measure)
    data_axes = join_axes((options or {}).get("data_axis", "data"))
    workers = count_devices(mesh, data_axes)  # raises unless the mesh has these axes
    memory = find_memory(mesh) if memory is None else memory
    shared = TuneArguments(loss_fn, tx, params, mesh, options or {}, model_state, memory, measure)
    change = functools.partial(_change_batch_size, batch)
    batches = [batch] if batch_sizes is None else [*map(change, sorted(batch_sizes))]
    families = _list_ways(shared, data_axes, workers) if ways is None else ways
    tried: list[tuple[Trial, Callable[[Trial], Trial]]] = []

    def attempt(examples: Batch, way: Way) -> Trial:
        say(f"tune: {describe_way(way)}", end=" ")
        tried.append(shared.try_way(way, examples))
        row = tried[-1][0]
        known = "" if row.seconds is None else f"{1e3 * row.seconds:.3f} ms"
        say(known or row.problem or f"fits: {row.fits}")
        return row

    is_complete = False
    shown, say = _show_progress(families, progress)
    with contextlib.suppress(KeyboardInterrupt):
        further = _list_ways_on_host(families, tried) if ways is None else ()
        for family in itertools.chain(shown, further):
            for examples in batches:
                try_one = functools.partial(attempt, examples)
                if ways is None:
                    last = _try_family(try_one, family, find_batch_size(examples), mesh, workers)
                else:
                    last = try_one(family)
                if last.fits is False:
                    break  # a larger batch does not fit either
        for _ in range((measure or 1) - 1):  # in turns: a machine may slow down in between
            tried[:] = [(measure_more(row), measure_more) for row, measure_more in tried]
        is_complete = True
    rows = [row for row, _ in tried]
    return Tuning(tuple(_order(rows, by_rate=batch_sizes is not None)), memory, is_complete)


def describe_way(way: Way) -> str:
    """Return the options of a way in words, behind "whole" if it has no `shard`, and of
    `compiler_options` the name alone."""
    words = [] if "shard" in way else ["whole"]
    words += [k if k == "compiler_options" else f"{k}={v!r}" for k, v in way.items()]
    return ", ".join(words)


def _find_matrices(shared: TuneArguments) -> str:
    """Return the pattern of the stacked leaves whose matrices the optimizer needs whole, "" if
    there are none or the optimizer needs the axes of a mesh."""
    with contextlib.suppress(Exception):
        state = jax.eval_shape(shared.tx.init, shared.params)
        runs = runs_by_name(shared.params)
        found = find_whole_matrices(state, tree.paths(shared.params))
        return "|".join(re.escape(path) for path in found if runs[path].stacked)
    return ""


def _list_ways(shared: TuneArguments, data_axes: Axes, workers: int) -> list[dict[str, Any]]:
    """Return ways of dividing a step, the simplest first, also by whole matrices if the optimizer
    needs some."""
    params, whole = shared.params, _find_matrices(shared)
    sizes = [x.size * x.dtype.itemsize for x in map(jax.typeof, jax.tree.leaves(params))]
    is_small = len(sizes) >= _MANY_LEAVES and sum(sizes) <= len(sizes) * _SMALL_BYTES
    packings: list[dict[str, Any]] = [{}, {"packed": True}] if is_small else [{}]
    kinds: list[Any] = [None, "state", "params"] if workers > 1 else [None]
    if len(data_axes) > 1:
        kinds += [sharded(kind, axis=data_axes[-1]) for kind in ("state", "params")]
    if workers > 1 and whole:
        kinds += [sharded(kind, whole=whole) for kind in ("state", "params")]
    shards = [{} if kind is None else {"shard": kind} for kind in kinds]
    return [shard | packing for shard in shards for packing in packings]


def _list_ways_on_host(
    families: Sequence[Way], tried: Sequence[tuple[Trial, Any]]
) -> Iterator[Way]:
    """Yield the ways with the state on the host if none of those that were tried before fits."""
    if all(row.fits is False for row, _ in tried):
        yield from ({**family, "state_memory": PINNED_HOST} for family in families)


def _try_family(
    attempt: Callable[[Way], Trial], way: Way, batch_size: int | None, mesh: Mesh, workers: int
) -> Trial:
    """Try a way with 1, 2, 4 and 8 microbatches until it fits, then also with `overlap_options`
    where the platform has some, and return the last trial without them."""
    for k in _MICROBATCHES:
        if k > 1 and (batch_size is None or batch_size % (k * workers)):
            continue
        trial = attempt({**way, "microbatches": k} if k > 1 else way)
        if trial.fits is not False or trial.problem == NOT_COMPILED:
            break  # more microbatches keep as much
    extra = overlap_options(mesh)
    if extra and trial.is_usable:
        attempt({**trial.way, "compiler_options": extra})
    return trial


def _change_batch_size(batch: Batch, size: int) -> Batch:
    """Return the shapes of a batch with `size` examples. Scalars are returned unchanged."""
    size = checks.count("tune: batch_sizes", size)

    def of_leaf(x: Any) -> Any:
        shape = jax.typeof(x).shape
        return jax.ShapeDtypeStruct((size, *shape[1:]), jax.typeof(x).dtype) if shape else x

    return jax.tree.map(of_leaf, batch)


def _order(rows: Sequence[Trial], *, by_rate: bool) -> list[Trial]:
    """Return rows in the order of seconds, or of examples a second if `by_rate`. Of equal steps the
    way with fewer options comes first, and rows without seconds, or that do not fit, come last."""

    def cost(row: Trial) -> float:
        assert row.seconds is not None
        return row.seconds / (row.batch_size or 1) if by_rate else row.seconds

    remaining = sorted((row for row in rows if row.is_usable), key=cost)
    ordered: list[Trial] = []
    while remaining:
        same = functools.partial(_are_equal, remaining[0])
        equal = list(itertools.takewhile(same, remaining))
        ordered += sorted(equal, key=lambda row: len(row.way))
        remaining = remaining[len(equal) :]
    others = [row for row in rows if not row.is_usable]
    return ordered + sorted(others, key=lambda row: row.fits is False)


def _are_equal(a: Trial, b: Trial) -> bool:
    """Tell whether the seconds an example of two rows cannot be told apart: they differ by at most
    3 %, or their spreads overlap."""

    def seconds(row: Trial) -> tuple[float, float]:
        assert row.seconds is not None
        low, high = row.spread or (row.seconds, row.seconds)
        return low / (row.batch_size or 1), high / (row.batch_size or 1)

    first, then = sorted([seconds(a), seconds(b)])
    return a is b or then[0] <= (1 + _EQUAL) * first[1]


def _list_cells(row: Trial, above: Trial | None) -> tuple[str, ...]:
    """Return the cells of a row of the table, with "≈" at a step that equals the one above."""

    def cell(x: float | None, factor: float = 1.0, form: str = ".4g") -> str:
        return "" if x is None else format(factor * x, form)

    step = cell(row.seconds, 1e3)
    if row.spread:
        step += f" m ({'–'.join(cell(x, 1e3) for x in row.spread)})"
    if above and above.seconds and row.seconds and above.batch_size == row.batch_size:
        step = f"≈ {step}" if _are_equal(above, row) else step
    return (
        describe_way(row.way), str(row.batch_size or ""), cell(row.kept, 1e-9),
        cell(row.temporaries, 1e-9), {True: "yes", False: "no", None: "?"}[row.fits],
        cell(row.compute, 1e3), cell(row.exposed, 1e3), step,
        cell(row.examples_per_second, form=".4g"), cell(row.compile_seconds, form=".1f"),
    )  # fmt: skip


def _show_progress(
    families: Sequence[Way], shown: bool
) -> tuple[Iterable[Way], Callable[..., object]]:
    """Return the families to iterate over and a `print` for a text about one of them: on a bar over
    the families, without a terminal or tqdm on stderr, or nowhere if progress is not shown."""
    if not shown:
        return families, lambda text, end="": None
    if sys.stderr.isatty():
        with contextlib.suppress(ImportError):
            from tqdm import tqdm

            bar = tqdm(families, unit="family")
            return bar, lambda text, end="": bar.set_postfix_str(text)
    # At once: a compiler may end the process.
    return families, functools.partial(print, file=sys.stderr, flush=True)
