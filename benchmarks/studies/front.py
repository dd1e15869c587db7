"""Which way of exchanging is best for its bytes, and for its seconds on a link?

    python -m benchmarks.studies.front [--runs benchmarks/studies/exchange.json]
        [--links benchmarks/studies/links.json]

Reads what `exchange` and `exchange_link` have measured, and prints the tables; `make gallery` draws
the pictures. A scheme is on the front if none that sends fewer bytes has a lower loss. Seconds to a
loss are the steps to it, by the curve of the held-out loss, times the time of a step on the link;
the loss is that of dense adamw at its end, and 2 %.
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

Row = dict[str, Any]  # as in benchmarks.measure, which imports JAX
RUNS, LINKS = (Path(__file__).parent / name for name in ("exchange.json", "links.json"))
SLACK = 1.02  # of the loss that is waited for


class Scheme(NamedTuple):
    """The runs of a scheme with so many steps.

    percent: how far the loss of each seed is above that of the dense step with the same optimizer.
    """

    name: str
    inner: str
    steps: int
    packet: float
    sent: float
    bits: list[float]
    percent: list[float]
    curve: np.ndarray  # (points, 2): steps, held-out loss, the mean over seeds

    @property
    def label(self) -> str:
        """What a picture calls it."""
        times = "" if self.steps == BASE_STEPS else f", {self.steps / BASE_STEPS:g} × the steps"
        return self.name.removeprefix(f"{self.inner}, ") + times


BASE_STEPS = 1600


def schemes(runs: Sequence[Row], width: int) -> list[Scheme]:
    """Return the schemes that were trained with a model of this width."""
    runs = [run for run in runs if run["width"] == width]
    dense = {
        (run["inner"], run["rate"], run["seed"]): run["bits"]
        for run in runs
        if run["scheme"] == f"{run['inner']}, dense" and run["steps"] == BASE_STEPS
    }
    best = {
        inner: min(
            (bits, rate) for (i, rate, seed), bits in dense.items() if (i, seed) == (inner, 0)
        )[1]
        for inner in {i for i, _, _ in dense}
    }
    groups: dict[tuple[str, int], list[Row]] = {}
    for run in runs:
        if run["inner"] in best and run["rate"] == best[run["inner"]]:
            groups.setdefault((run["scheme"], run["steps"]), []).append(run)
    return [_scheme(group, dense) for group in groups.values()]


def _scheme(group: list[Row], dense: dict[tuple[str, float, int], float]) -> Scheme:
    first = group[0]
    keys = [(run["inner"], run["rate"], run["seed"]) for run in group]
    return Scheme(
        first["scheme"],
        first["inner"],
        first["steps"],
        first["packet"],
        first["bytes"],
        [run["bits"] for run in group],
        [
            100 * (run["bits"] / dense[key] - 1)
            for run, key in zip(group, keys, strict=True)
            if key in dense
        ],
        np.mean([run["held_out"] for run in group], axis=0),
    )


def front(found: Sequence[Scheme]) -> list[Scheme]:
    """Return those than which no other has both fewer bytes and a lower loss, by bytes.

    Losses are compared with the dense ones of the same seeds, since schemes have other seeds.
    """
    best: list[Scheme] = []
    for scheme in sorted(found, key=lambda s: (s.packet, np.mean(s.percent))):
        if not best or np.mean(scheme.percent) < np.mean(best[-1].percent):
            best.append(scheme)
    return best


def steps_to(curve: np.ndarray, loss: float) -> float:
    """Return the steps after which a curve first is at `loss`, between its points; inf if never."""
    steps, losses = curve.T
    below = np.flatnonzero(losses <= loss)
    if not below.size:
        return float("inf")
    i = int(below[0])
    if i == 0:
        return float(steps[0])
    part = (losses[i - 1] - loss) / (losses[i - 1] - losses[i])
    return float(steps[i - 1] + part * (steps[i] - steps[i - 1]))


def table(found: Sequence[Scheme]) -> str:
    """Return what each scheme costs, by optimizer and bytes; the front in bold."""
    lines = [
        "| optimizer | scheme | B a parameter and step | sent by one of 4 | bits per byte "
        "| from dense | seeds |",
        "|---|---|---|---|---|---|---|",
    ]
    for inner in dict.fromkeys(s.inner for s in found):
        of_inner = [s for s in found if s.inner == inner]
        best = front([s for s in of_inner if s.steps == BASE_STEPS])
        for s in sorted(of_inner, key=lambda s: -s.packet):
            mark = "**" if s in best else ""
            spread = f" ± {np.std(s.bits):.3f}" if len(s.bits) > 1 else ""
            lines.append(
                f"| {inner} | {mark}{s.label}{mark} | {s.packet:.4f} | {s.sent:.4f} "
                f"| {np.mean(s.bits):.3f}{spread} | {np.mean(s.percent):+.1f} % | {len(s.bits)} |"
            )
    return "\n".join(lines)


def seconds(found: Sequence[Scheme], links: Sequence[Row]) -> list[Row]:
    """Return the seconds to dense adamw's loss and 2 %, for each scheme on each link."""
    (dense,) = (s for s in found if s.name == "adamw, dense" and s.steps == BASE_STEPS)
    loss = SLACK * float(dense.curve[-1, 1])
    rows: list[Row] = []
    for link in links:
        for s in (s for s in found if s.name == link["scheme"]):
            took = steps_to(s.curve, loss)
            rows.append(
                {"scheme": s, "mbits": link["mbits"], "steps": took, "ms": link["ms"],
                 "seconds": took * link["ms"] / 1e3}
            )  # fmt: skip
    base = {row["mbits"]: row["seconds"] for row in rows if row["scheme"] is dense}
    return [row | {"faster": base[row["mbits"]] / row["seconds"]} for row in rows]


