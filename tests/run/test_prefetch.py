"""The batch that is read while a step runs: when, and its errors."""

import signal

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import optfn
from optfn.distributed import data_mesh

X = np.random.default_rng(0).normal(size=(6, 8, 3)).astype(np.float32)


def loss_fn(w, batch):
    return jnp.mean((batch @ w - 1.0) ** 2)


class Loader:
    """An iterator that counts what was read, and fails at batch `bad`."""

    def __init__(self, bad=None):
        self.read, self.bad = 0, bad

    def __iter__(self):
        return self

    def __next__(self):
        if self.read == self.bad:
            raise OSError(f"batch {self.read} cannot be read")
        if self.read == len(X):
            raise StopIteration
        self.read += 1
        return X[self.read - 1]


def run(batches, **options):
    return optfn.minimize(
        loss_fn, optfn.adam(0.1), jnp.zeros(3), batches, progress=False, **options
    )


def test_no_batch_is_read_beyond_the_steps():
    loader = Loader()
    run(loader, steps=4)
    assert loader.read == 4


def test_an_error_is_raised_at_the_step_of_its_batch():
    """Steps before it are made; a run that ends before it does not raise."""
    steps = []
    with pytest.raises(OSError, match="batch 3 cannot be read"):
        run(Loader(bad=3), callback=lambda n, *_: steps.append(n))
    assert steps == [1, 2, 3]
    state, _ = run(Loader(bad=3), callback=lambda n, *_: n == 3)
    assert int(state.step) == 3


def test_a_bad_batch_is_an_error_of_its_step():
    seen = []
    with pytest.raises(ValueError, match="leading axis of the batch must be divisible by the 8"):
        # A generator, as the sizes of a list are known before the first step.
        batches = (x for x in [X[0], X[1][:5]])
        run(batches, mesh=data_mesh(), callback=lambda n, *_: seen.append(n))
    assert seen == [1]


@pytest.mark.parametrize("prefetch", [0, 1])
def test_a_loader_may_overwrite_its_buffer(prefetch):
    """Also at a multiple of 64 bytes, as torch's tensors lie, where a CPU shares the memory."""
    memory = np.zeros(512 * 512 * 4 + 64, np.uint8)
    start = -memory.ctypes.data % 64
    buffer = memory[start : start + 512 * 512 * 4].view(np.float32).reshape(512, 512)

    def overwritten():
        for k in range(4):
            buffer[:] = k
            yield buffer

    def mean(w, x):  # which takes longer than the next batch
        return jnp.mean(x) + 0 * jnp.sum(jax.lax.fori_loop(0, 8, lambda _, y: jnp.tanh(y @ w), x))

    _, history = optfn.minimize(
        mean, optfn.sgd(0.0), jnp.eye(512), overwritten(), progress=False, prefetch=prefetch
    )
    np.testing.assert_array_equal(history["loss"], range(4))


@pytest.mark.usefixtures("interrupt")
def test_a_signal_while_a_batch_is_read_ends_the_run_after_its_step():
    def batches():
        for k, x in enumerate(X):
            if k == 2:  # read ahead in step 2
                signal.raise_signal(signal.SIGINT)
            yield x

    state, _ = run(batches())
    assert int(state.step) == 2


@pytest.mark.usefixtures("interrupt")
def test_a_second_signal_while_a_batch_is_read_interrupts():
    def batches():
        for k, x in enumerate(X):
            if k == 2:
                signal.raise_signal(signal.SIGINT)
                signal.raise_signal(signal.SIGINT)
            yield x

    with pytest.raises(KeyboardInterrupt):
        run(batches())


def test_the_batch_ahead_lies_beside_a_committed_state():
    device = jax.devices()[3]
    step = optfn.make_train_step(loss_fn, optfn.sgd(0.1))
    state = jax.device_put(step.init(jnp.zeros(3)), device)
    state, _ = optfn.fit(step, state, X, progress=False)
    assert state.params.devices() == {device}
    want, _ = optfn.fit(step, step.init(jnp.zeros(3)), X, progress=False)
    chex.assert_trees_all_equal(state.params, want.params)
