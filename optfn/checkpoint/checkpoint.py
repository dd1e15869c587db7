"""Checkpoints of a run: one npz file for each saved step, or one directory for all processes.

A checkpoint is written as a whole or not at all.
"""

import dataclasses
import functools
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import optax

from optfn import core
from optfn.checkpoint.background import STARTS_THREADS_AT_EXIT, start_write, wait_for_writes
from optfn.checkpoint.changes import Changes
from optfn.checkpoint.directory import OrbaxDirectory, is_directory_default
from optfn.checkpoint.file import NpzFile
from optfn.checkpoint.finiteness import may_keep_last_loss
from optfn.checkpoint.frozen import FrozenParams
from optfn.checkpoint.loader import HISTORY, Loaded, Loader, list_reserved
from optfn.checkpoint.newest import OtherRun, find_newest, list_checkpoints, remove_oldest
from optfn.checkpoint.snapshot import Snapshot, check_leaves
from optfn.checkpoint.state_dict import averaged_model_state, averaged_params
from optfn.checkpoint.storage import Backend, is_remote, to_path
from optfn.core import checks, tree
from optfn.core.types import Params, PyTree
from optfn.leaves.packed import repack, unpack
from optfn.leaves.patterns import Pattern, check_pattern, matches
from optfn.mesh.layout import processes
from optfn.mesh.state.names import arrays_with_names
from optfn.train.state import TrainState
from optfn.transforms.learning_rate import GivenLearningRateState
from optfn.transforms.rates import numbers_of_rates, rates_of_hyperparams
from optfn.wrappers.averaging import find_averages, make_average_template


def save_checkpoint(
    directory: str | os.PathLike[str],
    state: PyTree,
    history: Mapping[str, Any] | None = None,
    *,
    step: int | None = None,
    keep: int = 2,
    sharded: bool | None = None,
    background: bool | None = None,
    save_frozen: bool = True,
    tx: optax.GradientTransformation | None = None,
) -> Path:
    """Save a state in `directory` as the file step_<n>.npz, or as the directory step_<n> if devices
    divide it, and remove older checkpoints beyond `keep`.

    A checkpoint gets its name only when all of it is on the disk. So if the process is killed, at
    any moment, the newest checkpoint is intact. In a run of several processes, all must call it.

    A file (`sharded=False`): each process writes the whole state, gathered from all of them, to a
    local directory. Any of these directories is enough to resume from.

    If params, the arrays of a field or key "params", or the last "loss" of the history are not
    finite, the checkpoint is marked: it does not count for `keep`, the next save removes it, and
    `restore_checkpoint` passes it over. A loss does not count where tx leaves out steps whose
    gradients are not finite (`skip_nonfinite`).

    A directory (`sharded=True`, by orbax): all processes name the same directory, which they share,
    and each writes its shards. A checksum of each array, of the state and of the history, and one
    of the names are stored beside them.

    In the background: the call returns as soon as a copy of the state is under way, and you may
    overwrite the state at once. A thread writes the copy. The next save in the directory, a restore
    and the end of `minimize` wait for it, and raise its error if it failed; at the end of the
    program, such an error is printed.

    Args:
      directory: where to save; it is created if necessary. For checkpoints that are directories it
        may be an address such as gs://bucket/run, if etils has the package for that store.
      state: a TrainState, or any tree of arrays, PRNG keys and states, such as a dict with the
        TrainStates of two networks. Names (`state_dict`) tell its arrays apart.
      history: arrays by name, or the history that `minimize` returns, to save beside the state.
      step: the number in the name. None: the field or key `step` of the state; in a population of
        states (`jax.vmap`), their common step.
      keep: how many finite checkpoints to keep; older ones are removed.
      sharded: whether to write a directory. None: only if params or state are divided over devices
        (`shard`, `shard_tables`) and orbax is installed.
      background: whether to write in the background. None: only if it is a directory. Python 3.12.0
        to 3.12.2 write no directory in the background: they could lose the last one.
      save_frozen: whether to save the params that are not trained. False: a TrainState is saved
        without the params that `tx` freezes by `ParamAttr(trainable=False)`, and with their
        checksums. Loading then takes these params from the template, compares them, and names those
        that differ in an error.
      tx: the optimizer of the state, which `save_frozen=False` needs.

    Returns:
      The path of the file or the directory.

    Raises:
      OSError: the disk is full or cannot be written; nothing of the new file is left.
      TypeError: the state has leaves that are no arrays, or no step; or `save_frozen=False` and it
        is no TrainState.
      ValueError: two arrays have the same name, or a name that cannot be saved; or
        `save_frozen=False` without `tx`.
    """
    frozen = None
    if not checks.flag("save_frozen", save_frozen):
        if tx is None:
            raise ValueError(
                "save_checkpoint: save_frozen=False needs tx, the optimizer that says which params "
                "are frozen"
            )
        frozen = FrozenParams(core.check_transform("save_checkpoint: tx", tx))
    return write_checkpoint(
        directory, state, history, step=step, keep=keep, sharded=sharded, background=background,
        frozen=frozen,
    )  # fmt: skip


