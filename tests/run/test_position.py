"""Where an iterator of batches stands is in the checkpoint: a resume reads no old batch."""

import functools

import grain
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from grids import suite
from problems import square_error

import optfn
from optfn.run import position

X = np.random.default_rng(0).normal(size=(12, 8, 3)).astype(np.float32)


STEP = optfn.make_train_step(square_error, optfn.adam(1e-2))


def run(batches, directory=None, **options):
    state = STEP.init(jnp.zeros(3))
    return optfn.fit(STEP, state, batches, checkpoint=directory, progress=False, **options)


class Reader:
    """An iterator that keeps which batches it has read; `form` makes its state of a number."""

    def __init__(self, read, data, form=lambda k: {"next": k}, number=lambda state: state["next"]):
        self.read, self.data, self.form, self.number, self.next = read, data, form, number, 0

    def __iter__(self):
        return self

    def __next__(self):
        if self.next == len(self.data):
            raise StopIteration
        self.read.append(self.next)
        self.next += 1
        return self.data[self.next - 1]

    def get_state(self):
        return self.form(self.next)

    def set_state(self, state):
        self.next = self.number(state)


class Dataset:
    """Batches that can be iterated again, each time by a new Reader."""

    def __init__(self, data=X, **forms):
        self.data, self.forms, self.read = data, forms, []

    def __iter__(self):
        return Reader(self.read, self.data, **self.forms)


FORMS = {
    "a dict": {},
    "a number": {"form": lambda k: k, "number": lambda state: state},
    "bytes": {"form": lambda k: bytes([255, k]), "number": lambda state: state[1]},
    "a nested list": {"form": lambda k: [[k], None, "é"], "number": lambda state: state[0][0]},
}


@pytest.mark.parametrize("form, stop", zip(FORMS.values(), (4, 5, 5, 4), strict=True), ids=FORMS)
def test_a_resume_reads_no_old_batch(form, stop, tmp_path):
    run(Dataset(**form), tmp_path, steps=stop, save_every=2)
    data = Dataset(**form)
    _, history = run(data, tmp_path)
    assert data.read == list(range(stop, 12)) and len(history["loss"]) == 12
    assert history.keys() == run(X)[1].keys()


@pytest.mark.parametrize("stop", suite(range(1, 12), 4, 6))
def test_passes_go_on_where_they_stood(stop, tmp_path):
    """Also between two passes, where the next batch is drawn to see whether the pass has ended."""
    options = {"epochs": 3, "evaluate": lambda w: w[0], "evaluate_every": "epoch"}
    whole, history = run(X[:4], **options)
    run(Dataset(X[:4]), tmp_path, steps=stop, **options)
    data = Dataset(X[:4])
    state, again = run(data, tmp_path, **options)
    assert data.read == [k % 4 for k in range(stop, 12)]
    np.testing.assert_array_equal(state.params, whole.params)
    for name in ("loss", "epoch"):
        np.testing.assert_array_equal(again[name], history[name])
    assert set(history["evaluation_step"]) <= set(again["evaluation_step"])


def test_a_run_that_is_finished_reads_nothing_and_more_steps_go_on(tmp_path):
    run(Dataset(X[:8]), tmp_path)
    data = Dataset(X[:8])
    assert int(run(data, tmp_path)[0].step) == 8
    assert data.read == []
    more = Dataset(X)
    assert int(run(more, tmp_path)[0].step) == 12
    assert more.read == [8, 9, 10, 11]


def test_a_state_that_began_later_counts_its_own_batches(tmp_path):
    begin, _ = run(X[:2])
    fit = functools.partial(optfn.fit, STEP, checkpoint=tmp_path, progress=False)
    fit(jax.tree.map(jnp.copy, begin), Dataset(X[2:]), steps=3)
    data = Dataset(X[2:])
    state, _ = fit(jax.tree.map(jnp.copy, begin), data, steps=7)
    assert data.read == [3, 4, 5, 6]
    np.testing.assert_array_equal(state.params, run(X[:9])[0].params)


@pytest.mark.parametrize("first", [X, Dataset()], ids=["none", "a state"])
def test_a_file_or_batches_without_a_state_pass_over_the_old_ones(first, tmp_path):
    run(first, tmp_path, steps=4)
    other = Dataset() if first is X else X
    state, _ = run(other, tmp_path)
    np.testing.assert_array_equal(state.params, run(X)[0].params)
    if first is X:
        assert other.read == list(range(12))


