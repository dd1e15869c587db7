"""Options of the compiler for a program on a mesh: which of them it knows, and which hide sends."""

import contextlib
import re
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, SingleDeviceSharding

from optfn.core import checks, context
from optfn.mesh.compilers.chips import find_chip

_TRUE = "true"  # a string, because not all plugins of TPUs take a bool

_PLANE_SCATTERS = "xla_tpu_enable_sparse_core_collective_offload_nd_reduce_scatter"
# Gathers and scatters run on the sparse cores of a chip, beside the products of its TensorCore.
_SPARSE_CORES = {
    "xla_tpu_enable_sparse_core_collective_offload_all_gather": _TRUE,
    "xla_tpu_enable_sparse_core_collective_offload_reduce_scatter": _TRUE,
    # A gather over two dimensions of the torus sends a part of the array along one first, the rest
    # along the second first, and so uses the links of both. Without it, it stays on the TensorCore.
    "xla_tpu_enable_sparse_core_collective_offload_2d_all_gather": _TRUE,
    # So does a reduce-scatter, which runs in a second version of its program.
    _PLANE_SCATTERS: _TRUE,
    "xla_tpu_enable_sparse_core_reduce_scatter_v2": _TRUE,
    # Several collectives wait in the queue of a sparse core. Without it, one is sent off after the
    # one before is done, and the TensorCore waits if the product between them is shorter.
    "xla_tpu_enable_sparse_core_offload_queuing_in_lhs": _TRUE,
    # A gather that is fused with a product stays on the TensorCore.
    "xla_tpu_enable_async_collective_fusion_fuse_all_gather": "false",
}
# The scores of attention have one order of dimensions in both loops over the layers. Without it,
# the product of the keys is part of that of the scores, and their softmax takes twice as long in
# the forward loop as in the backward loop. The estimate of a step of 7B on v5e:4x4 stays the same
# with it (1,224 and 1,221 ms), and on v6e:16x16 it rises from 340 to 374 ms.
_LAYOUTS = {"xla_tpu_layout_use_dot_grouping": _TRUE}
# Scatters are fused with products. The third option alone does not do so, nor do the first two.
_SCATTER_FUSIONS = {
    "xla_tpu_enable_async_collective_fusion_fuse_reduce_scatter": _TRUE,
    "xla_tpu_enable_async_collective_fusion_fuse_all_reduce": _TRUE,
    "xla_enable_async_reduce_scatter_fusion": _TRUE,
    # A scatter in the gradient of a head of 32,000 tokens needs 16.06 MB of the default 16.00.
    "xla_tpu_scoped_vmem_limit_kib": "32768",
}
_OVERLAP_OF_CHIP = {
    "v5e": _SCATTER_FUSIONS,
    "v5p": _SPARSE_CORES | _LAYOUTS,
    "v6e": _SPARSE_CORES,
}
_OVERLAP_OF_GPUS = {
    "xla_gpu_experimental_parallel_collective_overlap_limit": 4,
    # XLA merges products of one operand, such as the products of queries and keys, if one of them
    # moves at most 64 MB. The merged product waits for the gathers of both params.
    "xla_gpu_dot_merger_threshold_mb": 0,
}
# The compiler options of the program that is traced.
_options: ContextVar[Mapping[str, Any]] = ContextVar("options", default=MappingProxyType({}))


def overlap_options(mesh: Mesh) -> dict[str, Any]:
    """Return compiler options that hide more communication on GPUs and known TPUs, or {} for
    devices of any other kind, and raise a TypeError unless `mesh` is a mesh.

    Pass them to a step: `make_train_step(..., compiler_options=overlap_options(mesh))`. They are
    not the default, because nobody has run them on a chip. The following figures are inferred from
    compiled programs: the milliseconds of a step, waits for links included, of FSDP of Llama 2 7B
    (32 layers) with `scan_layers` and 2,048 tokens a chip.

    * TPU v5p and v6e: gathers and reduce-scatters wait in the queue of the sparse cores, and use
      the links of two dimensions of the torus; on v5p the scores of attention have one order of
      dimensions. On v5p:4x4x4 a step takes 441 ms for 694, on v6e:16x16 340 for 549. Costs: up to
      10 % more memory for temporaries.
    * TPU v5e: reduce-scatters are fused with products, and a kernel gets 32 MB of VMEM for 16. On
      v5e:4x4 a step takes 1,224 ms for 1,322. Costs: three times the seconds of compilation, and
      products of padded arrays, which take back half of the gain.
    * GPUs: up to 4 collectives run at the same time, for 1, and products of one operand are not
      merged. On 8 H100 a step takes 243 ms for 252. Costs: 3 % more memory for temporaries, the
      buffers of several collectives at a time. Leave it out for two levels: on 64 H100 a step then
      takes 316 ms for 284.
    * CPUs, and chips that are not listed: {}.

    The options are for the compiler of these measurements. A step drops the options that another
    compiler does not know, with a warning.

    Raises:
      TypeError: `mesh` is not a mesh of devices.

    >>> import optfn
    >>> optfn.distributed.overlap_options(optfn.distributed.data_mesh(1))  # on a CPU
    {}
    """
    checks.instance("overlap_options: mesh", mesh, Mesh, "a jax.sharding.Mesh")
    device = mesh.devices.flat[0]
    if device.platform in ("gpu", "cuda"):
        return dict(_OVERLAP_OF_GPUS)
    chip = find_chip(device.device_kind)
    return {} if chip is None else dict(_OVERLAP_OF_CHIP.get(chip.name, {}))


@contextlib.contextmanager
def follow_options(options: Mapping[str, Any] | None) -> Iterator[None]:
    """Let programs that are traced in this context follow these compiler options, and no options
    for None. Afterwards the options before hold again."""
    with context.hold(_options, options or {}):
        yield


def has_plane_scatters() -> bool:
    """Tell whether the compiler options of the traced program let a reduce-scatter span two
    dimensions of a torus.

    Sparse cores have a program for it; the compiler of a TensorCore makes it an all-reduce.
    """
    return str(_options.get().get(_PLANE_SCATTERS)).lower() == _TRUE


def drop_unknown_options(
    options: Mapping[str, Any], device: jax.Device | None
) -> dict[str, Any] | None:
    """Return the options that the compiler of a device knows, found by compiling a scalar program,
    warn of unknown ones, and return None if none is left.

    The names of dropped options are in one warning. The compiler alone has the list of its options,
    and names the first that it does not know.

    Args:
      options: names and values, as `jax.jit` takes them.
      device: a device of the program, which may be described rather than present; None: JAX's
        default device.
    """
    placement = SingleDeviceSharding(jax.devices()[0] if device is None else device)
    scalar = jax.ShapeDtypeStruct((), jnp.float32, sharding=placement)
    known, unknown = dict(options), []
    while known:
        try:
            jax.jit(lambda x: x + 1, compiler_options=known).lower(scalar).compile()
            break
        except jax.errors.JaxRuntimeError as error:
            found = re.search(r"No such compile option: '(.*?)'", str(error))
            if found is None or found[1] not in known:
                raise
            unknown.append(found[1])
            del known[found[1]]
    if unknown:
        checks.warn(
            f"compiler_options: the installed compiler does not know {', '.join(unknown)}, and the "
            "step is compiled without"
        )
    return known or None