def write_checkpoint(
    directory: str | os.PathLike[str],
    state: PyTree,
    history: Mapping[str, Any] | None = None,
    *,
    step: int | None = None,
    keep: int | None = 2,
    sharded: bool | None = None,
    background: bool | None = None,
    frozen: FrozenParams | None = None,
) -> Path:
    """Save a state as `save_checkpoint` does, but without the frozen params if `frozen` is given,
    and return the path. With `keep=None` all earlier checkpoints stay."""
    check_leaves("save_checkpoint: state", state)
    number = _find_step(state) if step is None else checks.count("step", step, low=0)
    wanted = "a mapping from names to arrays"
    checks.instance("save_checkpoint: history", history, Mapping | None, wanted)
    for name, value in (("sharded", sharded), ("background", background)):
        if value is not None:
            checks.flag(name, value)
    directory = to_path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    # The last save may still be written, and if it has failed, its error is due now.
    wait_for_writes(directory)
    sharded = choose_form(directory, state, sharded)
    backend: Backend = OrbaxDirectory() if sharded else NpzFile()
    path = directory / f"step_{number:09d}{backend.suffix}"
    is_last_finite = may_keep_last_loss(state, history or {})
    snapshot = Snapshot.of(state, list_reserved(state))
    entries = dict(history or {})
    if frozen is not None:
        snapshot, entry = frozen.leave_out(snapshot)
        entries |= entry
    # Copies: the caller may go on with its history while a thread writes it.
    beside = {f"{HISTORY}{name}": _copy_entry(name, x) for name, x in entries.items()}
    if both := sorted(snapshot.arrays.keys() & beside.keys()):
        raise ValueError(
            f"save_checkpoint: history must have other names than the state; both have "
            f"{tree.list_names(both)}"
        )
    write = backend.writer(path, snapshot, beside, is_loss_finite=is_last_finite)
    # Old checkpoints go after the write: if it fails, they are still there.
    remove = [] if keep is None else [functools.partial(remove_oldest, path, keep)]
    start_write(directory, write, *remove)
    is_lost_at_exit = sharded and not STARTS_THREADS_AT_EXIT
    if is_lost_at_exit or not (sharded if background is None else background):
        wait_for_writes(directory)
    return path


def _copy_entry(name: str, values: Any) -> np.ndarray:
    """Return a copy of an entry of a history as an array, or raise a TypeError unless that has
    numbers or text."""
    array = np.array(values)
    if array.dtype.kind in "OSMm":
        raise TypeError(
            "save_checkpoint: history must have arrays of numbers or text; "
            f"{name!r} has dtype {array.dtype}"
        )
    return array


def choose_form(directory: Path, state: PyTree, sharded: bool | None = None) -> bool:
    """Return whether a checkpoint is a directory: `sharded` if it is given, else whether the store
    is remote or devices divide the state. Raise a ValueError where that cannot be saved.

    Raises:
      ValueError: sharded=False for a store that takes only directories; or a directory whose path
        orbax takes for a pattern.
    """
    if is_remote(directory) and sharded is False:
        raise ValueError(
            f"sharded=False writes a file, but the store of {directory} takes only directories: "
            "pass sharded=True"
        )
    if sharded is None:
        sharded = is_remote(directory) or is_directory_default(state)
    if sharded and not {*"[\\"}.isdisjoint(str(directory)):
        raise ValueError(
            f"{directory}: the path of checkpoints that are directories must have no '[' and no "
            "backslash, which orbax takes for a pattern, so that it loses the checkpoint"
        )
    return sharded


