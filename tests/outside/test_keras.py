"""A subclass of keras.Optimizer for any transformation, on keras' backend JAX; keras in the zoo."""

import os

os.environ["KERAS_BACKEND"] = "jax"

import jax
import keras
import numpy as np
import pytest
from clients import assert_same_run, with_rules
from zoo.matrix import PAIRS, outcome, read


class Transformation(keras.optimizers.Optimizer):
    """Keeps the state of a transformation in variables of keras."""

    def __init__(self, tx):
        super().__init__(learning_rate=0.0)
        self.tx = tx

    def build(self, variables):
        if not self.built:
            super().build(variables)
            leaves, self.structure = jax.tree.flatten(self.tx.init([v.value for v in variables]))
            self.kept = [self.add_variable(x.shape, dtype=x.dtype.name) for x in leaves]
            for variable, x in zip(self.kept, leaves, strict=True):
                variable.assign(x)

    def apply(self, grads, trainable_variables=None):
        if trainable_variables is None:  # as from `model.fit`
            trainable_variables = self._trainable_variables
        self.build(trainable_variables)
        state = jax.tree.unflatten(self.structure, [v.value for v in self.kept])
        params = [v.value for v in trainable_variables]
        updates, state = self.tx.update(list(grads), state, params)
        for variable, u in zip(trainable_variables, updates, strict=True):
            variable.assign(variable.value + u)
        for variable, x in zip(self.kept, jax.tree.leaves(state), strict=True):
            variable.assign(x)
        self.iterations.assign_add(1)


@with_rules()
def test_a_model_fitted_through_a_subclass(rule):
    rng = np.random.default_rng(0)
    x, start = rng.normal(size=(20, 3)), [rng.normal(size=s) for s in ((3, 4), 4, (4, 1), 1)]

    def run(tx):
        model = keras.Sequential(
            [keras.Input((3,)), keras.layers.Dense(4, "tanh"), keras.layers.Dense(1)]
        )
        model.set_weights(start)
        model.compile(Transformation(tx), loss="mse")
        model.fit(x, np.sin(x[:, :1]), batch_size=5, epochs=3, shuffle=False, verbose=0)
        return model.get_weights()

    assert_same_run(run, rule, 0.01)


@pytest.mark.parametrize("model, name", [pair for pair in PAIRS if pair[0].startswith("keras")])
def test_the_outcome_of_a_model_is_that_of_the_matrix(model, name):
    assert outcome(model, name) == read()["models"][model]["outcomes"][name]
