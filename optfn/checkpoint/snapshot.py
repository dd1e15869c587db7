"""The arrays of a state as they are saved: a `Snapshot` names each of them once."""

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import numpy as np

from optfn.checkpoint.packed_state import unpack_state
from optfn.core import checks, tree
from optfn.core.types import Leaf, PyTree
from optfn.leaves.foreign import check_arrays
from optfn.mesh.state.bits import DTYPES, encode_arrays
from optfn.mesh.state.inventory import inventory
from optfn.mesh.state.names import arrays_with_names
from optfn.mesh.state.per_worker import has_per_worker_state
from optfn.mesh.state.placement import PER_WORKER_KEY
from optfn.tables.sharded_table import to_logical

# The version of the format of `state_dict`; it increases when names or meanings change.
VERSION = 1
# The keys of a mapping of `state_dict` that name no array of the state.
KEYS = "key_impls"  # (name, implementation) of each typed PRNG key
ABOUT = ("version", PER_WORKER_KEY, DTYPES, KEYS)


class Snapshot(NamedTuple):
    """The arrays of a state by name, as a checkpoint has them.

    state: the state with an array for each leaf: no buffers of packed params, and no padding.
    arrays: its arrays by name.
    per_worker: the sorted names of the arrays that differ between workers.
    keys: the implementation of each typed PRNG key by name; `arrays` has its data.
    """

    state: PyTree
    arrays: dict[str, Any]
    per_worker: list[str]
    keys: dict[str, str]

    @classmethod
    def of(
        cls,
        state: PyTree,
        reserved: Collection[str] = ABOUT,
        arrange: Callable[[PyTree], PyTree] = to_logical,
    ) -> "Snapshot":
        """Return the snapshot of a state, unpacked and with the rows of tables in the order of
        their ids, or raise a ValueError if its names cannot be saved.

        Args:
          state: the state, of arrays on devices or on the host. On a mesh, rows of tables are sent
            between devices, and in a run of several processes all must call it.
          reserved: as for `check_array_names`.
          arrange: the function that arranges the rows of divided tables; by default it puts them
            into the order of their ids.

        Raises:
          ValueError: names do not tell the arrays apart, or not every form of a checkpoint keeps
            them.
        """
        plain = arrange(unpack_state(state))
        named = list(arrays_with_names(plain))
        keys = {name: str(jax.random.key_impl(x)) for name, x in named if _is_key_array(x)}
        check_array_names([name for name, _ in named], reserved)
        per_worker: list[str] = []
        if has_per_worker_state(plain):
            per_worker = sorted(x.name for x in inventory(plain) if x.kept == "per_worker")
        return cls(plain, {name: to_key_data(x) for name, x in named}, per_worker, keys)

    def without(self, left_out: Collection[str]) -> "Snapshot":
        """Return the snapshot without the arrays of these names."""
        kept = {name: x for name, x in self.arrays.items() if name not in left_out}
        return self._replace(arrays=kept)

    def to_mapping(self, beside: Mapping[str, np.ndarray] = MappingProxyType({})) -> dict[str, Any]:
        """Return the mapping of `state_dict`, with the arrays of the snapshot and those `beside` it
        encoded for a file, and the version."""
        # A reader on another number of workers must know which arrays to convert.
        listed = {PER_WORKER_KEY: np.array(self.per_worker)} if self.per_worker else {}
        if self.keys:
            listed[KEYS] = np.array([*self.keys.items()])
        arrays = encode_arrays({**self.arrays, **beside})
        return {"version": np.asarray(VERSION), **listed, **arrays}


def check_leaves(who: str, state: PyTree) -> None:
    """Raise a TypeError unless every leaf of a state is an array, and a ValueError if one has no
    path to be named by."""
    check_arrays(who, state)
    for name, x in tree.arrays_with_paths(state):
        if tree.is_array(x) and not name:
            raise ValueError(f"{who} must give its arrays names: put an array alone into a dict")
        if not tree.is_array(x):
            raise TypeError(
                f"{who} must be a TrainState, or a tree of arrays and states; its leaf "
                f"{name or 'at the top'} is {checks.show(x)}"
            )


def to_key_data(x: Leaf) -> Leaf:
    """Return the data of a typed PRNG key, because files keep no keys, or the leaf itself."""
    return jax.random.key_data(x) if _is_key_array(x) else x


def _is_key_array(x: Leaf) -> bool:
    """Tell whether a leaf is an array of typed PRNG keys, not only its shape."""
    return isinstance(x, jax.Array) and tree.is_key(x)


def check_array_names(names: Sequence[str], reserved: Collection[str] = ABOUT) -> None:
    """Raise a ValueError if a name of an array is repeated, has a NUL character, or is one of the
    reserved names.

    Args:
      names: the names of arrays.
      reserved: the names of further entries beside them; one that ends with "/" stands for all
        names that begin with it.
    """
    repeated = [name for name, count in Counter(names).items() if count > 1]
    if repeated:
        raise ValueError(
            f"state_dict: several arrays have the name {tree.list_names(repeated)}, because names "
            'join the keys of a tree by "/". Rename one of their parameters'
        )
    cut = [name for name in names if "\0" in name]
    if cut:
        raise ValueError(
            f"state_dict: the names {tree.list_names(cut)} have a NUL character, and zip files cut "
            "a name there. Rename the parameters"
        )
    folders = tuple(word for word in reserved if word.endswith("/"))
    taken = [name for name in names if name in reserved or name.startswith(folders)]
    if taken:
        raise ValueError(
            f"state_dict: the names {tree.list_names(taken)} are those of other entries of a saved "
            "state. Put the arrays into a dict with another key"
        )