def _find_step(state: PyTree) -> int:
    """Return the step of a state, or the common step of a population's members, and raise an error
    if there is no step or several.

    Raises:
      TypeError: there is no field or key `step` of integers.
      ValueError: members of a population have made different numbers of steps.
    """
    step = state.get("step") if isinstance(state, Mapping) else getattr(state, "step", None)
    if not tree.is_array(step) or not np.issubdtype(step.dtype, np.integer):
        raise TypeError(
            "save_checkpoint: state must be a TrainState, or have another field or key `step` that "
            "is a scalar integer; else pass step=, the number in the name; "
            f"got {checks.show(state)}"
        )
    steps = np.unique(np.asarray(step))
    if len(steps) != 1:
        raise ValueError(
            f"save_checkpoint: the step of the {type(state).__name__} has shape {step.shape}, as a "
            f"population has, and {len(steps)} different numbers: pass step=, the number in the "
            "name"
        )
    return int(steps[0])


def load_checkpoint(
    path: str | os.PathLike[str], state: PyTree, *, strict: bool = True, only: Pattern | None = None
) -> tuple[PyTree, dict[str, np.ndarray]]:
    """Return the state and the history in the checkpoint at `path`, placed like the template
    `state`, or raise a ValueError if it is damaged or does not fit.

    `restore_checkpoint` finds the newest checkpoint of a directory. Each array gets the sharding of
    its array in the template. If the number of workers has changed, `rescale_residuals` converts
    per-worker arrays.

    Args:
      path: a file or a directory that `save_checkpoint` wrote.
      state: a template: a TrainState of the same run, or another tree like the one that was saved.
      strict: as in `restore_checkpoint`.
      only: as in `restore_checkpoint`.

    Raises:
      ValueError: the checkpoint is truncated, damaged, or from another run; `only` matches nothing;
        or `path` is a directory of checkpoints.
    """
    wait_for_writes()
    check_leaves("load_checkpoint: state", state)
    if found := list_checkpoints(path):
        raise ValueError(
            f"load_checkpoint takes one checkpoint, such as {found[-1]}; {path} is a directory of "
            "checkpoints. restore_checkpoint(directory, state) loads the newest that is intact"
        )
    loader = Loader(state, checks.flag("strict", strict), check_pattern("only", only))
    return loader.warn_of_changes(path, loader.load(to_path(path)))


