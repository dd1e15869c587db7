"""How far is the mean of bfloat16 gradients from the float64 mean, if it is added in bfloat16?

    python -m benchmarks.studies.reduce_dtype

The gradients of 8, 64 and 512 workers are added in bfloat16 and in float32, and the mean is rounded
to bfloat16. One ring adds them one after the other, as a reduce-scatter over a ring of links does;
rings of 8 add the sums of 8, then of 64, as a reduce-scatter over one dimension of a torus at a
time does. The sums are simulated in NumPy; a chip may add in more digits than it sends.

* noise: the workers' gradients differ ten times as much as the mean is large, as those of small
  batches do.
* agreement: the gradients of an element have one sign and differ by a tenth, as those of a bias or
  a scale may in a large batch.

error: the L2 norm of the error over the norm of the mean. of the noise: the same error over the
standard error of the mean, which the batch itself makes.
"""

import ml_dtypes
import numpy as np

ELEMENTS = 8192
HEAD = (
    "| gradients | workers | rings | added in | bytes an element | error | of the noise |\n"
    "|---|---|---|---|---|---|---|"
)


def add_in_ring(x: np.ndarray, dtype: type) -> np.ndarray:
    """Return the sum over the first axis, rounded to dtype after each addition."""
    total = x[0].astype(dtype)
    for worker in x[1:]:
        total = (total.astype(np.float32) + worker.astype(np.float32)).astype(dtype)
    return total


def add(x: np.ndarray, dtype: type, rings: str) -> np.ndarray:
    """Return the sum of all workers, by one ring or by rings of 8."""
    if rings == "one":
        return add_in_ring(x, dtype)
    while len(x) > 1:
        x = add_in_ring(x.reshape(8, len(x) // 8, -1), dtype)
    return x[0]


def main() -> None:
    """Print the table."""
    rng = np.random.default_rng(0)
    print(HEAD)
    for kind in ("noise", "agreement"):
        center = rng.normal(size=ELEMENTS) if kind == "noise" else rng.uniform(1, 2, ELEMENTS)
        spread = 10.0 if kind == "noise" else 0.1
        for workers in (8, 64, 512):
            own = center + spread * rng.normal(size=(workers, ELEMENTS))
            own = own.astype(ml_dtypes.bfloat16)
            exact = own.astype(np.float64).mean(0)
            noise = np.linalg.norm(own.astype(np.float64).std(0)) / np.sqrt(workers)
            for rings in ("one", "of 8") if workers > 8 else ("one",):
                for dtype in (ml_dtypes.bfloat16, np.float32):
                    mean = add(own, dtype, rings).astype(np.float32) / workers
                    error = mean.astype(ml_dtypes.bfloat16).astype(np.float64) - exact
                    norm = np.linalg.norm(error)
                    size = np.dtype(dtype).itemsize
                    print(
                        f"| {kind} | {workers} | {rings} | {np.dtype(dtype).name} | {size} "
                        f"| {norm / np.linalg.norm(exact):.2%} | {norm / noise:.1%} |"
                    )


if __name__ == "__main__":
    main()
