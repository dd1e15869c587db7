"""The table of clients: each has a file here, and is installed where `make outside` runs."""

import os
from pathlib import Path

import clients
import jax.numpy as jnp
import numpy as np
import optax
import pytest


def test_each_client_has_a_file_of_tests():
    files = {path.stem.removeprefix("test_") for path in Path(__file__).parent.glob("test_*.py")}
    assert files == {*clients.CLIENTS, *clients.LARGE, "clients", "optax_wrappers"}


def test_the_page_for_users_of_optax_names_each_client():
    page = (Path(__file__).parents[2] / "docs/moving/optax.md").read_text()
    section = page.partition("## Programs that take an optimizer of optax")[2]
    assert [name for name in (*clients.CLIENTS, *clients.LARGE) if name not in section] == []


@pytest.mark.skipif("OPTFN_OUTSIDE" not in os.environ, reason="needs the extra outside")
def test_every_client_is_installed():
    assert {*clients.missing()} <= {*clients.LARGE}


def test_another_rule_is_not_the_same_run():
    """The comparison fails where results differ by more than the tolerance, or nothing moved."""

    def run(tx):
        params = jnp.array([1.0, -2.0])
        updates, _ = tx.update(jnp.array([0.1, 0.2]), tx.init(params), params)
        return optax.apply_updates(params, updates)

    sgd = clients.Rule(optax.sgd, optax.sgd)
    clients.assert_same_run(run, sgd, 0.1)
    other = clients.Rule(optax.sgd, lambda rate: optax.sgd(rate * 1.01))
    with pytest.raises(AssertionError, match="Mismatched"):
        clients.assert_same_run(run, other, 0.1)
    with pytest.raises(AssertionError):
        clients.assert_same_run(run, sgd, 0.0)
    with pytest.raises(AssertionError):
        clients.assert_same_run(run, sgd, np.nan)
