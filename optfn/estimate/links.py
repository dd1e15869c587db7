"""Seconds of a collective on the links between chips."""

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from optfn.estimate.chips import Chip
from optfn.estimate.communication import Collective, Pairs

Place = tuple[int, ...]
Lane = tuple[int, int]  # a dimension, and its direction: 1 or −1


class Time(NamedTuple):
    """The seconds of a collective, and the lanes of the torus that it uses, None for all links."""

    seconds: float
    lanes: frozenset[Lane] | None = None


class Switch:
    """Chips behind a switch; several nodes of them are joined by a network."""

    def __init__(self, chip: Chip) -> None:
        self.chip = chip

    def time(self, x: Collective) -> Time:
        """Return the time of a collective."""
        n, chip = len(x.group), self.chip
        if n < 2:
            return Time(0.0)
        seconds = x.sent / (chip.links * chip.link)
        if chip.node is not None and chip.network is not None:
            seconds = max(seconds, self._outside(x, chip.node) / chip.network)
        return Time(seconds + chip.latency)

    def _outside(self, x: Collective, node: int) -> float:
        """Return the bytes that a chip sends to other nodes."""
        if x.kind == "collective-permute":
            return x.num_bytes if any(a // node != b // node for a, b in x.pairs) else 0.0
        nodes = len({device // node for device in x.group})
        sent = x._replace(group=tuple(range(nodes))).sent
        # In a ring of nodes each chip of a node has its part; to all, each chip sends its own.
        return sent if x.kind == "all-to-all" else sent * nodes / len(x.group)


class Torus:
    """Chips at places of a torus, each linked with its two neighbours in every dimension."""

    def __init__(self, chip: Chip, places: Sequence[Place]) -> None:
        self.chip, self.places = chip, places
        self.lengths = [len(set(along)) for along in zip(*places, strict=True)]
        every = chip.ring_of or 0
        self.is_closed = [every > 0 and length % every == 0 for length in self.lengths]

    def time(self, x: Collective) -> Time:
        """Return the time of a collective.

        A collective goes along all dimensions that its group spans at once, in both directions of
        those that it goes round; a permutation goes to each place by the shortest way, dimension
        by dimension.
        """
        if x.kind == "collective-permute":
            return self._permute(x.num_bytes, x.pairs)
        spans = [k for k in range(len(self.lengths)) if self._extent(x.group, k) > 1]
        if not spans:
            return Time(0.0)
        around = {
            k: self.is_closed[k] and self._extent(x.group, k) == self.lengths[k] for k in spans
        }
        hops = sum(
            self.lengths[k] / 2 if around[k] else self._extent(x.group, k) - 1 for k in spans
        )
        return Time(self._busy(x, around) / self.chip.link + hops * self.chip.latency)

    def _busy(self, x: Collective, around: dict[int, bool]) -> float:
        """Return the bytes that the busiest link carries in one direction."""
        if x.kind == "all-to-all":
            # Half of the chips send half of their bytes through the cut across a dimension.
            cuts = (self._extent(x.group, k) / (8 if ring else 4) for k, ring in around.items())
            return x.num_bytes * max(cuts)
        width = sum(2 if ring else 1 for ring in around.values())
        return x.sent / (min(width, 2) if x.is_one_ring else width)

    def _extent(self, group: Sequence[int], k: int) -> int:
        return len({self.places[device][k] for device in group})

    def _permute(self, num_bytes: float, pairs: Pairs) -> Time:
        loads: Counter[tuple[Place, Lane]] = Counter()
        farthest = 0
        for start, end in pairs:
            way = self._way(self.places[start], self.places[end])
            loads.update(way)
            farthest = max(farthest, len(way))
        busiest = max(loads.values(), default=0)
        lanes = frozenset(lane for _, lane in loads)
        return Time(busiest * num_bytes / self.chip.link + farthest * self.chip.latency, lanes)

    def _way(self, place: Place, end: Place) -> list[tuple[Place, Lane]]:
        """Return the links from one place to another: where each begins, and its lane."""
        way = []
        for k, length in enumerate(self.lengths):
            ahead = end[k] - place[k]
            if self.is_closed[k] and abs(ahead) > length / 2:
                ahead -= length if ahead > 0 else -length
            for _ in range(abs(ahead)):
                direction = 1 if ahead > 0 else -1
                way.append((place, (k, direction)))
                moved = place[k] + direction
                moved = moved % length if self.is_closed[k] else moved
                place = (*place[:k], moved, *place[k + 1 :])
        return way


def places_in_order(lengths: Sequence[int]) -> list[Place]:
    """Return the places of a torus in the order of its devices: the first dimension is fastest."""
    places: list[Place] = [()]
    for length in reversed(lengths):
        places = [(i, *rest) for rest in places for i in range(length)]
    return places
