"""What do sums of gradients in float32 cost in a step? It is compiled for many chips, and not run.

    python -m benchmarks.studies.reduce_seconds --topology 1x8x1     # 8 H100s
    python -m benchmarks.studies.reduce_seconds --topology v5e:4x4

The compilers are those of `make compiled`, and the model is the Llama 2 7B of `benchmarks.pods`, in
bfloat16: divided by FSDP, and with 2 of its 32 layers also on each device whole. Each step is
compiled with `reduce_dtype=None` and "float32". The milliseconds are those of
`optfn.distributed.estimate_step`, which reads the compiled schedule with assumed speeds of links:
exposed is the communication for which compute waits.
"""

import argparse

from benchmarks import pods, scale, targets
from benchmarks.scale import Division
from optfn.distributed import StepEstimate, estimate_step

HEAD = (
    "| way | sums in | GB sent | communication ms | exposed ms | step ms |\n"
    "|---|---|---|---|---|---|"
)
DTYPES = (None, "float32")


def divisions() -> dict[str, Division]:
    """Return the ways of dividing the model."""
    llama = pods.LLAMAS["7B"]
    whole = llama._replace(layers=2).divisions()["FSDP"]._replace(options={})
    return {"FSDP": llama.divisions()["FSDP"], "data parallel, 2 layers": whole}


def estimate(division: Division, topology: str, dtype: str | None) -> StepEstimate:
    """Return the estimate of a step that adds gradients in a dtype."""
    division = division._replace(options={**division.options, "reduce_dtype": dtype})
    mesh = division.mesh(targets.devices(pods.target_of(topology)))
    lowered = scale.made(division, mesh).lower(division.params, scale.batch_of_all(division, mesh))
    return estimate_step(lowered.compile())


def main() -> None:
    """Print the table of a topology."""
    parser = argparse.ArgumentParser(description="cost of sums in float32, compiled")
    parser.add_argument("--topology", default="1x8x1", help='such as "v5e:4x4", or 1x8x1 of H100s')
    topology = parser.parse_args().topology
    targets.prepare(pods.target_of(topology))
    print(HEAD)
    for way, division in divisions().items():
        for dtype in DTYPES:
            found = estimate(division, topology, dtype)
            sent, communication, exposed = (
                sum(x.values()) for x in (found.sent, found.communication, found.exposed)
            )
            print(
                f"| {way} | {dtype or 'bfloat16'} | {sent / 1e9:.1f} | {1e3 * communication:.0f} "
                f"| {1e3 * exposed:.0f} | {1e3 * found.seconds:.0f} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