def load_params(
    path: str | os.PathLike[str],
    params: Params,
    *,
    only: Pattern | None = None,
    average: bool | str = False,
    model_state: PyTree = None,
) -> Any:
    """Return the parameters alone of a checkpoint, or of the newest intact checkpoint in a
    directory. Parameters that `only` leaves out come from `params`.

    If the checkpoint lacks the frozen parameters (`save_frozen=False`), they are taken from
    `params`: pass the model that the run began with; the result has its frozen and the checkpoint's
    trained parameters.

    Args:
      path: a file or a directory that `save_checkpoint` wrote; or the directory where a run saves,
        for the newest intact checkpoint in it.
      params: the parameters of the same model, as a template. The result has its structure, dtypes
        and shardings. With `only`, it may also be a part of the model.
      only: the params to load, a regular expression that must match a whole path, such as
        "encoder/.*", or a function path -> bool; the remaining ones are taken from `params`.
      average: whether to return the average of the params (`averaged_params`) that the optimizer
        kept, or its name, if there are several. With "best", where `keep_best` saves, this is the
        average that `evaluate_average` has judged best.
      model_state: the model state, as a template, to load it as well; with `average`, its average,
        if the run kept one.

    Returns:
      The params, or (params, model_state).

    Raises:
      ValueError: the checkpoint is truncated or damaged, or its params differ in names or shapes;
        `only` matches none; it has no average, or several and `average` names none; or it lacks the
        frozen params, and the params of `params` differ from them.
      FileNotFoundError: there is no checkpoint at `path`.
      TypeError: `params` is a TrainState.
    """
    if isinstance(params, TrainState):
        raise TypeError("load_params: params must be the parameters alone; got a TrainState")
    wait_for_writes()
    only = check_pattern("only", only)
    given, params = params, unpack(tree.map_arrays(tree.as_array, params))
    # The loader selects some names; the step only makes the names of a TrainState.
    template = TrainState(jnp.zeros((), jnp.int32), params, optax.EmptyState(), model_state)

    def is_chosen(name: str) -> bool:
        field, _, inner = name.partition("/")
        if field == "params":
            return matches(only, inner)
        return field == "model_state" and model_state is not None

    def read(path: Path) -> tuple[Loader, Loaded]:
        loader = Loader(template, only=is_chosen)
        if average:
            loader = _with_average(loader, path, average, is_chosen)
        state, history, changes = loader.load(path)
        both = changes.new, changes.dropped
        lists = ([x for x in names if matches(loader.only, x)] for names in both)
        if wrong := tree.list_misfits(*lists):
            hint = "" if only is not None else ". To load some of them, pass only="
            raise OtherRun(f"{path} has the params of another model: {'; '.join(wrong)}{hint}")
        return loader, (state, history, Changes([], [], []))

    place = to_path(path)
    _check_only(only, params)
    found = find_newest(place, read)
    if found is None:
        if not place.exists() or (place.is_dir() and not any(place.iterdir())):
            raise FileNotFoundError(f"load_params: there is no checkpoint at {path}")
        found = place, read(place)
    at, (loader, loaded) = found
    (_, values, opt_state, statistics), _ = loader.warn_of_changes(at, loaded)
    if average:
        values = averaged_params(opt_state, values)
        statistics = averaged_model_state(opt_state, statistics, None)
    values = repack(given, values)
    return values if model_state is None else (values, statistics)


def _check_only(only: Pattern | None, params: Params) -> None:
    """Raise a ValueError if there is a pattern, and it matches no path of params."""
    if only is not None and not any(matches(only, path) for path in tree.paths(params)):
        names = tree.list_names(tree.array_paths(params))
        raise ValueError(f"load_params: only={only!r} matches no path of params; it has {names}")


def _with_average(
    loader: Loader, path: Path, average: bool | str, is_chosen: Callable[[str], bool]
) -> Loader:
    """Return a loader that also loads the average in a checkpoint, and raise a ValueError unless
    exactly one average fits.

    Args:
      loader: a loader of params.
      path: the checkpoint.
      average: True, or the name of the average.
      is_chosen: tells whether an array of the params or the model state is loaded.

    Raises:
      ValueError: the checkpoint has no average, or several and `average` names none of them.
    """
    names = {*loader.list_names(path)}
    found = find_averages(names)
    if isinstance(average, str):
        found = [name for name in found if f"/{average}/" in f"/{name}/"]
    if len(found) != 1:
        raise ValueError(
            f"load_params: average={average!r} must tell one average in {path}; it has "
            f"{tree.list_names(found) or 'none'}"
        )
    (name,) = found
    kind = re.sub(r"_\d+$", "", name.rpartition("/")[2])
    given = loader.template
    state = make_average_template(
        kind,
        [x.removeprefix(f"{name}/") for x in names if x.startswith(f"{name}/")],
        tree.map_named(
            lambda p, x: x if is_chosen(f"params/{p}") else optax.MaskedNode(), given.params
        ),
        given.model_state,
    )
    template = given._replace(opt_state=state)
    wanted = {x for x, _ in arrays_with_names(state)}
    return dataclasses.replace(
        loader,
        template=template,
        only=lambda name: is_chosen(name) or name in wanted,
        renamed=(f"{name}/", f"{kind}/"),
    )


