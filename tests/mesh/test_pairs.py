"""Every pair of features of a training step: it trains as without those that only lay out arrays.

tests/pairs.py has the features. The reference has two workers of one device; the features that say
where arrays lie, or how gradients are computed, are left out of it.
"""

import itertools

import jax
import numpy as np
import pytest
from grids import suite
from pairs import ALTERNATIVES, FEATURES, impossible, trained

PAIRS = [
    f"{a} + {b}"
    for a, b in itertools.combinations(FEATURES, 2)
    if not any({a, b} <= group for group in ALTERNATIVES)
]
# What people use together, and tests/reference_run does not draw.
TRIPLES = [
    "exchange + local_steps + params",
    "exchange + local_steps + state",
    "exchange + local_steps + pipeline",
    "local_steps + params + model_state",
    "dgc + params + skip",
    "dgc + pipeline + skip",
    "dgc + specs + tables",
    "params + pipeline + microbatches",
]
# Of each feature that is not drawn a case.
SUITE = ("dgc + specs + tables", "pipeline + loss_scale", "exchange + local_steps + params")


@pytest.mark.filterwarnings("ignore:.*row-sparse gradient becomes dense")
@pytest.mark.filterwarnings("ignore:dgc_momentum. momentum masking")
@pytest.mark.parametrize("together", suite(PAIRS + TRIPLES, *SUITE))
def test_features_train_together_or_say_why_not(together):
    names = tuple(together.split(" + "))
    if reason := impossible(names):
        with pytest.raises(ValueError, match=reason.words):
            trained(names)
        return
    expected, found = trained(names, reference=True), trained(names)
    for x, y in zip(jax.tree.leaves(expected), jax.tree.leaves(found), strict=True):
        np.testing.assert_allclose(y, x, atol=2e-6, rtol=2e-6)
