"""Each ability gives the same params under the settings of JAX that docs/versions.md lists."""

import contextlib

import jax
import numpy as np
import pytest
from grids import nightly
from settings import PROGRAMS, SETTINGS, configured, expected

# Some of what a setting refused once. All programs are tried under all settings at night, and drawn
# programs run with 64 bits.
ALWAYS = {
    "strictest": ["divided tables"],
    "x64": [],
    "leaks": ["line search"],
    "transfers": ["pipeline"],
    "new derivatives": ["recompute"],
}


def cases():
    return [
        pytest.param(
            setting,
            program,
            marks=() if program in ALWAYS[setting] else pytest.mark.nightly,
            id=f"{setting}: {program}",
        )
        for setting in SETTINGS
        for program in PROGRAMS
    ]


@pytest.mark.parametrize("setting, program", cases())
def test_a_setting_changes_nothing(setting, program):
    right = expected(program)
    jax.clear_caches()  # Otherwise JAX would not trace again.
    found = SETTINGS[setting].run(program)
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(right), strict=True):
        np.testing.assert_allclose(
            np.float64(x), np.float64(y), rtol=0, atol=SETTINGS[setting].tolerance
        )


@pytest.mark.parametrize("program", ["wrappers", nightly("plateau"), nightly("line search")])
def test_what_begins_with_infinity_is_refused_by_debug_infs(program):
    """As docs/versions.md says. JAX runs the step again to name the line, and finds it donated."""
    with configured(jax_debug_infs=True), pytest.raises((FloatingPointError, RuntimeError)):
        PROGRAMS[program](contextlib.nullcontext)