def restore_checkpoint(
    directory: str | os.PathLike[str],
    template: PyTree,
    *,
    strict: bool = True,
    only: Pattern | None = None,
) -> tuple[PyTree, dict[str, np.ndarray]] | None:
    """Return the state and the history of the newest intact checkpoint in `directory`, skipping
    damaged ones with a warning, or None if there is no checkpoint.

    Returns None if there is no checkpoint, so that a program can begin with
    `restore_checkpoint(...) or (template, {})`. A damaged checkpoint is skipped with a warning that
    names it, and the one before it is read. So is one whose params or loss are not finite, unless
    there is no finite one. A directory may contain both kinds of checkpoints. In a
    run of several processes, all must call it, and all get the newest checkpoint that any of them
    has: processes without it write a copy of its file to their directories.

    Args:
      directory: where `save_checkpoint` wrote.
      template: a TrainState of the same run, such as `step.init(params)`, or a tree like that which
        was saved. The result is placed like it, on the same devices, and committed to them if its
        arrays are.
      strict: whether the checkpoint must have exactly the names of the template; names that only
        report on a run may differ (`load_state_dict`). If False, missing arrays are taken from
        the template, and superfluous ones are dropped.
      only: the names to load, such as "params/.*": a regular expression that must match a whole
        name, or a function name -> bool. Everything else, also the step, is taken from the
        template, and `strict` is ignored. Names are as in `state_dict`, but step, params and
        model_state lack "train/".

    Frozen params that the checkpoint lacks (`save_frozen=False`) are taken from the template. Their
    checksums must match the run's. The result shares these arrays with the template.

    The learning rate comes from the checkpoint too, if it is a number; you get a warning if the
    template has another one. With `strict=False` or `only`, one warning lists the names that were
    carried over, are new, or were dropped. New float32 masters (`master_weights`) are made from the
    loaded params. If the run saved the position of its iterator of batches, the history has it as
    the bytes "batches".

    Raises:
      ValueError: there are checkpoints, but none can be loaded; `only` matches no name; or frozen
        params of the template differ from the run's.
    """
    loader = Loader(template, checks.flag("strict", strict), check_pattern("only", only))
    found = restore_newest(directory, loader)
    if found is not None and only is None:
        warn_of_rates(template, found[0], "call optfn.set_learning_rate")
    return found


def restore_newest(
    directory: str | os.PathLike[str], loader: Loader
) -> tuple[PyTree, dict[str, np.ndarray]] | None:
    """Restore into the template of a loader as `restore_checkpoint` does, or return None without a
    checkpoint, but never warn that learning rates differ."""
    wait_for_writes()
    place = to_path(directory)
    check_leaves("restore_checkpoint: template", loader.template)
    is_shared = processes.has_state_on_all_processes(loader.template)
    found = find_newest(place, loader.load, is_shared)
    return None if found is None else loader.warn_of_changes(*found)


def warn_of_rates(given: PyTree, found: PyTree, remedy: str) -> None:
    """Warn of the first learning rate that differs between a checkpoint and tx. The checkpoint's
    rate counts if it is a number, also of `optax.inject_hyperparams`, and tx's rate if it is an
    array. A rate 0 of tx, as in a template of zeros, gives no warning.

    Args:
      given: the template, with the rates of tx.
      found: the state of the checkpoint.
      remedy: how to change the rate.
    """
    by_hand = 'change hyperparams["learning_rate"] of inject_hyperparams in the state'
    for read, how in ((numbers_of_rates, remedy), (rates_of_hyperparams, by_hand)):
        if pair := _find_change(read(given), read(found)):
            checks.warn(
                f"the run resumes with the learning rate of its checkpoint, {pair[1]:g}, and not "
                f"with that of tx, {pair[0]:g}. To change it, {how}"
            )
            return
    of_tx, saved = (numbers_of_rates(x, GivenLearningRateState) for x in (given, found))
    if pair := _find_change(of_tx, saved):
        checks.warn(
            f"the run resumes with the learning rate of tx, {pair[0]:g}, because it is given as an "
            f"array, and not with that of its checkpoint, {pair[1]:g}"
        )


def _find_change(
    of_tx: Mapping[str, float], saved: Mapping[str, float]
) -> tuple[float, float] | None:
    """Return the first rate of tx that is not 0, and is another one in the checkpoint, with that
    one, or None."""
    pairs = ((rate, saved.get(name, rate)) for name, rate in of_tx.items())
    return next((pair for pair in pairs if pair[0] not in (0, pair[1])), None)
