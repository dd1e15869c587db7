"""Names of a state are matched with the params that they belong to by one lookup each."""

import numpy as np

from optfn.mesh.state.names import match_params

PATHS = ["w", "layers/w", "layers/0", "deep/layers/w"]


def match_by_scan(name, shape, paths):
    """Return the longest path that ends the name; numbers at the end are left out if need be."""
    words = name.split("/")
    while True:
        end = "/".join(words)
        found = [p for p in paths if end.endswith("/" + p) or (p == "" and shape)]
        if found:
            return max(found, key=len)
        if not words or not words[-1].isdigit():
            return None
        words.pop()


def test_each_name_has_the_path_of_a_scan_over_all_paths():
    rng = np.random.default_rng(0)
    words = ["adam", "m", "w", "layers", "0", "1", "deep", "step"]
    names = ["/".join(rng.choice(words, size=rng.integers(1, 7))) for _ in range(2000)]
    for paths in (PATHS, [""], ["w"]):
        leaves = [np.zeros((2,) if rng.random() < 0.5 else ()) for _ in names]
        found = list(match_params(zip(names, leaves, strict=True), paths))
        wanted = [match_by_scan(n, x.shape, paths) for n, x in zip(names, leaves, strict=True)]
        assert found == wanted


def test_the_paths_are_read_once_for_all_names():
    class Counted(list):
        reads = 0

        def __iter__(self):
            Counted.reads += 1
            return super().__iter__()

    paths = Counted(f"layers/{i}/w" for i in range(100))
    names = [(f"adam/m/layers/{i}/w", np.zeros(2)) for i in range(100)]
    assert list(match_params(names, paths)) == list(paths)
    assert Counted.reads == 2  # by match_params, and by this test
