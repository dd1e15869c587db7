"""Do the examples train in the way that `tune` finds?

    python -m benchmarks.studies.tune_examples

The model of `make demo` on one device of a CPU, in batches of 4 to 32, and on eight, with 32
examples; and the recommender's tables on eight. Each step is measured.
"""

from functools import partial

from examples import recommender  # before jax: it asks for eight devices  # isort: skip

import os

import jax
import numpy as np

from examples import demo, transformer
from optfn.distributed import data_mesh, tune


def main() -> None:
    """Print the three tables."""
    params = transformer.init(jax.random.key(0), demo.CONFIG)
    loss_fn = partial(transformer.loss_fn, config=demo.CONFIG)
    tx = demo.OPTIMIZERS["adamw"](2400)
    batch = np.zeros((32, demo.CONFIG.length + 1), np.int32)
    print("demo, one device")
    print(tune(loss_fn, tx, params, batch, data_mesh(1), batch_sizes=[4, 8, 16, 32], measure=9))
    print("\ndemo, eight devices")
    print(tune(loss_fn, tx, params, batch, data_mesh(8), measure=9))

    sizes = recommender.Sizes()
    log = recommender.Log(sizes, 0)
    ways = [
        {},
        {"tables": recommender.TABLES},
        {"tables": recommender.TABLES, "shard_tables": True},
        {"shard": "params"},
    ]
    print("\nrecommender, eight devices")
    print(
        tune(
            recommender.loss_fn, recommender.optimizer(1e-3, 1e-3), recommender.init(sizes, 0),
            next(log.batches(0)), data_mesh(8), ways=ways, measure=9,
        )
    )  # fmt: skip
    print("load", os.getloadavg())


if __name__ == "__main__":
    main()
