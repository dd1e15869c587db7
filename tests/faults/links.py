"""Links that are slow, lose packets, or are cut."""

import contextlib
import fcntl
import heapq
import itertools
import os
import random
import select
import struct
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from faults.runs import BIT_FOR_BIT, GONE, SAME, Processes, do, ends_the_same, goes_on
from faults.table import Skipped, fault


@contextlib.contextmanager
def cable(spaces: list[str]) -> Iterator[None]:
    """Join two namespaces by a link, eth0 in each."""
    end = ("type", "veth", "peer", "name", "eth0", "netns", spaces[1])
    do("ip", "-n", spaces[0], "link", "add", "eth0", *end)
    yield


@contextlib.contextmanager
def lossy_cable(spaces: list[str]) -> Iterator[None]:
    """Join two namespaces by a process that loses and delays packets, as Linux's netem does."""
    ends = []
    for i, name in enumerate(spaces):
        try:
            end = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
            device = f"f{os.getpid()}-{i}"
            fcntl.ioctl(end, 0x400454CA, struct.pack("16sH22x", device.encode(), 0x1002))  # a tap
        except OSError as error:
            raise Skipped(f"/dev/net/tun: {error}") from None
        do("ip", "link", "set", device, "netns", name)
        do("ip", "-n", name, "link", "set", device, "name", "eth0")
        ends.append(end)
    over = threading.Event()
    relay = threading.Thread(target=relayed, args=(ends, over))
    relay.start()
    try:
        yield
    finally:
        over.set()
        relay.join()
        for end in ends:
            os.close(end)


def relayed(ends: list[int], over: threading.Event) -> None:
    """Pass packets between two devices: 2 % are lost, 20 % overtaken by others within 20 ms."""
    pick = random.Random(0)
    waiting: list[tuple[float, int, int, bytes]] = []
    for number in itertools.count():
        if over.is_set():
            return
        for end in select.select(ends, [], [], 0.002)[0]:
            packet, other = os.read(end, 1 << 16), ends[1 - ends.index(end)]
            late = pick.uniform(0.0, 0.02) if pick.random() < 0.2 else 0.0
            if pick.random() >= 0.02:
                heapq.heappush(waiting, (time.monotonic() + late, number, other, packet))
        while waiting and waiting[0][0] <= time.monotonic():
            _, _, other, packet = heapq.heappop(waiting)
            with contextlib.suppress(OSError):  # the device is gone, or its queue full
                os.write(other, packet)


@contextlib.contextmanager
def network(cable: Any = cable) -> Iterator[tuple[list[str], Callable[[int], list[str]]]]:
    """Join two processes by a link; yield their namespaces, and what enters the i-th."""
    spaces = [f"faults{os.getpid()}-{i}" for i in range(2)]
    with contextlib.ExitStack() as stack:
        for name in spaces:
            do("ip", "netns", "add", name)
            stack.callback(subprocess.run, ["ip", "netns", "delete", name], check=False)
            do("ip", "-n", name, "link", "set", "lo", "up")
        stack.enter_context(cable(spaces))
        for i, name in enumerate(spaces):
            do("ip", "-n", name, "address", "add", f"10.78.0.{i + 1}/24", "dev", "eth0")
            do("ip", "-n", name, "link", "set", "eth0", "up")
        hosts = stack.enter_context(tempfile.NamedTemporaryFile("w", suffix=".hosts"))
        hosts.write("127.0.0.1 localhost\n10.78.0.1 f0\n10.78.0.2 f1\n")
        hosts.flush()
        script = f'mount --bind {hosts.name} /etc/hosts && hostname f$0 && exec "$@"'

        def enter(i: int) -> list[str]:
            return ["ip", "netns", "exec", spaces[i], "unshare", "-mu", "sh", "-c", script, str(i)]

        yield spaces, enter


def linked(directory: Path, enter: Any, **options: Any) -> Processes:
    """Start two processes in their namespaces."""
    return Processes(directory, around=enter, address="10.78.0.1", **options)


@fault("a link throttled to 1 Mbit/s", SAME)
def link_throttled(directory: Path) -> str:
    with network() as (spaces, enter):
        for name in spaces:
            rate = ("rate", "1mbit", "burst", "4kb", "latency", "400ms")
            do("tc", "-n", name, "qdisc", "add", "dev", "eth0", "root", "tbf", *rate)
        return over(directory, enter)


@fault(
    "a link that loses 2 % of the packets, and delivers 20 % of them up to 20 ms later than others",
    SAME,
)
def link_lossy(directory: Path) -> str:
    with network(cable=lossy_cable) as (_, enter):
        return over(directory, enter)


def over(directory: Path, enter: Callable[[int], list[str]]) -> str:
    """Run over links, and compare the end with that of an undisturbed run."""
    with linked(directory, enter, heartbeat=20) as run:
        return ends_the_same(run)


@fault("a link that is cut", BIT_FOR_BIT)
def link_cut(directory: Path) -> str:
    with network() as (spaces, enter), linked(directory, enter, pause=0.05, heartbeat=4) as run:
        run.wait_for(1, "step 3 ")
        do("ip", "-n", spaces[1], "link", "set", "eth0", "down")
        began = time.monotonic()
        seen = [run.fails(i, GONE) for i in range(2)]
        seconds = time.monotonic() - began
    return f"both end after {seconds:.1f} s ({seen[0]}); {goes_on(directory)}"


@fault("a link that is cut for 2 s", SAME)
def link_interrupted(directory: Path) -> str:
    with network() as (spaces, enter), linked(directory, enter, pause=0.1, heartbeat=20) as run:
        run.wait_for(1, "step 3 ")
        do("ip", "-n", spaces[1], "link", "set", "eth0", "down")
        time.sleep(2.0)
        do("ip", "-n", spaces[1], "link", "set", "eth0", "up")
        return ends_the_same(run)
