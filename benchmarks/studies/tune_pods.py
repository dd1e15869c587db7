"""Which way does `tune` find for a Llama on chips that are not there?

    .venv-compiled/bin/python -m benchmarks.studies.tune_pods 7B v5e:4x4

compiles the ways for a model and a topology of `make pods`, after `make compilers`, and prints the
table. Its best row is the shortest step of these ways in benchmarks/results/pods.md. A process
compiles for one topology.
"""

import sys
import time

import jax
import jax.numpy as jnp

from benchmarks import targets
from benchmarks.pods import ADAMW, LLAMAS, target_of
from optfn.distributed import data_mesh, tune


def main(model: str, topology: str) -> None:
    """Print the table, and the seconds of the search."""
    target = target_of(topology)
    targets.prepare(target)
    mesh = data_mesh(devices=targets.devices(target))
    llama, start = LLAMAS[model], time.perf_counter()
    params = llama.divisions()["FSDP"].params
    batch = jax.ShapeDtypeStruct((mesh.size, llama.tokens + 1), jnp.int32)
    print(tune(llama.loss, ADAMW, params, batch, mesh))
    print(f"{time.perf_counter() - start:.0f} s")


if __name__ == "__main__":
    main(*sys.argv[1:])
