"""Constants of chips: clock, products, memory, links."""

import dataclasses
import re
from collections.abc import Sequence
from typing import Any


@dataclasses.dataclass(frozen=True)
class Chip:
    """The constants of a chip. With them `estimate_step` turns a schedule into seconds.

    Args:
      name: for messages.
      flops: peak FLOPs a second of products in bfloat16.
      hbm: bytes a second of its main memory.
      link: bytes a second that a link carries in one direction.
      links: the number of its links. On a torus a collective uses one in each direction of a
        dimension, behind a switch all of them.
      latency: seconds: of each hop on a torus, of each collective behind a switch.
      clock: hertz of the cycles that the compiler of a TPU estimates. None where the compiler
        estimates nothing, as on a GPU: an instruction then takes the time of its FLOPs or of its
        bytes, whichever is longer.
      efficiency: the share of `flops` that products reach, where there is no clock.
      ring_of: a dimension of the torus is closed to a ring if its length is a multiple of this,
        else an open line. None behind a switch.
      torus: the lengths of the dimensions of the slice, () to read them from the devices.
      node: how many chips a switch joins, None for all of them.
      network: bytes a second between nodes in one direction, for each chip.
      memory: bytes of its main memory; None if it is not known.
      host_link: bytes a second between it and its host in one direction; None if not known.

    `Chip.of("h100")` has the constants of a name, and `dataclasses.replace` changes some of them.
    """

    name: str
    flops: float
    hbm: float
    link: float
    links: int
    latency: float
    clock: float | None = None
    efficiency: float = 1.0
    ring_of: int | None = None
    torus: tuple[int, ...] = ()
    node: int | None = None
    network: float | None = None
    memory: float | None = None
    host_link: float | None = None

    def __post_init__(self) -> None:
        """Raise a ValueError for a constant that is out of range."""
        for field in ("flops", "hbm", "link", "links", "efficiency"):
            if not getattr(self, field) > 0:
                raise ValueError(f"Chip: {field} must be positive, got {getattr(self, field)!r}")
        if not self.latency >= 0:
            raise ValueError(f"Chip: latency must not be negative, got {self.latency!r}")
        if (self.node is None) != (self.network is None):
            raise ValueError("Chip: give node and network together, or neither")

    @staticmethod
    def of(name: str) -> "Chip":
        """Return the constants of a name such as "v5e", "v5e:4x4" with its slice, or "h100", in any
        case, or raise a ValueError for an unknown one."""
        kind, _, dims = name.lower().partition(":")
        if kind not in CHIPS or (dims and not re.fullmatch(r"\d+(x\d+)*", dims)):
            known = ", ".join(CHIPS)
            raise ValueError(
                f"estimate_step: chip must be one of {known}, for a TPU also with its slice, as in "
                f'"v5e:4x4", or a Chip(...) of constants; got {name!r}'
            )
        torus = tuple(map(int, filter(None, dims.split("x"))))
        return dataclasses.replace(CHIPS[kind], torus=torus)


# Clocks: peak FLOPs over the FLOPs a cycle of all matrix units, 4 of 128² on v5e, 8 of 128² on v5p,
# 4 of 256² on v6e. Checked: a product of 2048 × 4096 × 11008 has 96 % of the peak in the compiler's
# estimated cycles.
# FLOPs, HBM and its bytes, links: jax-ml.github.io/scaling-book, chapter 2 (one link, one way).
# Closed dimensions: cloud.google.com/tpu/docs, v5p: multiples of 4 chips; v5e, v6e: 16 only.
# Latency: an assumption, about 1 μs a hop in the same book.
# H100: NVIDIA's data sheet of the SXM5: 989 TFLOP/s, 3.35 TB/s, 18 links of 25 GB/s in one
# direction, and in a DGX a ConnectX-7 of 400 Gbit/s for each GPU. Assumptions: 0.8 of links and
# network, 5 μs, and 0.75 of the peak for products. H200: the data sheet of the SXM5.
# Links to the host: of TPUs the PCIe of the same chapter, which gives 16 GB/s each way for v4, 32
# for v6e, "about 2x higher than v5", and about 15 for a chip in general: v5e and v5p have 16 here.
# Of H100 and H200 PCIe 5.0 × 16, 64 GB/s in the data sheet. Assumption: 0.86 of it for large pinned
# copies. Nothing of it was measured; `plan_memory` takes a measured speed as `host_link`.
_REACHED_BY_NCCL = 0.8
_H100 = Chip(
    "h100", 989e12, 3.35e12, 25e9 * _REACHED_BY_NCCL, 18, 5e-6, efficiency=0.75,
    node=8, network=50e9 * _REACHED_BY_NCCL, memory=80e9, host_link=64e9 * 0.86,
)  # fmt: skip
CHIPS = {
    "v5e": Chip(
        "v5e", 197e12, 8.1e11, 4.5e10, 4, 1e-6, clock=1.5e9, ring_of=16, memory=16e9, host_link=16e9
    ),
    "v5p": Chip(
        "v5p", 459e12, 2.8e12, 9e10, 6, 1e-6, clock=1.75e9, ring_of=4, memory=95e9, host_link=16e9
    ),
    "v6e": Chip(
        "v6e", 918e12, 1.6e12, 9e10, 4, 1e-6, clock=1.75e9, ring_of=16, memory=32e9, host_link=32e9
    ),
    "h100": _H100,
    "h200": dataclasses.replace(_H100, name="h200", hbm=4.8e12, memory=141e9),
}
# As `device.device_kind` names them. H100s of PCIe and NVL have different constants.
_KINDS = {
    "NVIDIA H100 80GB HBM3": "h100", "NVIDIA H200": "h200",
    "TPU v5 lite": "v5e", "TPU v5e": "v5e", "TPU v5": "v5p", "TPU v5p": "v5p",
    "TPU v6 lite": "v6e", "TPU v6e": "v6e",
}  # fmt: skip


def find_chip(device_kind: str) -> Chip | None:
    """Return the constants of a kind, as `device.device_kind` names it, or None for an unknown
    kind."""
    return CHIPS.get(_KINDS.get(device_kind, ""))


def make_cpu_error() -> ValueError:
    """Return, without raising it, the ValueError that says that `estimate_step` cannot take a
    program for CPUs."""
    return ValueError(
        "estimate_step: the program is compiled for CPUs, whose compiler makes no schedule of "
        "communication beside compute. Compile it for a TPU or GPU, which takes no device: "
        "docs/will-it-fit.md"
    )


def recognize_chip(devices: Sequence[Any]) -> Chip:
    """Return the constants of the kind of the first of the devices, or raise a ValueError if it is
    a CPU or of an unknown kind."""
    platform, kind = devices[0].platform, devices[0].device_kind
    if platform == "cpu":
        raise make_cpu_error()
    chip = find_chip(kind)
    if chip is None:
        raise ValueError(
            f"estimate_step: no constants are known for {kind!r}; pass chip=Chip(...) with them"
        )
    return chip


def find_peak(devices: Sequence[Any]) -> float | None:
    """Return the peak FLOPs a second of all devices together, in bfloat16, or None if the peak of a
    device is unknown."""
    chips = [find_chip(device.device_kind) for device in devices]
    return None if None in chips else sum(chip.flops for chip in chips if chip)
