"""The functions of training have their options from one place."""

import inspect

import pytest

import optfn
from optfn.run.options import LoopOptions
from optfn.train.options import StepOptions

FUNCTIONS = {"make_train_step": 2, "fit": 3, "minimize": 4}
CALLS = {
    "make_train_step": lambda **more: optfn.make_train_step(None, optfn.sgd(0.1), **more),
    "minimize": lambda **more: optfn.minimize(None, optfn.sgd(0.1), {}, [], **more),
    "fit": lambda **more: optfn.fit(None, None, [], **more),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_signatures_and_help_have_every_argument(name):
    parameters = inspect.signature(getattr(optfn, name)).parameters
    kinds = [p.kind for p in parameters.values()]
    count = FUNCTIONS[name]
    assert kinds == [inspect.Parameter.POSITIONAL_OR_KEYWORD] * count + (
        [inspect.Parameter.KEYWORD_ONLY] * (len(kinds) - count)
    )
    assert all((p.default is p.empty) == (i < count) for i, p in enumerate(parameters.values()))
    text = inspect.getdoc(getattr(optfn, name))
    assert [k for k in parameters if text.count(f"\n  {k}: ") != 1] == []
    assert "**" not in text.partition("Args:")[2].partition("\n\n")[0]


# What `minimize` decides by its own arguments.
OF_THE_STEP = {"model_state", "donate", "average_model_state"}


def test_minimize_has_the_options_of_a_step_and_of_the_loop():
    def defaults(function):
        found = inspect.signature(function).parameters
        return {k: p.default for k, p in found.items() if p.kind is p.KEYWORD_ONLY}

    step, loop = defaults(optfn.make_train_step), defaults(optfn.fit)
    assert defaults(StepOptions) == {k: step[k] for k in step.keys() - OF_THE_STEP}
    assert defaults(LoopOptions) == loop
    assert defaults(optfn.minimize) == defaults(StepOptions) | loop | {"model_state": None}


@pytest.mark.parametrize("name", CALLS)
def test_an_unknown_argument_is_named(name):
    with pytest.raises(TypeError, match=f"{name}: .*unexpected keyword argument 'stepps'; its arg"):
        CALLS[name](stepps=1)
