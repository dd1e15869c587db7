"""Which way does `tune` find for a model of `make pods` on chips that are not there?

    .venv-compiled/bin/python -m benchmarks.studies.tune_pods 7B v5e:4x4
    .venv-compiled/bin/python -m benchmarks.studies.tune_pods small 1x8x1

compiles the ways for a model and a topology of `make pods`, after `make compilers`, and prints the
table. Its best row is the shortest step of these ways in benchmarks/results/pods.md. A process
compiles for one topology.
"""

import sys
import time

from benchmarks import targets
from benchmarks.pods import divisions, target_of
from benchmarks.scale import batch_of_all
from optfn.distributed import data_mesh, tune


def main(model: str, topology: str) -> None:
    """Print the table, and the seconds of the search."""
    target = target_of(topology)
    targets.prepare(target)
    mesh = data_mesh(devices=targets.devices(target))
    division, start = divisions(model)["FSDP"], time.perf_counter()
    batch = batch_of_all(division, mesh)
    print(tune(division.loss, division.tx, division.params, batch, mesh))
    print(f"{time.perf_counter() - start:.0f} s")


if __name__ == "__main__":
    main(*sys.argv[1:])
