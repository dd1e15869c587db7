"""Each ability of the step with each model of tests/zoo, by the outcomes of zoo/matrix.json.

A pair that stops is there with its error. When it begins to work its test fails, until `make zoo`
has written the file anew, and `make tables` the page.
"""

import pytest
from grids import suite
from zoo.abilities import ABILITIES
from zoo.matrix import PAIRS, outcome, read

# Each model once, and each ability.
SUITE = (
    ("linen scan", "params"),
    ("linen tied", "masters"),
    ("linen batch_norm", "microbatches"),
    ("linen dropout", "mesh"),
    ("linen boxes", "compiler"),
    ("linen logical", "packed"),
    ("nnx scan", "divided_tables"),
    ("nnx stacked", "params"),
    ("nnx lora", "int8"),
    ("nnx random_state", "params"),
    ("nnx metadata", "mesh"),
    ("equinox stacked", "tables"),
    ("equinox filtered", "evaluate"),
    ("equinox stateful", "state"),
    ("haiku layer_stack", "recompute"),
    ("haiku stateful", "resume"),
    ("plain tree_of_specs", "one_device"),
    ("plain tree_of_specs", "specs"),
    ("plain constraints", "compiler"),
)
# tests/outside has the rows of keras.
HERE = [pair for pair in PAIRS if not pair[0].startswith("keras")]


@pytest.mark.parametrize("model, name", suite(HERE, *SUITE))
def test_the_outcome_is_that_of_the_matrix(model, name):
    assert outcome(model, name) == read()["models"][model]["outcomes"][name]


def test_the_suite_has_each_model_and_each_ability():
    models, names = zip(*SUITE, strict=True)
    assert {*models} == {model for model, _ in HERE}
    assert {*names} == {*ABILITIES}


def test_the_matrix_has_all_pairs():
    found = read()
    assert found["abilities"] == {name: fn.asked for name, fn in ABILITIES.items()}
    pairs = [(model, name) for model in found["models"] for name in found["abilities"]]
    assert pairs == PAIRS
    assert all(entry["outcomes"].keys() == {*ABILITIES} for entry in found["models"].values())
