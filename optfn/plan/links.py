"""Seconds of a collective on the links between chips."""

import itertools
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from optfn.mesh.compilers.chips import Chip
from optfn.plan.communication import Collective, Pairs

Place = tuple[int, ...]
Lane = tuple[int, int]  # a dimension, and its direction: 1 or −1


class Time(NamedTuple):
    """The seconds of a collective, and the lanes of the torus that it uses, None for all links."""

    seconds: float
    lanes: frozenset[Lane] | None = None


class Span(NamedTuple):
    """A group along a dimension of the torus.

    size: how many places it has.
    directions: 2 if it goes round, 1 on a line.
    sharing: how many groups use a link of it: with every second place taken, two.
    hops: the links between the two places that are farthest apart.
    """

    size: int
    directions: int
    sharing: float
    hops: float


class Switch:
    """Chips behind a switch. A network joins several such nodes."""

    def __init__(self, chip: Chip) -> None:
        self.chip = chip

    def time(self, x: Collective) -> Time:
        """Return the time of a collective: one latency, and its bytes over all links of a chip, or
        over the network between nodes if that takes longer."""
        n, chip = len(x.group), self.chip
        if n < 2:
            return Time(0.0)
        seconds = x.sent / (chip.links * chip.link)
        if chip.node is not None and chip.network is not None:
            seconds = max(seconds, self._outside(x, chip.node) / chip.network)
        return Time(seconds + chip.latency)

    def _outside(self, x: Collective, node: int) -> float:
        """Return the bytes that a chip sends out of its node: all bytes of a permutation if any
        pair leaves its node, and for a further collective the bytes of a ring of nodes."""
        if x.kind == "collective-permute":
            return x.num_bytes if any(a // node != b // node for a, b in x.pairs) else 0.0
        nodes = len({device // node for device in x.group})
        sent = x._replace(group=tuple(range(nodes))).sent
        # In a ring of nodes each chip of a node has its part; to all, each chip sends its bytes.
        return sent if x.kind == "all-to-all" else sent * nodes / len(x.group)


class Torus:
    """Chips at places of a torus, each linked with its two neighbours in every dimension."""

    def __init__(self, chip: Chip, places: Sequence[Place]) -> None:
        self.chip, self.places = chip, places
        self.lengths = [len(set(along)) for along in zip(*places, strict=True)]
        every = chip.ring_of or 0
        self.is_closed = [every > 0 and length % every == 0 for length in self.lengths]

    def time(self, x: Collective) -> Time:
        """Return the time of a collective along all dimensions that its group spans, or of a
        permutation by the shortest ways, 0 for a single place.

        A collective goes along all dimensions that its group spans at once, in both directions of
        those that it goes round, and leaves the links of the remaining dimensions free. Where a
        group leaves chips out, several groups use the same links. A permutation goes to each place
        by the shortest way, dimension by dimension.
        """
        if x.kind == "collective-permute":
            return self._permute(x.num_bytes, x.pairs)
        spans = {k: span for k, span in enumerate(self._spans(x.group)) if span.size > 1}
        if not spans:
            return Time(0.0)
        hops = sum(span.hops for span in spans.values())
        seconds = _busiest_bytes(x, [*spans.values()]) / self.chip.link + hops * self.chip.latency
        return Time(seconds, frozenset((k, way) for k in spans for way in (1, -1)))

    def _spans(self, group: Sequence[int]) -> list[Span]:
        """Return a group's Span along each axis: 2 directions if it closes a ring, else 1."""
        found = []
        for k, length in enumerate(self.lengths):
            along = sorted({self.places[device][k] for device in group})
            size, distance = len(along), along[-1] - along[0]
            if self.is_closed[k] and along == [*range(along[0], length, length // size)][:size]:
                found.append(Span(size, 2, sharing=length / size, hops=length / 2))
            else:
                found.append(Span(size, 1, sharing=distance / max(1, size - 1), hops=distance))
        return found

    def _permute(self, num_bytes: float, pairs: Pairs) -> Time:
        """Return the time of a permutation, for the bytes on its busiest link and the latency of
        its longest way, and the lanes that it uses."""
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
        """Return the links of the shortest way from one place to another, dimension by dimension,
        each as the place where it begins and its lane."""
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


def _busiest_bytes(x: Collective, spans: Sequence[Span]) -> float:
    """Return the bytes that the busiest link carries in one direction."""
    if x.kind == "all-to-all":
        # Half of the chips send half of their bytes through the cut across a dimension.
        cuts = (span.size / (4 * span.directions) * span.sharing for span in spans)
        return x.num_bytes * max(cuts)
    width = sum(span.directions / span.sharing for span in spans)
    return x.sent / (min(width, 2) if x.is_one_ring else width)


def list_places(lengths: Sequence[int]) -> list[Place]:
    """Return the places of a torus as JAX lists its chips: by hosts of 2 × 2, x first, then y."""
    hosts = [2 if k < 2 and length % 2 == 0 else 1 for k, length in enumerate(lengths)]
    places: list[Place] = []
    for host in list_box([length // size for length, size in zip(lengths, hosts, strict=True)]):
        for chip in list_box(hosts):
            sizes = zip(host, hosts, chip, strict=True)
            places.append(tuple(i * size + j for i, size, j in sizes))
    return places


def list_box(lengths: Sequence[int]) -> list[Place]:
    """Return the places of a box, the first dimension fastest."""
    return [place[::-1] for place in itertools.product(*map(range, reversed(lengths)))]
