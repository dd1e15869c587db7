"""Several processes of this host on JAX's own runtime, as those of several hosts: one command.

An example adds `--processes` to its arguments by `add_argument`, and calls `join` before it touches
a device: the first call starts the program again as often as asked, and waits for all.
"""

import argparse
import os
import socket
import subprocess
import sys

import jax


def add_argument(parser: argparse.ArgumentParser, *choices: int) -> None:
    """Add `--processes`, one of `choices`, and what the processes tell each other."""
    parser.add_argument("--processes", type=int, choices=choices, default=1)
    parser.add_argument("--address", help=argparse.SUPPRESS)
    parser.add_argument("--process", type=int, default=0, help=argparse.SUPPRESS)


def join(options: argparse.Namespace, devices: int) -> None:
    """Make this process one of `options.processes`, which have `devices` simulated ones together.

    The process that the user has started ends here, with the worst exit status of the others.
    """
    if options.processes > 1 and options.address is None:
        sys.exit(_start(options.processes, devices // options.processes))
    if options.address is not None:
        jax.distributed.initialize(options.address, options.processes, options.process)


def _start(count: int, devices: int) -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    flags = f"--xla_force_host_platform_device_count={devices}"
    command = [sys.executable, *sys.orig_argv[1:], "--address", address, "--process"]
    started = [
        subprocess.Popen([*command, str(i)], env=os.environ | {"XLA_FLAGS": flags})
        for i in range(count)
    ]
    try:
        return max(abs(p.wait()) for p in started)
    finally:
        for p in started:
            p.kill()