def seconds_table(rows: Sequence[Row]) -> str:
    """Return the table of `seconds`, a line for each scheme and link."""
    lines = [
        "| Mbit/s | scheme | steps to the loss | ms a step | s | times as fast as dense |",
        "|---|---|---|---|---|---|",
    ]
    for row in rows:
        is_never = not np.isfinite(row["seconds"])
        took = "never | " if is_never else f"{row['steps']:,.0f} | "
        then = "- | -" if is_never else f"{row['seconds']:.0f} | {row['faster']:.1f}"
        link = row["mbits"] or "not limited"
        lines.append(f"| {link} | {row['scheme'].label} | {took}{row['ms']:.1f} | {then} |")
    return "\n".join(lines)


def draw_bytes(found: Sequence[Scheme]) -> Any:
    """Draw the loss of each scheme against its bytes; a line joins the best, which have numbers."""
    import matplotlib.pyplot as plt

    inners = list(dict.fromkeys(s.inner for s in found))
    figure, panels = plt.subplots(
        len(inners),
        figsize=(8, 3.2 * len(inners)),
        layout="constrained",
        squeeze=False,
        sharex=True,
    )
    for panel, inner in zip(panels[:, 0], inners, strict=True):
        of_inner = [s for s in found if s.inner == inner and s.steps == BASE_STEPS]
        panel.plot(
            [s.packet for s in of_inner], [np.mean(s.percent) for s in of_inner], "o",
            color="0.7", label="other schemes",
        )  # fmt: skip
        best = front(of_inner)
        panel.plot(
            [s.packet for s in best], [np.mean(s.percent) for s in best], "-", label="best",
        )  # fmt: skip
        top = min(25.0, max(np.mean(s.percent) for s in of_inner) + 1)
        seen = [s for s in best if np.mean(s.percent) <= top]  # the others are above the picture
        for number, s in enumerate(seen, 1):
            panel.plot(s.packet, np.mean(s.percent), marker=f"${number}$", markersize=7, zorder=4,
                       color="black", linestyle="none", label=s.label)  # fmt: skip
            panel.plot(s.packet, np.mean(s.percent), "o", markersize=13, zorder=3,
                       color="white", markeredgecolor="C0")  # fmt: skip
        panel.legend(loc="center left", bbox_to_anchor=(1, 0.5), frameon=False, fontsize=8)
        panel.axhline(0, color="black", linewidth=0.8, linestyle=":")
        panel.set(title=inner, ylabel="held-out loss above dense, %", xscale="log",
                  ylim=(-0.1 * top, top))  # fmt: skip
        _plain(panel)
    panels[-1, 0].set_xlabel("bytes of a packet, per parameter and step (H: local steps)")
    return figure


def draw_seconds(rows: Sequence[Row]) -> Any:
    """Draw the held-out loss of what comes to dense adamw's, a panel for each link."""
    import matplotlib.pyplot as plt

    rows = [row for row in rows if np.isfinite(row["seconds"])]
    links = list(dict.fromkeys(row["mbits"] for row in rows if row["mbits"]))
    figure, panels = plt.subplots(
        1, len(links), figsize=(8, 3.8), layout="constrained", squeeze=False,
        sharey=True,
    )  # fmt: skip
    for panel, link in zip(panels[0], links, strict=True):
        for row in (row for row in rows if row["mbits"] == link):
            steps, losses = row["scheme"].curve.T
            panel.plot(steps * row["ms"] / 1e3, losses, label=row["scheme"].label)
        panel.set(title=f"{link:,} Mbit/s", xlabel="seconds", xscale="log", ylim=(None, 3.5))
        _plain(panel)
    panels[0][0].set(ylabel="held-out bits per byte")
    lines = panels[0][0].get_lines()
    figure.legend(handles=lines, loc="outside lower center", ncols=2, frameon=False, fontsize=8)
    return figure


def _plain(panel: Any) -> None:
    panel.grid(alpha=0.25)
    panel.spines[["top", "right"]].set_visible(False)


def read(runs: Path, links: Path, width: int) -> tuple[list[Scheme], list[Row]]:
    """Return the schemes, and their seconds on links, from the files of both benchmarks."""
    found = schemes(json.loads(runs.read_text())["rows"], width)
    return found, seconds(found, json.loads(links.read_text())["rows"])


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=Path, default=RUNS)
    parser.add_argument("--links", type=Path, default=LINKS)
    parser.add_argument("--width", type=int, default=32, help="of the model")
    options = parser.parse_args()
    found, rows = read(options.runs, options.links, options.width)
    print(table(found), seconds_table(rows), sep="\n\n")


if __name__ == "__main__":
    main()
