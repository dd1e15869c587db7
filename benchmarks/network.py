"""A network of namespaces on one machine: one for each worker, joined by shaped links.

Veth pairs and a bridge join them; each link is shaped to a rate in both directions. It needs root
and Linux's ip, tc and unshare. All that it creates is in namespaces of its own, and disappears with
them.
"""

import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax

from benchmarks import measure

PORT = 9311  # any: nothing else runs in the namespaces


def _refused(why: str) -> measure.Refused:
    return measure.Refused(f"no network namespaces can be made here, which it needs: {why}")


def _do(*words: str) -> None:
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode:
        said = (done.stderr or done.stdout).strip()
        raise _refused(f"{' '.join(words)}: {said or f'exit status {done.returncode}'}")


class Network(NamedTuple):
    """The namespaces: worker i is in `<name>-<i>` and has the address 10.77.0.i+1."""

    name: str
    workers: int

    @property
    def hub(self) -> str:
        """The namespace of the bridge, so that removing namespaces removes everything."""
        return f"{self.name}-hub"

    @property
    def spaces(self) -> list[str]:
        """The namespaces of the workers."""
        return [f"{self.name}-{i}" for i in range(self.workers)]

    def limit(self, worker: int, mbits: int) -> None:
        """Shape the link of a worker in both directions; 0 is as fast as the machine.

        May be called from inside a namespace.
        """
        for namespace, device in ((self.hub, f"port{worker}"), (self.spaces[worker], "eth0")):
            tc = ("tc", "-n", namespace)
            root = ("dev", device, "root")
            subprocess.run([*tc, "qdisc", "delete", *root], capture_output=True, check=False)
            if mbits:
                _do(*tc, "qdisc", "add", *root, "handle", "1:", "htb", "default", "1")
                rate = ("htb", "rate", f"{mbits}mbit")
                _do(*tc, "class", "add", "dev", device, "parent", "1:", "classid", "1:1", *rate)


@contextlib.contextmanager
def network(workers: int, mbits: int = 0) -> Iterator[Network]:
    """Make the namespaces, with links of so many Mbit/s."""
    missing = [tool for tool in ("ip", "tc", "unshare", "mount") if shutil.which(tool) is None]
    if missing:
        raise _refused(f"no {missing[0]} on the path")
    made = Network(f"dgc{os.getpid()}", workers)
    names = [made.hub, *made.spaces]
    try:
        for name in names:
            _do("ip", "netns", "add", name)
            _do("ip", "-n", name, "link", "set", "lo", "up")
        _do("ip", "-n", made.hub, "link", "add", "bridge", "type", "bridge")
        _do("ip", "-n", made.hub, "link", "set", "bridge", "up")
        for i, name in enumerate(made.spaces):
            port = f"port{i}"
            end = ("type", "veth", "peer", "name", "eth0", "netns", name)
            _do("ip", "-n", made.hub, "link", "add", port, *end)
            _do("ip", "-n", made.hub, "link", "set", port, "master", "bridge", "up")
            _do("ip", "-n", name, "address", "add", f"10.77.0.{i + 1}/24", "dev", "eth0")
            _do("ip", "-n", name, "link", "set", "eth0", "up")
            made.limit(i, mbits)
        yield made
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "delete", name], capture_output=True, check=False)


def run_workers(net: Network, module: str, arguments: list[str], timeout: float) -> list[Any]:
    """Run `python -m module arguments --worker i n` in each namespace.

    Returns what each printed on its last line, as JSON.
    """
    with tempfile.TemporaryDirectory() as directory:
        # gloo listens on the address of the host's name: each worker has a name and a hosts file.
        hosts = Path(directory) / "hosts"
        lines = ["127.0.0.1 localhost", *(f"10.77.0.{i + 1} w{i}" for i in range(net.workers))]
        hosts.write_text("\n".join(lines) + "\n")
        enter = f'mount --bind {hosts} /etc/hosts && hostname w$0 && exec "$@"'
        environment = os.environ | {"JAX_PLATFORMS": "cpu"}
        environment.pop("XLA_FLAGS", None)
        program = [sys.executable, "-m", module, *arguments]
        started = []
        try:
            for i, space in enumerate(net.spaces):
                inside = ["ip", "netns", "exec", space, "unshare", "-mu", "sh", "-c", enter, str(i)]
                started.append(
                    subprocess.Popen(
                        [*inside, *program, "--worker", str(i), str(net.workers)],
                        env=environment,
                        stdout=subprocess.PIPE,
                        stderr=subprocess.PIPE,
                        text=True,
                    )
                )
            found = [p.communicate(timeout=timeout) for p in started]
        finally:
            for p in started:
                p.kill()
            for p in started:
                p.wait()
    for p, (_, error) in zip(started, found, strict=True):
        if p.returncode:
            raise RuntimeError(f"a worker stopped with status {p.returncode}:\n{error[-2000:]}")
    return [json.loads(out.splitlines()[-1]) for out, _ in found]


def join(index: int, workers: int) -> None:
    """Join the other workers, from inside the namespace of worker `index`."""
    jax.distributed.initialize(f"10.77.0.1:{PORT}", workers, index)


def sent_bytes() -> int:
    """Return the bytes sent that the kernel counted on the link of this namespace."""
    lines = Path("/proc/self/net/dev").read_text().splitlines()
    (link,) = (line.split(":")[1].split() for line in lines if line.strip().startswith("eth0:"))
    return int(link[8])


def all_sent() -> int:
    """Return the same, when nothing more is being sent.

    A worker may have received all it needs while its own packets still wait for the link.
    """
    before, now = -1, sent_bytes()
    while now != before:
        time.sleep(0.02)
        before, now = now, sent_bytes()
    return now
