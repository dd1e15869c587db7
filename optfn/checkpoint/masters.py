"""Conversion of masters between their forms: float32 copies, remainders of 32 and of 24 bits.

    bits(|M|) = bits(|p|)·2ᵏ + e      k = 16 and 8 for masters of 32 and 24 bits

Between a copy M and a remainder e the conversion needs the parameter p; if p is not saved beside a
copy, it is the copy rounded. Remainders of 32 and of 24 bits differ by a shift.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from optfn.core import tree
from optfn.core.types import Leaf, OptState
from optfn.mesh.state import names as state_names
from optfn.mesh.state.bits import convert_dtype
from optfn.transforms import codes
from optfn.wrappers import master_weights


class _SavedForm(NamedTuple):
    """The name of a state, its field of masters or remainders, and their bits."""

    word: str
    field: str
    bits: int | None


_FORMS: dict[type, _SavedForm] = {}
for _kind, _bits in (
    (master_weights.MasterWeightsState, None), (master_weights.MasterWeights32State, 32),
    (master_weights.MasterWeights24State, 24),
):  # fmt: skip
    _FORMS[_kind] = _SavedForm(state_names.state_word(_kind), _kind._fields[0], _bits)


def convert_masters(
    state: OptState, by_name: Mapping[str, Leaf], mapping: Mapping[str, Any]
) -> Mapping[str, Any]:
    """Convert the masters of a mapping to the form that they have in a state, or return the mapping
    itself if all of them have it.

    Args:
      state: the template.
      by_name: its arrays by name.
      mapping: arrays by name, with masters of any form.

    Raises:
      ValueError: copies are needed, but the mapping has remainders without their parameters.
    """
    new: dict[str, Leaf] = {}
    used: set[str] = set()
    for name, masters_state in state_names.states_with_names(lambda x: type(x) in _FORMS, state):
        form = _FORMS[type(masters_state)]
        *labels, last = name.split("/")
        for old in _FORMS.values():
            old_name = tree.join(*labels, old.word + last.removeprefix(form.word))  # … or …_2
            saved = state_names.find_names_in_field(mapping, f"{old_name}/{old.field}")
            if old == form or not saved:
                continue
            masters = _convert_each(saved, old, form, by_name, mapping)
            new |= {tree.join(name, form.field, path): x for path, x in masters.items()}
            # Only remainders of 24 bits have a step; it is the seed of their rounding.
            used |= {f"{old_name}/step", *saved.values()}
            if form.bits == 24:
                new[f"{name}/step"] = np.zeros((), np.int32)  # the seed of the rounding
    return {k: v for k, v in mapping.items() if k not in used} | new if new else mapping


def _convert_each(
    saved: Mapping[str, str],
    before: _SavedForm,
    after: _SavedForm,
    by_name: Mapping[str, Leaf],
    mapping: Mapping[str, Any],
) -> dict[str, jax.Array]:
    """Return the saved masters of one form converted to another, by path, or raise a ValueError if
    copies are needed and a parameter is missing.

    Args:
      saved: the names of the saved masters in the mapping, by path.
      before: their saved form.
      after: the form of the result.
      by_name: the arrays of the template, by name.
      mapping: the saved arrays, by name.

    Raises:
      ValueError: the result is copies, and a parameter is not in the mapping.
    """
    found = {}
    for path, name in saved.items():
        p = _find_saved_param(path, by_name, mapping, np.shape(mapping[name]))
        if p is None and after.bits is None:
            raise ValueError(
                f"the mapping has {name!r}, the remainder of a master, but not the parameter that "
                "the master is computed from. Load the state of the whole run: state_dict(state) "
                "of the TrainState, or a checkpoint"
            )
        found[path] = _convert_master(mapping[name], p, before.bits, after.bits)
    return found


def _find_saved_param(
    path: str, by_name: Mapping[str, Leaf], mapping: Mapping[str, Any], shape: tuple[int, ...]
) -> jax.Array | None:
    """Return the saved parameter as bfloat16, or None if the template or the mapping lacks it or
    its shape differs."""
    name = tree.join("train/params", path)
    if name not in mapping or name not in by_name or np.shape(mapping[name]) != shape:
        return None
    x, _ = convert_dtype(np.asarray(mapping[name]), jnp.dtype(jnp.bfloat16))
    return jnp.asarray(x)


def _convert_master(
    kept: Leaf, p: jax.Array | None, before: int | None, after: int | None
) -> jax.Array:
    """Convert a float32 copy to a remainder beside bfloat16 `p`, a remainder beside `p` to a copy,
    or a remainder to another width.

    Args:
      kept: the array in the old form.
      p: the parameter; copies need it. Without it, the parameter of a copy is the copy rounded.
      before: the bits of the old form if it is a remainder; None for a copy.
      after: the bits of the new form if it is a remainder; None for a copy.
    """
    kept = jnp.asarray(kept)
    if before is not None and after is not None:
        dtype = codes.REMAINDERS[after]
        wide = kept.astype(jnp.int32)
        # Rounded to the nearest; from 127.5 on that would leave int8.
        wide = wide << 8 if after > before else (wide + 128) >> 8
        return jnp.minimum(wide, jnp.iinfo(dtype).max).astype(dtype)
    if after is None:
        assert p is not None
        return codes.join_float32(p, kept)
    return codes.remainder_beside(kept.astype(jnp.bfloat16) if p is None else p, kept, after)