def test_the_state_may_be_an_object_that_the_iterator_changes(tmp_path):
    class Live(Reader):
        state = None

        def get_state(self):
            self.state = self.state or {}
            self.state["next"] = self.next
            return self.state

        def __next__(self):
            found = super().__next__()
            self.get_state()
            return found

    for last in (5, 9, 12):  # the run has read a batch ahead
        read = []
        state, _ = run(Live(read, X), tmp_path, callback=lambda n, *_, last=last: n == last)
    assert read == [9, 10, 11]
    np.testing.assert_array_equal(state.params, run(X)[0].params)


def test_a_state_that_the_iterator_refuses_is_said_and_batches_are_passed_over(tmp_path):
    def refuse(state):
        raise KeyError("another dataset")

    run(Dataset(), tmp_path, steps=4)
    data = Dataset(number=refuse)
    with pytest.warns(
        UserWarning, match="does not accept its state from the checkpoint.*another dataset"
    ):
        state, _ = run(data, tmp_path)
    assert data.read == list(range(12))
    np.testing.assert_array_equal(state.params, run(X)[0].params)


def test_a_state_that_is_no_json_is_said_and_left_out(tmp_path):
    for state in (np.arange(3), (1, 2), {1: 2}, {"x": np.float32(1)}):
        data = Dataset(form=lambda k, state=state: state, number=lambda state: 0)
        with pytest.warns(UserWarning, match="without the state of the iterator"):
            run(data, tmp_path, steps=1)
        assert position.BATCHES not in np.load(tmp_path / "step_000000001.npz")
        (tmp_path / "step_000000001.npz").unlink()
    run(X, tmp_path, steps=4)


def test_the_position_survives_a_save_by_hand(tmp_path):
    run(Dataset(), tmp_path, steps=4)
    found, history = optfn.restore_checkpoint(tmp_path, STEP.init(jnp.zeros(3)))
    optfn.save_checkpoint(tmp_path, optfn.set_learning_rate(found, 1e-4), history)
    data = Dataset()
    with pytest.warns(UserWarning, match="learning rate of its checkpoint"):
        run(data, tmp_path)
    assert data.read == list(range(4, 12))
    optfn.plot.losses(history)


def test_a_directory_of_orbax_has_the_position_too(tmp_path):
    run(Dataset(), tmp_path, steps=4)
    found, history = optfn.restore_checkpoint(tmp_path, STEP.init(jnp.zeros(3)))
    (tmp_path / "step_000000004.npz").unlink()
    optfn.save_checkpoint(tmp_path, found, history, sharded=True)
    data = Dataset()
    run(data, tmp_path)
    assert data.read == list(range(4, 12))


def test_each_process_has_its_own_position(monkeypatch):
    """Of a run on another number of processes only positions that were the same can be used."""

    def among(*numbers):
        texts = [position.take_position(1, n).text for n in numbers]
        monkeypatch.setattr(position.processes, "gather_texts", lambda own: texts)
        return position.encode_position(position.take_position(1, numbers[0]), is_shared=True)

    def read_in(process, count, arrays):
        monkeypatch.setattr(position.jax, "process_index", lambda: process)
        monkeypatch.setattr(position.jax, "process_count", lambda: count)
        found = position.decode_position(arrays).position
        return found and found.state

    own, same = among(5, 7), among(6, 6)
    assert [read_in(k, 2, own) for k in range(2)] == [5, 7]
    assert read_in(0, 1, own) is read_in(2, 3, own) is None
    assert [read_in(k, n, same) for k, n in ((0, 1), (1, 2), (2, 3))] == [6, 6, 6]


@pytest.mark.parametrize("kind", ["dataset", "loader"])
def test_grain_goes_on_without_reading(kind, tmp_path):
    """Its datasets give a dict as the state, its loaders bytes."""
    read = []

    class Source:
        def __repr__(self):
            return "Source()"

        def __len__(self):
            return 48

        def __getitem__(self, k):
            read.append(int(k))
            return X[int(k) % 12, int(k) % 8]

    def batches():
        if kind == "dataset":
            data = grain.MapDataset.source(Source()).shuffle(seed=3).batch(4)
            return data.to_iter_dataset(grain.ReadOptions(num_threads=0))
        sampler = grain.samplers.IndexSampler(48, shuffle=True, seed=3, num_epochs=1)
        return grain.DataLoader(
            data_source=Source(), sampler=sampler, operations=[grain.transforms.Batch(4)],
            read_options=grain.ReadOptions(num_threads=0),
        )  # fmt: skip

    _, history = run(batches())
    order = read.copy()
    assert len(history["loss"]) == 12 and sorted(order[:48]) == list(range(48))
    run(batches(), tmp_path, steps=5)
    read.clear()
    _, again = run(batches(), tmp_path)
    assert not {*read} & {*order[:20]}
    np.testing.assert_array_equal(again["loss"], history["loss"])


