"""Devices of TPUs and of a GPU to compile for, on a machine that has none.

The compilers come with the packages of the extras `compile-tpu` and `compile-gpu`. They give the
program that would run, and no device runs it. A process compiles for one target, since a TPU's
compiler stays with the first topology that it is asked for.
"""

import os
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec

# What XLA asks of a GPU that it compiles for, of an H100 with 80 GB.
H100 = """
gpu_device_info {
  threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: 2048
  shared_memory_per_block: 49152 shared_memory_per_block_optin: 232448
  shared_memory_per_core: 233472 core_count: 132 fpus_per_core: 128
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
  memory_bandwidth: 3352320000000 l2_cache_size: 52428800 clock_rate_ghz: 1.98
  device_memory_size: 84929347584 cuda_compute_capability { major: 9 }
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 7 }
runtime_version { major: 12 minor: 8 patch: 0 }
device_description_str: "NVIDIA H100 80GB HBM3"
"""


class Target(NamedTuple):
    """A kind of device.

    platform: the compiler, "tpu" or "cuda".
    topology: the fewest devices that its compiler takes; programs are for one of them.
    """

    platform: str
    topology: str


TARGETS = {
    "v5e": Target("tpu", "v5e:2x2"),
    "v5p": Target("tpu", "v5p:2x2x1"),
    "v6e": Target("tpu", "v6e:2x2"),
    "H100": Target("cuda", "1x1x1"),
}


def prepare(target: Target) -> None:
    """Set what the compiler of a target reads when it is loaded."""
    jax.config.update("jax_platforms", "cpu")  # the process itself computes on the CPU
    os.environ["TPU_SKIP_MDS_QUERY"] = "1"  # there is no server that describes the machine
    os.environ["ALLOW_MULTIPLE_LIBTPU_LOAD"] = "1"  # several processes at once
    if target.platform == "cuda":  # there is no device on which to try products
        os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_gpu_autotune_level=0"


class _OnHost(NamedSharding):
    """A placement in the memory of the host, on devices that tell no memories."""

    @property
    def memory_kind(self) -> str:
        return "pinned_host"

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _OnHost):
            return False
        return self.spec == other.spec and self.mesh == other.mesh

    def __hash__(self) -> int:
        return hash((NamedSharding.__hash__(self), "pinned_host"))


def keep_memories() -> None:
    """Let placements on the devices of an NVIDIA GPU's compiler keep the memory of the host.

    JAX asks the devices for their memories, and those of a topology of GPUs have none. XLA compiles
    for them what it gets.
    """
    from jax._src.interpreters import mlir

    def place(self: NamedSharding, kind: str | None) -> NamedSharding:
        return (_OnHost if kind == "pinned_host" else NamedSharding)(self.mesh, self.spec)

    NamedSharding.with_memory_kind = place
    mlir._get_mem_kind = lambda x: None if x is None else x.memory_kind or "device"


def devices(target: Target) -> list[Any]:
    """Return the devices of a target's topology."""
    about = {"target_config": H100} if target.platform == "cuda" else {}
    name = {"cuda": "topology", "tpu": "topology_name"}[target.platform]
    return topologies.get_topology_desc(
        platform=target.platform, **{name: target.topology}, **about
    ).devices


def sharding(target: Target) -> NamedSharding:
    """Return the placement of whole arrays on one device of a target."""
    return NamedSharding(Mesh(np.array(devices(target)[:1]), ("data",)), PartitionSpec())


def compiled(
    fn: Callable[..., Any], target: Target, *arguments: Any, donated: tuple[int, ...] = ()
) -> Any:
    """Return `fn` compiled for a target; `arguments` are trees of arrays with a shape and dtype."""
    place = sharding(target)

    def placed(x: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place)

    traced = jax.jit(fn, donate_argnums=donated).trace(*jax.tree.map(placed, arguments))
    return traced.lower(lowering_platforms=(target.platform,)).compile()
