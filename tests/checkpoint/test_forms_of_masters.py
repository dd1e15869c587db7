"""Masters load in any form: float32 copies, remainders of 32 and of 24 bits."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from grids import suite
from problems import state_after

import optfn
from optfn.distributed import data_mesh
from optfn.transforms.codes import join_float32

RNG = np.random.default_rng(0)
X = RNG.normal(size=(6, 16, 32)).astype(np.float32)
FORMS = (True, 32, 24)
PAIRS = list(itertools.permutations(FORMS, 2))


def params():
    rng = np.random.default_rng(1)
    return {
        "w": jnp.asarray(rng.normal(size=(32, 8)), jnp.bfloat16),
        "b": jnp.zeros(8, jnp.bfloat16),
        "scale": jnp.ones((), jnp.float32),  # has no master
    }


def loss_fn(params, x):
    return jnp.mean((jnp.tanh(x @ params["w"]) + params["b"]) ** 2) * params["scale"]


def step_of(form, **options):
    tx = optfn.chain(optfn.adamw(1e-3, multi_precision=form), optfn.exponential_moving_average(0.9))
    return optfn.make_train_step(loss_fn, tx, **options)


@functools.cache
def trained(form):
    """Return the state of three steps, on the host."""
    step = step_of(form)
    return jax.device_get(state_after(step, step.init(params()), X[:3]))


def masters(state):
    """Return the float32 masters of a TrainState by path."""
    named = optfn.state_dict(state.opt_state)
    found = {}
    for name, x in named.items():
        words = name.split("/")
        if "master" in words:
            found[words[-1]] = x
        elif "remainder" in words:
            p = jnp.asarray(state.params[words[-1]])
            found[words[-1]] = np.asarray(join_float32(p, jnp.asarray(x)))
    assert found.keys() == {"w", "b"}
    return found


def check(found, want, before, after):
    """Compare masters bit for bit, of copies but for ties, of 24 bits to half a unit of these."""
    for path, master in want.items():
        away = np.abs(found[path].astype(np.float64) - master)
        if after == 24:
            assert (away <= np.abs(master) * 2.0**-16).all()
        else:
            halfway = (master.view(np.uint32) & 0xFFFF) == 0x8000
            assert before is True or not away.any()
            assert not away[~halfway].any() and (away <= np.abs(master) * 2.0**-23).all()


LAYOUTS = {
    "one device": {},
    "packed": {"packed": True},
    "state": {"mesh": data_mesh(4), "shard": "state"},
    "params": {"mesh": data_mesh(4), "shard": "params"},
}


@pytest.mark.parametrize(
    ("layout", "pair"),
    suite(
        itertools.product(LAYOUTS, PAIRS),
        ("params", (24, True)),
    ),
)
def test_a_run_goes_on_with_masters_of_another_form(pair, layout):
    before, after = pair
    first, second = step_of(before), step_of(after, **LAYOUTS[layout])
    state = state_after(first, first.init(params()), X[:3])
    loaded = optfn.load_state_dict(second.init(params()), optfn.state_dict(state))
    names = optfn.state_dict(loaded)
    if layout != "packed":
        check(masters(loaded), masters(state), before, after)
    for name, x in optfn.state_dict(state).items():
        if "master_weights" not in name:
            np.testing.assert_array_equal(names[name], x)
    after_it = state_after(second, loaded, X[3:])
    alone = state_after(first, state, X[3:])
    of_both = [
        optfn.unpack(s.params) if layout == "packed" else s.params for s in (after_it, alone)
    ]
    for found, want in zip(*map(jax.tree.leaves, of_both), strict=True):
        np.testing.assert_allclose(
            np.asarray(found, np.float32), np.asarray(want, np.float32), rtol=2**-6, atol=1e-4
        )


@pytest.mark.parametrize(("before", "after"), PAIRS)
def test_a_checkpoint_restores_into_another_form(before, after, tmp_path):
    state, second = trained(before), step_of(after)
    optfn.save_checkpoint(tmp_path, state)
    loaded, _ = optfn.restore_checkpoint(tmp_path, second.init(params()))
    check(masters(loaded), masters(state), before, after)


@pytest.mark.parametrize(("before", "after"), PAIRS)
def test_the_state_of_the_optimizer_alone_needs_params_for_copies_only(before, after):
    state, second = trained(before), step_of(after)
    saved, template = optfn.state_dict(state.opt_state), second.init(params()).opt_state
    if after is True:
        with pytest.raises(ValueError, match="the remainder of a master, but not the parameter"):
            optfn.load_state_dict(template, saved)
        return
    loaded = optfn.load_state_dict(template, saved)
    check(masters(state._replace(opt_state=loaded)), masters(state), before, after)


def test_a_master_halfway_between_two_parameters_moves_by_one_unit():
    tied = np.float32(1) + np.float32(2.0**-8)  # between 1 and 1 + 2⁻⁷
    copies, remainders = (optfn.master_weights(optfn.sgd(0.1), bits=bits) for bits in (None, 32))
    p = jnp.ones(1, jnp.bfloat16)
    saved = optfn.state_dict(copies.init(p))
    saved = {
        k: np.full(1, tied) if "master/" in k or k.endswith("master") else v
        for k, v in saved.items()
    }
    loaded = optfn.load_state_dict(remainders.init(p), saved)
    assert join_float32(p, loaded.remainder)[0] == np.nextafter(tied, np.float32(0))
