"""Programs of others that take a transformation of optax, and the comparison that all tests make.

Each client runs the same steps with a rule of optfn and with the same rule of optax.
"""

import dataclasses
import importlib.util
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import optax
import pytest
from grids import by_name

import optfn

# The modules of the clients; each has a file tests/outside/test_<module>.py. The first three are in
# the extra `test` as well, the others in `outside` only.
CLIENTS = (
    "numpyro", "jaxopt", "optimistix",
    "blackjax", "brax", "dynamax", "evosax", "flowjax", "gpjax", "keras", "netket", "orbax", "ott",
    "penzai", "tunix",
)  # fmt: skip

# Clients that no extra brings, because of what they bring themselves; where they are installed,
# their tests run as those of the others.
LARGE = {
    "kauldron": "not installed; 3 GB with TensorFlow: pip install kauldron",
    "sbx": "not installed; 5 GB with torch: pip install sbx-rl, and tf_keras beside TensorFlow",
}


def is_installed(client: str) -> bool:
    """Tell whether the module of a client is there; it is not imported."""
    return importlib.util.find_spec(client) is not None


def missing() -> list[str]:
    """Return the clients that are not installed here."""
    return [client for client in (*CLIENTS, *LARGE) if not is_installed(client)]


@dataclasses.dataclass(frozen=True)
class Rule:
    """The same rule in optfn and in optax, each a function of the learning rate."""

    ours: Callable[[Any], optax.GradientTransformation]
    theirs: Callable[[Any], optax.GradientTransformation]


def _momentum(rate: Any) -> optax.GradientTransformation:
    return optfn.momentum(rate, 0.9, nesterov=True)


def _clipped(rate: Any) -> optax.GradientTransformation:
    clip = optfn.clip_by_global_norm(0.1)
    return optfn.adamw(rate, weight_decay=0.01, grad_clip=clip)


RULES = {
    "momentum": Rule(_momentum, lambda rate: optax.sgd(rate, 0.9, nesterov=True)),
    "adam": Rule(lambda rate: optfn.adam(rate, eps_hat=False), optax.adam),
    "clipped_adamw": Rule(
        _clipped,
        lambda rate: optax.chain(
            optax.clip_by_global_norm(0.1), optax.adamw(rate, weight_decay=0.01)
        ),
    ),
}


def with_rules(*names: str) -> pytest.MarkDecorator:
    """Return the mark of a test that takes each `rule` of these names, all without names; CI runs
    the last.

    A client that calls `update` without params can use no decay.
    """
    rules = {name: RULES[name] for name in names or RULES}
    return pytest.mark.parametrize("rule", by_name(rules, [*rules][-1]))


_NO_STEP = optax.with_extra_args_support(optax.set_to_zero())


def assert_same_run(
    run: Callable[[optax.GradientTransformation], Any],
    rule: Rule,
    rate: Any,
    *,
    tolerance: float = 1e-4,
) -> None:
    """Check that a client gives the same results with a rule of optfn as with that of optax.

    Args:
      run: from a transformation to the results of a run of the client, a tree of arrays. With
        `set_to_zero` it gives the place where the run starts.
      rule: the rule.
      rate: the learning rate of the run.
      tolerance: the largest difference of an entry, as a part of the longest way of any in its
        leaf.
    """
    start, ours, theirs = (
        jax.tree.map(np.asarray, run(tx)) for tx in (_NO_STEP, rule.ours(rate), rule.theirs(rate))
    )
    assert jax.tree.structure(ours) == jax.tree.structure(theirs)
    ways = jax.tree.map(_longest, start, theirs)
    assert max(jax.tree.leaves(ways)) > 0
    for found, want, way in zip(*map(jax.tree.leaves, (ours, theirs, ways)), strict=True):
        assert found.dtype == want.dtype
        np.testing.assert_allclose(found, want, rtol=0, atol=tolerance * way)


def _longest(start: np.ndarray, end: np.ndarray) -> float:
    assert np.all(np.isfinite(end))
    return float(np.max(np.abs(end - start), initial=0.0))


def left_out() -> dict[str, str]:
    """Return the clients that tests leave out here, with the reason."""
    return {name: LARGE.get(name, "not installed; make outside runs it") for name in missing()}
