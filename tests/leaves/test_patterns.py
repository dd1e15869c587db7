"""The patterns that select leaves."""

import re
from types import SimpleNamespace

import jax.numpy as jnp
import pytest

import optfn
from optfn.leaves import patterns


@pytest.mark.parametrize("packed", [False, True])
def test_a_pattern_is_compared_with_each_name_once(monkeypatch, packed):
    compared = []

    def fullmatch(pattern, name):
        compared.append((pattern, name))
        return re.fullmatch(pattern, name)

    def compiled(pattern):
        return SimpleNamespace(pattern=pattern, fullmatch=lambda name: fullmatch(pattern, name))

    params = {"a": jnp.ones(2), "b": {"a": jnp.ones(2), "c": jnp.ones(1)}}
    params = optfn.pack(params) if packed else params
    monkeypatch.setattr(patterns, "re", SimpleNamespace(compile=compiled, fullmatch=fullmatch))
    found = list(patterns.first_matches({"a": 1, ".*a": 2, ".*": 3}, params, "param_attrs"))
    assert found == [({"a"}, 1), ({"b/a"}, 2), ({"b/c"}, 3)]
    names = ["a", "b/a", "b/c"]
    assert sorted(compared) == sorted((p, name) for p in ("a", ".*a", ".*") for name in names)
    compared.clear()
    assert patterns.match_names("b/.*", params, "exclude") == {"b/a", "b/c"}
    assert sorted(compared) == [("b/.*", name) for name in names]