class Loader:
    """Batches in another order each time, as a loader that no seed decides."""

    def __init__(self, data=X, seeds=(0, 0)):
        self.data, self.seeds = data, iter(seeds)

    def __iter__(self):
        return iter(self.data[np.random.default_rng(next(self.seeds)).permutation(len(self.data))])


@pytest.mark.parametrize("prefetch, save_every", [(0, 1), (1, 5)])
def test_other_data_before_a_checkpoint_is_said(prefetch, save_every, tmp_path):
    options = {"prefetch": prefetch, "save_every": save_every}
    run(Loader(), tmp_path, steps=7, **options)
    with pytest.warns(UserWarning, match="goes on with other data: batch 7") as caught:
        run(Loader(seeds=[1]), tmp_path, **options)
    assert len(caught) == 1


def test_the_same_data_is_no_warning(tmp_path):
    """Also in other forms, in a buffer that is filled again, on a device, and with an iterator that
    goes on by itself."""
    buffer = np.zeros_like(X[0])

    def refilled():
        for x in X:
            buffer[:] = x
            yield buffer

    forms = [
        lambda: X, lambda: list(X), lambda: Loader(seeds=[3]), refilled, Dataset,
        lambda: list(map(jnp.asarray, X)), lambda: [x[:, ::-1][:, ::-1] for x in X],
        lambda: optfn.shuffled(X.reshape(-1, 3), 8, seed=2),
    ]  # fmt: skip
    for i, make in enumerate(forms):
        run(make(), tmp_path / str(i), steps=5)
        run(make(), tmp_path / str(i), steps=9)
        run(make(), tmp_path / str(i))


@pytest.mark.parametrize("kind", ["numbers", "tensors"])
def test_batches_of_other_types_are_compared(kind, tmp_path):
    one = float if kind == "numbers" else pytest.importorskip("torch").tensor
    step = optfn.make_train_step(lambda w, x: jnp.mean((w - x) ** 2), optfn.sgd(0.1))
    go_on = functools.partial(optfn.fit, step, checkpoint=tmp_path, progress=False)
    go_on(step.init(jnp.zeros(())), [one(x) for x in (1.0, 2.0, 3.0)], steps=2)
    with pytest.warns(UserWarning, match="goes on with other data: batch 2"):
        go_on(step.init(jnp.zeros(())), [one(x) for x in (1.0, 5.0, 3.0)])


def test_rounds_are_counted_as_batches(tmp_path):
    options = {"mesh": optfn.distributed.data_mesh(2), "local_steps": 2}
    step = optfn.make_train_step(square_error, optfn.adam(1e-2), **options)
    run_on = functools.partial(optfn.fit, step, checkpoint=tmp_path, progress=False)
    run_on(step.init(jnp.zeros(3)), X, steps=8)
    run_on(step.init(jnp.zeros(3)), X, steps=12)
    with pytest.warns(UserWarning, match="goes on with other data: batch 6"):
        run_on(step.init(jnp.zeros(3)), X[::-1])


def noisy_error(w, x, key):
    return square_error(w, x) + 0 * jax.random.normal(key)


@pytest.mark.parametrize("other", [1, jax.random.key(5)], ids=["seed", "key"])
def test_another_rng_is_said(other, tmp_path):
    def fit(rng, **options):
        optfn.minimize(
            noisy_error, optfn.adam(1e-2), jnp.zeros(3), X, rng=rng, checkpoint=tmp_path,
            progress=False, **options,
        )  # fmt: skip

    fit(True, steps=3)
    fit(0, steps=6)  # the same key
    fit(jax.random.key(0), steps=8)
    with pytest.warns(UserWarning, match="goes on with another rng than until step 8"):
        fit(other)
