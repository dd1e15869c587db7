"""How large a batch fits on one chip, and which way is the fastest: as estimated, and as measured?

    python -m benchmarks.studies.tune_chip [toy]

tunes a step of the Llama of 0.6B parameters of benchmarks/chip.py twice, once from the compiled
schedule and once by steps that run. A third search believes in endless memory, so that the device
says itself which batches do not fit. It needs a GPU or TPU, or `toy` on a CPU.
"""

import sys

import jax

from benchmarks.chip import MODELS, TOY
from optfn.distributed import data_mesh, tune

WAYS = [{}, {"microbatches": 4}]
SIZES = 4, 16, 32, 64, 128


def main(model: str = "0.6B") -> None:
    """Print the three tables."""
    llama, _ = (MODELS | TOY)[model]
    x = llama.divisions()["FSDP"]
    for title, options in (
        ("estimated", {}),
        ("measured", {"measure": 5}),
        ("measured, whatever the compiler says of memory", {"measure": 1, "memory": 1e15}),
    ):
        found = tune(
            x.loss, x.tx, x.params, x.batch, data_mesh(1), ways=WAYS, batch_sizes=SIZES, **options
        )
        print(f"\n{title}, on {jax.devices()[0].device_kind}\n{found}", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
