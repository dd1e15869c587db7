"""Options of the compiler: a step passes them on, and those of chips are known by the chip."""

import types
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

import optfn
from optfn.distributed import data_mesh, overlap_options
from optfn.mesh.compilers.options import has_plane_scatters
from optfn.train import composition

NO_FUSION = {"xla_disable_hlo_passes": "fusion"}


def loss_fn(params, batch):
    return jnp.mean(jnp.square(jnp.tanh(batch @ params["w"])))


PARAMS = {"w": np.ones((4, 4), np.float32)}
BATCH = np.arange(32, dtype=np.float32).reshape(8, 4) / 32


def make(**options):
    return optfn.make_train_step(loss_fn, optfn.adam(0.1), **options)


def text(step):
    return step.lower(PARAMS, BATCH).compile().as_text()


@pytest.mark.parametrize("workers", [None, 2])
def test_a_step_is_compiled_with_its_options(workers):
    mesh = None if workers is None else data_mesh(workers)
    plain = text(make(mesh=mesh))
    assert text(make(mesh=mesh, compiler_options={})) == plain
    assert text(make(mesh=mesh, compiler_options=NO_FUSION)) != plain
    with pytest.raises(jax.errors.JaxRuntimeError, match="'maybe' is not a valid bool value"):
        make(mesh=mesh, compiler_options={"xla_cpu_enable_fast_math": "maybe"})


def test_names_that_the_compiler_does_not_know_are_dropped_with_one_warning():
    options = {"xla_tpu_one": "true"} | NO_FUSION | {"xla_gpu_two": 4}
    with pytest.warns(UserWarning, match="does not know xla_tpu_one, xla_gpu_two,") as found:
        step = make(compiler_options=options)
    assert len(found) == 1 and found[0].filename == __file__
    plain = text(make())
    assert text(step) == text(make(compiler_options=NO_FUSION)) != plain
    with pytest.warns(UserWarning, match="does not know xla_tpu_one"):
        assert text(make(compiler_options={"xla_tpu_one": "true"})) == plain


@pytest.mark.parametrize("value", [True, "true", "false"])
@pytest.mark.parametrize("workers", [None, 2])
def test_what_a_step_traces_follows_its_options(workers, value, monkeypatch):
    monkeypatch.setattr(composition, "drop_unknown_options", lambda options, device: options)
    found = []

    def loss(params, batch):
        found.append(has_plane_scatters())
        return loss_fn(params, batch)

    name = "xla_tpu_enable_sparse_core_collective_offload_nd_reduce_scatter"
    mesh = None if workers is None else data_mesh(workers)
    step = optfn.make_train_step(loss, optfn.adam(0.1), mesh=mesh, compiler_options={name: value})
    step.lower(PARAMS, BATCH)
    assert set(found) == {value != "false"} and not has_plane_scatters()


def test_minimize_takes_them():
    with pytest.warns(UserWarning, match="does not know xla_tpu_one"):
        optfn.minimize(
            loss_fn, optfn.adam(0.1), PARAMS, [BATCH], compiler_options={"xla_tpu_one": 1}
        )


def test_options_must_be_a_mapping():
    with pytest.raises(TypeError, match=r"compiler_options must be a mapping .*got 'xla'"):
        make(compiler_options="xla")


def mesh_of(platform, kind):
    """A mesh of chips that are not here."""
    mesh = mock.Mock(spec=Mesh)
    mesh.devices = np.array([types.SimpleNamespace(platform=platform, device_kind=kind)])
    return mesh


@pytest.mark.parametrize(
    ("platform", "kind", "name", "count"),
    [
        ("tpu", "TPU v5 lite", "xla_tpu_scoped_vmem_limit_kib", 4),
        ("tpu", "TPU v5", "xla_tpu_enable_sparse_core_collective_offload_reduce_scatter", 8),
        ("tpu", "TPU v6 lite", "xla_tpu_enable_sparse_core_collective_offload_2d_all_gather", 7),
        ("tpu", "TPU v6e", "xla_tpu_enable_sparse_core_offload_queuing_in_lhs", 7),
        ("gpu", "NVIDIA H100", "xla_gpu_experimental_parallel_collective_overlap_limit", 2),
        ("tpu", "TPU v4", None, 0),
    ],
)
def test_overlap_options_are_those_of_the_chips(platform, kind, name, count):
    options = overlap_options(mesh_of(platform, kind))
    assert len(options) == count and (name is None or name in options)
    options.clear()
    assert len(overlap_options(mesh_of(platform, kind))) == count  # each call makes its own


def test_overlap_options_of_cpus_are_none():
    assert overlap_options(data_mesh(2)) == {}
    with pytest.raises(TypeError, match=r"overlap_options: mesh must be a jax\.sharding\.Mesh"):
        overlap_options(None)
