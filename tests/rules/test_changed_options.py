"""A counter that a run has saved may lie beyond the option of the program that resumes it."""

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from grids import suite

import optfn

PARAMS = {"w": jnp.zeros(2)}
LAYOUTS = {
    "one device": {},
    "packed": {"packed": True},
    "mesh": {"mesh": optfn.distributed.data_mesh(), "shard": "params"},
}
CHANGES = [(4, 3, 2), (4, 7, 3), (4, 2, 1), (8, 7, 4), (2, 1, 4), (1, 5, 3)]
CASES = [(layout, *change) for layout in LAYOUTS for change in CHANGES]
SUITE = [("one device", *change) for change in CHANGES] + [("packed", 4, 3, 2), ("mesh", 8, 7, 4)]


def sgd_of_means(numbers, before, used, after):
    """Return the param after each gradient, with `after` in the place of `before` from `used` on.

    A step is due once the sum has as many gradients as the option says, or more.
    """
    w, waiting, found = 0.0, [], []
    for k, g in enumerate(numbers):
        waiting.append(g)
        if len(waiting) >= (before if k < used else after):
            w, waiting = w - np.mean(waiting), []
        found.append(w)
    return found


@pytest.mark.parametrize(("layout", "before", "used", "after"), suite(CASES, *SUITE))
def test_accumulate_goes_on_with_another_number_of_gradients(layout, before, used, after):
    def make(every):
        tx = optfn.accumulate(optfn.sgd(1.0), every)
        return optfn.make_train_step(
            lambda p, x: jnp.sum(p["w"]) * jnp.mean(x), tx, **LAYOUTS[layout]
        )

    numbers = np.random.default_rng(0).normal(size=used + 2 * after + 1)
    batches = [np.full(8, x, np.float32) for x in numbers]
    step, found = make(before), []
    state = step.init(PARAMS)
    for k, x in enumerate(batches):
        if k == used:
            step = make(after)
            state = optfn.load_state_dict(step.init(PARAMS), optfn.state_dict(state))
        state, _ = step(state, x)
        found.append(float(optfn.unpack(state.params)["w"][0]))
    np.testing.assert_allclose(found, sgd_of_means(numbers, before, used, after), rtol=1e-5)


def change_options(before, after, grads, last, **extra):
    """Return the last updates and state of `after`, which takes over the state of `before`."""
    state = before.init(PARAMS)
    for g in grads:
        _, state = before.update({"w": jnp.full(2, g)}, state, PARAMS, **extra)
    state = optfn.load_state_dict(after.init(PARAMS), optfn.state_dict(state))
    return after.update({"w": jnp.full(2, last)}, state, PARAMS, **extra)


@pytest.mark.parametrize(("before", "after", "want"), [(100, 5, 8.0), (5, 100, 4.0), (9, 8, 8.0)])
def test_a_loss_scale_grows_after_another_interval(before, after, want):
    old, new = (
        optfn.dynamic_loss_scale(optfn.sgd(1.0), growth_interval=n, initial_scale=4.0)
        for n in (before, after)
    )
    _, state = change_options(old, new, [1.0] * (8 if before > 8 else 4), 1.0)
    assert float(optfn.loss_scale(state)) == want


@pytest.mark.parametrize(("before", "after", "gives_up"), [(5, 1, True), (1, 5, False)])
def test_nonfinite_gradients_are_counted_by_the_new_option(before, after, gives_up):
    old, new = (optfn.skip_nonfinite(optfn.sgd(1.0), max_consecutive=n) for n in (before, after))
    _, state = change_options(old, new, [np.nan] * (3 if before == 5 else 1), np.nan)
    assert bool(state.gave_up) == gives_up


@pytest.mark.parametrize(("before", "after", "applied"), [(5, 1, True), (1, 5, False)])
def test_spikes_are_counted_by_the_new_option(before, after, applied):
    old, new = (
        optfn.skip_spikes(optfn.sgd(1.0), window=2, max_consecutive=n) for n in (before, after)
    )
    grads = [1.0, 1.0] + [100.0] * (3 if before == 5 else 1)
    updates, _ = change_options(old, new, grads, 100.0)
    assert bool(updates["w"][0] != 0) == applied


@pytest.mark.parametrize(("before", "after", "rate"), [(5, 1, 0.5), (1, 5, 1.0)])
def test_a_plateau_is_counted_by_the_new_option(before, after, rate):
    old, new = (
        optfn.schedules.reduce_on_plateau(1.0, decay_rate=0.5, patience=n) for n in (before, after)
    )
    _, state = change_options(old, new, [1.0] * (5 if before == 5 else 2), 1.0, value=1.0)
    assert float(optfn.get_learning_rate(state)) == rate


@pytest.mark.parametrize(("before", "after", "closed"), [(8, 2, True), (7, 9, False)])
def test_a_window_of_an_average_ends_by_the_new_option(before, after, closed):
    old, new = (
        optax.chain(
            optfn.sgd(1.0),
            optfn.model_average(1.0, min_average_window=n, max_average_window=n),
        )
        for n in (before, after)
    )
    _, state = change_options(old, new, [1.0] * 6, 1.0)
    average = state[-1]
    assert (int(average.num_accumulates), int(average.old_num_accumulates)) == (
        (0, 7) if closed else (7, 0)
    )
