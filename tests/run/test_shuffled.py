"""`shuffled`: the order of the seed and the epoch alone; loaders whose epoch a run sets."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import optfn
from optfn.distributed import data_mesh

X = np.random.default_rng(1).normal(size=(83, 3)).astype(np.float32)


def loss(w, batch):
    return jnp.mean((batch["x"] @ w - batch["y"]) ** 2)


def data(size=8, **options):
    return optfn.shuffled({"x": X, "y": jnp.arange(83.0)}, size, **options)


def run(batches, directory=None, stop=None, **options):
    return optfn.minimize(
        loss, optfn.adam(0.1), jnp.zeros(3), batches, epochs=4, checkpoint=directory,
        progress=False, callback=lambda step, state, metrics: step == stop, **options,
    )[0].params  # fmt: skip


@pytest.mark.parametrize("drop_last", [True, False])
def test_batches_are_counted_and_can_be_iterated_again(drop_last):
    """tests/reference_run has their order."""
    batches = optfn.shuffled(np.arange(83), 8, seed=3, drop_last=drop_last)
    batches.set_epoch(1)
    first, again = ([x.tolist() for x in batches] for _ in range(2))
    assert first == again and len(first) == len(batches) == (10 if drop_last else 11)


def test_a_run_that_resumes_draws_no_used_batch(tmp_path):
    drawn = []

    class Watched(np.ndarray):
        def __getitem__(self, at):
            drawn.append(at)
            return super().__getitem__(at)

    def batches():
        watched = optfn.shuffled({"x": X, "y": np.zeros(83)}, 8)
        watched.arrays["x"] = X.view(Watched)
        return watched

    run(batches(), tmp_path, 15)
    drawn.clear()
    run(batches(), tmp_path)
    assert len(drawn) == 40 - 15


@pytest.mark.filterwarnings("ignore:the run goes on with other data")
@pytest.mark.parametrize(
    ("other", "match"),
    [
        ({"seed": 1}, "seed was 0, and is 1 now"),
        ({"size": 9}, "size was 8, and is 9 now"),
        ({"drop_last": True}, "drop_last was False, and is True now"),
    ],
)
def test_other_batches_are_said_when_a_run_resumes(other, match, tmp_path):
    """The run stops at the end of an epoch, where another `drop_last` has fewer batches."""
    run(data(drop_last=False), tmp_path, 11)
    batches = data(**{"drop_last": False, **other})
    seen = []
    with pytest.warns(UserWarning, match=match):
        optfn.minimize(
            loss, optfn.adam(0.1), jnp.zeros(3), batches, epochs=4, checkpoint=tmp_path,
            progress=False, callback=lambda step, state, metrics: seen.append(step) or step > 50,
        )  # fmt: skip
    assert seen == [*range(12, 4 * len(batches) + 1)]


class Loader:
    """A loader that shuffles by its epoch, as samplers of torch do."""

    def __init__(self):
        self.epoch, self.seen = 0, []

    def set_epoch(self, epoch):
        self.epoch = epoch
        self.seen.append(epoch)

    def __iter__(self):
        order = np.random.default_rng(self.epoch).permutation(80)
        for i in range(0, 80, 8):
            yield {"x": X[order[i : i + 8]], "y": X[order[i : i + 8], 0]}


class Wrapped:
    """A DataLoader with a sampler."""

    def __init__(self):
        self.sampler = Loader()

    def __iter__(self):
        return iter(self.sampler)


@pytest.mark.parametrize("kind", [Loader, Wrapped])
def test_a_run_sets_the_epoch_of_a_loader_and_of_its_sampler(kind, tmp_path):
    whole = run(kind())
    loader = kind()
    run(loader, tmp_path, 12)
    np.testing.assert_array_equal(run(loader, tmp_path), whole)
    seen = getattr(loader, "sampler", loader).seen
    assert seen == [0, 1, 0, 1, 2, 3]


def test_without_epochs_a_loader_keeps_its_own():
    loader = Loader()
    loader.set_epoch(7)
    optfn.minimize(loss, optfn.adam(0.1), jnp.zeros(3), loader, progress=False)
    assert loader.seen == [7]


UNEVEN = {
    "shuffled": lambda: data(16, drop_last=False),
    "list": lambda: [{"x": X[:16], "y": X[:16, 0]}, {"x": X[:3], "y": X[:3, 0]}],
}


@pytest.mark.parametrize("kind, partitioner", [("shuffled", "shard_map"), ("list", "compiler")])
def test_a_batch_that_the_workers_do_not_divide_names_the_remedies_before_the_first(
    kind, partitioner
):
    words = r"batch of 3 examples cannot.*8 workers.*Drop.*another size.*weight 0.*optfn\.Mean"
    with pytest.raises(ValueError, match=words):
        run(UNEVEN[kind](), mesh=data_mesh(8), partitioner=partitioner, stop=1)


BAD = [
    (lambda: data(0), "size must be"),
    (lambda: data(100), "83 examples make no batch of size=100"),
    (lambda: optfn.shuffled((X, X[:5]), 2), "same number of examples"),
    (lambda: optfn.shuffled((X, 3.0), 2), "need a leading axis"),
    (lambda: data(seed=-1), "seed must be"),
]


def test_a_mask_is_an_error():
    with pytest.raises(TypeError, match="shuffled: array 'x' is a masked array"):
        optfn.shuffled({"x": np.ma.masked_invalid([1.0, np.nan])}, 1)


@pytest.mark.parametrize(("make", "match"), BAD)
def test_what_makes_no_batches_is_an_error(make, match):
    with pytest.raises(ValueError, match=match):
        make()


def test_a_short_pass_of_fewer_examples_than_a_batch():
    (batch,) = optfn.shuffled(X[:3], 8, drop_last=False)
    np.testing.assert_array_equal(np.sort(batch, 0), np.sort(X[:3], 0))
    assert jax.tree.structure(batch) == jax.tree.structure(X)
