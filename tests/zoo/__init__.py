"""Small models, one for each idiom of each library, and what a training step does with them.

`make("linen scan")` makes a model: the function `scan` of linen_models.py. Each function
of abilities.py trains a model, and compares the run with optax by hand. tests/product/test_zoo.py
runs the pairs, and `make zoo` writes their outcomes to matrix.json, from which
docs/reference/models.md has its tables.
"""

import functools
import importlib
from collections.abc import Callable

from zoo.model import Model

MODELS = {
    "linen": ("scan", "tied", "batch_norm", "dropout", "boxes", "logical"),
    "nnx": ("scan", "stacked", "lora", "random_state", "metadata"),
    "equinox": ("stacked", "filtered", "stateful"),
    "haiku": ("layer_stack", "stateful"),
    "keras": ("stateless_call", "dropout"),
    "plain": ("tree_of_specs", "constraints"),
}


def idiom_of(model: str) -> str:
    """Return what a model shows, which is the docstring of its function, in Markdown."""
    return (_function_of(model).__doc__ or "").removesuffix(".")


@functools.cache
def make(model: str) -> Model:
    """Make a model, "<library> <idiom>"; a test without the library is skipped."""
    made: Model = _function_of(model)()
    return made


def _function_of(model: str) -> Callable[[], Model]:
    library, idiom = model.split()
    function: Callable[[], Model] = getattr(importlib.import_module(f"zoo.{library}_models"), idiom)
    return function
