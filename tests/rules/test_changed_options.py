"""A counter that a run has saved may lie beyond the option of the program that resumes it."""

import jax.numpy as jnp
import numpy as np
import pytest

import optfn

PARAMS = {"w": jnp.zeros(2)}


# Of an option n: a transform, and what is read from its update and state.
OPTIONS = {
    "loss scale": (
        lambda n: optfn.dynamic_loss_scale(optfn.sgd(1.0), growth_interval=n, initial_scale=4.0),
        lambda updates, state: optfn.loss_scale(state),
    ),
    "nonfinite": (
        lambda n: optfn.skip_nonfinite(optfn.sgd(1.0), max_consecutive=n),
        lambda updates, state: state.gave_up,
    ),
    "spikes": (
        lambda n: optfn.skip_spikes(optfn.sgd(1.0), window=2, max_consecutive=n),
        lambda updates, state: updates["w"][0] != 0,
    ),
    "plateau": (
        lambda n: optfn.schedules.reduce_on_plateau(1.0, decay_rate=0.5, patience=n),
        lambda updates, state: optfn.get_learning_rate(state),
    ),
    "window": (
        lambda n: optfn.model_average(1.0, min_average_window=n, max_average_window=n),
        lambda updates, state: (state.num_accumulates, state.old_num_accumulates),
    ),
}


@pytest.mark.parametrize(
    ("name", "before", "after", "gradients", "want"),
    [
        ("loss scale", 100, 5, [1.0] * 9, 8.0),
        ("loss scale", 5, 100, [1.0] * 5, 4.0),
        ("loss scale", 9, 8, [1.0] * 9, 8.0),
        ("nonfinite", 5, 1, [np.nan] * 4, True),
        ("nonfinite", 1, 5, [np.nan] * 2, False),
        ("spikes", 5, 1, [1.0, 1.0] + [100.0] * 4, True),
        ("spikes", 1, 5, [1.0, 1.0] + [100.0] * 2, False),
        ("plateau", 5, 1, [1.0] * 6, 0.5),
        ("plateau", 1, 5, [1.0] * 3, 1.0),
        ("window", 8, 2, [1.0] * 7, (0, 7)),
        ("window", 7, 9, [1.0] * 7, (7, 0)),
    ],
)
def test_a_counter_ends_by_the_new_option(name, before, after, gradients, want):
    """The last of the gradients is the first after the change."""
    make, read = OPTIONS[name]
    tx, last = make(before), len(gradients) - 1
    state = tx.init(PARAMS)
    for k, g in enumerate(gradients):
        if k == last:
            tx = make(after)
            state = optfn.load_state_dict(tx.init(PARAMS), optfn.state_dict(state))
        extra = {"value": 1.0} if name == "plateau" else {}
        updates, state = tx.update({"w": np.full(2, g, np.float32)}, state, PARAMS, **extra)
    np.testing.assert_array_equal(read(updates, state), want)
