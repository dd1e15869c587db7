"""Two clocks, of compute and of the links, and the time that compute waits for transfers."""

import dataclasses
from collections import defaultdict
from collections.abc import Iterable
from typing import Any, TypeAlias

from optfn.plan.links import Lane

Sums: TypeAlias = defaultdict[str, float]  # by kind of collective


@dataclasses.dataclass(eq=False)
class Transfer:
    """A collective on its way.

    Attributes:
      kind: its kind.
      seconds: how long it uses its links.
      sent: bytes that a device sends.
      lanes: the lanes of the torus that it uses, None for all links.
      is_carried: whether it moves only while an instruction that carries it runs.
      left: seconds that it still takes.
    """

    kind: str
    seconds: float
    sent: float
    lanes: frozenset[Lane] | None = None
    is_carried: bool = False
    left: float = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        """Begin with all of it left."""
        self.left = self.seconds

    def shares_links(self, other: "Transfer") -> bool:
        """Tell whether both use a link in common, as every pair does if one of them uses all links,
        so that the second waits for the first."""
        if self.lanes is None or other.lanes is None:
            return True
        return not self.lanes.isdisjoint(other.lanes)


@dataclasses.dataclass
class Totals:
    """The seconds, bytes and FLOPs of a schedule, summed. A counter has an entry for each kind of
    collective.

    Attributes:
      seconds: from begin to end: compute + exposed.
      compute: seconds of compute.
      communication: seconds of the links.
      exposed: seconds that compute waits for the links.
      sent: bytes that a device sends.
      count: collectives.
      asynchronous: collectives that begin at one instruction and end at another.
      flops: FLOPs of products.
      recomputed: FLOPs of products that run again in the backward pass.
    """

    seconds: float = 0.0
    compute: float = 0.0
    communication: Sums = dataclasses.field(default_factory=lambda: defaultdict(float))
    exposed: Sums = dataclasses.field(default_factory=lambda: defaultdict(float))
    sent: Sums = dataclasses.field(default_factory=lambda: defaultdict(float))
    count: Sums = dataclasses.field(default_factory=lambda: defaultdict(float))
    asynchronous: Sums = dataclasses.field(default_factory=lambda: defaultdict(float))
    flops: float = 0.0
    recomputed: float = 0.0

    def add(self, other: "Totals", times: int = 1) -> None:
        """Add `times` times the sums of another schedule."""
        for field in dataclasses.fields(self):
            more: Any = getattr(other, field.name)
            if isinstance(more, dict):
                mine = getattr(self, field.name)
                for kind, value in more.items():
                    mine[kind] += value * times
            else:
                setattr(self, field.name, getattr(self, field.name) + more * times)


class Clocks:
    """The clocks of one schedule, and the transfers that are on their way."""

    def __init__(self) -> None:
        self.totals = Totals()
        self.flying: list[Transfer] = []

    def start(self, transfer: Transfer, is_asynchronous: bool) -> None:
        """Count a transfer, and add it to those that are on their way."""
        totals, kind = self.totals, transfer.kind
        totals.communication[kind] += transfer.seconds
        totals.sent[kind] += transfer.sent
        totals.count[kind] += 1
        totals.asynchronous[kind] += is_asynchronous
        self.flying.append(transfer)

    def compute(self, seconds: float, carried: Iterable[Transfer]) -> None:
        """Advance both clocks by an instruction's seconds of compute.

        The links first move the `carried` transfers, one by one, and then the rest.
        """
        self.totals.compute += seconds
        self.totals.seconds += seconds
        for transfer in carried:
            moved = min(transfer.left, seconds)
            transfer.left -= moved
            seconds -= moved
        self._advance(seconds)

    def loop(self, body: Totals, times: int) -> None:
        """Add `times` iterations of a loop. Earlier transfers move while its body sends nothing."""
        # The transfers of the body have the links first, though they may overlap its compute.
        idle = max(0.0, body.seconds - sum(body.communication.values()))
        self._advance(idle * times)
        self.totals.add(body, times)

    def wait(self, transfer: Transfer) -> None:
        """Stop compute until a transfer is done, and all earlier transfers on the same links, or do
        nothing if it was waited for already."""
        if transfer not in self.flying:
            return
        earlier = self.flying[: self.flying.index(transfer)]
        transfer.is_carried = False  # nothing else runs beside it
        for other in earlier:
            if not other.is_carried and other.shares_links(transfer):
                self._expose(other)
        self._expose(transfer)
        self.flying.remove(transfer)

    def finish(self) -> Totals:
        """Wait for all transfers that are on their way, and return the sums."""
        for transfer in [*self.flying]:
            self.wait(transfer)
        return self.totals

    def _expose(self, transfer: Transfer) -> None:
        """Stop compute until a transfer is done, and count these seconds as exposed."""
        left = transfer.left
        self.totals.exposed[transfer.kind] += left
        self.totals.seconds += left
        self._advance(left)
        transfer.left = 0.0

    def _advance(self, seconds: float) -> None:
        """Move the transfers that are not carried for so many seconds, where on a shared link the
        earlier ones go first."""
        ahead: list[tuple[Transfer, float]] = []  # earlier transfers, and when each frees its links
        for transfer in self.flying:
            if transfer.is_carried or transfer.left <= 0:
                continue
            begin = max((end for other, end in ahead if other.shares_links(transfer)), default=0.0)
            moved = min(transfer.left, max(0.0, seconds - begin))
            transfer.left -= moved
            ahead.append((transfer, begin + moved))
