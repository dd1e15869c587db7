"""What every public transform and optimizer keeps, run over the registry."""

import dataclasses
import functools
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import registry
from compilations import programs
from grids import by_entry, nightly, suite
from problems import spec

import optfn
from optfn.sparse import Rows

# What the boundary around each rule does, for three rules and everything that wraps another.
AT_THE_EDGE = {"adagrad", "lamb", "adamw_int8", *registry.WRAPPERS, *registry.EXCHANGES}
EDGE = by_entry(registry.ALL, *AT_THE_EDGE)
COMPLEX = [k for k, e in registry.ALL.items() if e.complex_leaves]
NOT_COMPLEX = [k for k in registry.ALL if k not in COMPLEX]
SUITE_OF_COMPLEX = (
    "lars", "rmsprop", "adamw", "adamax", "muon", "clip_by_norm", "scale_by_adadelta",
    "master_weights_accumulate_attributes", "skip_spikes", "exponential_moving_average",
)  # fmt: skip
# Trained for many steps.
TRAINED = ("lars", "adadelta", "adam_algorithm_1", "adamax_int8", "lamb_int8")


def normal(shape: tuple[int, ...], seed: int, dtype: Any = np.float32) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), dtype)


def tree_of(seed: int, dtype: Any = np.float32) -> dict[str, Any]:
    """A tree with a matrix, a scalar, an empty leaf and a hole.

    Small, since the suite's time goes into tracing and compiling what is done with each leaf.
    """
    return {
        "layers": [{"w": normal((3, 4), seed, dtype), "b": None}],
        "scale": normal((), seed + 3, dtype),
        "empty": jnp.zeros((0, 3), dtype),
    }


def updated(entry: Any, tx: Any, updates: Any, state: Any, params: Any) -> Any:
    return tx.update(updates, state, params, **dict(entry.extra))


@pytest.mark.optimized
@by_entry(registry.PROGRAMS, "adam_algorithm_1", "lamb_int8")
def test_jit_equals_eager_and_scan(entry):
    """Three steps: eager, and jitted inside one lax.scan."""

    tx, params = entry.make(), tree_of(0)
    gradients = [tree_of(10 * k) for k in (1, 2, 3)]

    def step(carry, grads):
        params, state = carry
        updates, state = updated(entry, tx, grads, state, params)
        return (optfn.apply_updates(params, updates), state), updates

    start = carry = (params, tx.init(params))
    all_updates = []
    for grads in gradients:
        carry, updates = step(carry, grads)
        all_updates.append(updates)
    stacked = jax.tree.map(lambda *xs: jnp.stack(xs), *gradients)
    scanned, scanned_updates = jax.jit(functools.partial(jax.lax.scan, step))(start, stacked)
    close = functools.partial(chex.assert_trees_all_close, rtol=2e-6, atol=1e-6)
    close(scanned, carry)
    for k in range(3):
        close(jax.tree.map(lambda x, k=k: x[k], scanned_updates), all_updates[k])


@by_entry(
    registry.PROGRAMS, "rmsprop_bfloat16", "adamax_int8", "master_weights_24", "model_average"
)
def test_state_and_params_can_be_donated(entry):
    """init gives no buffer twice and none of params', so that both can be donated together."""
    tx, params, grads = entry.make(), tree_of(0), tree_of(10)
    state = tx.init(params)
    buffers = [x.unsafe_buffer_pointer() for x in jax.tree.leaves((params, state)) if x.size]
    assert len(set(buffers)) == len(buffers)

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(params, state, grads):
        updates, state = updated(entry, tx, grads, state, params)
        return optfn.apply_updates(params, updates), state

    for _ in range(3):
        params, state = step(params, state, grads)
    chex.assert_tree_all_finite(params)


@by_entry(
    registry.ALL, "decayed_adagrad", "adam_bfloat16", "ftrl", "reduce_on_plateau", "skip_spikes"
)
def test_without_params_where_the_rule_needs_none(entry):
    """Updates are then in the dtype of the gradient; a rule that needs params says so."""
    tx, grads = entry.make(), tree_of(10, jnp.bfloat16)
    state = tx.init(tree_of(0))
    if entry.needs_params:
        with pytest.raises(ValueError, match="needs the parameters"):
            tx.update(grads, state, **dict(entry.extra))
    else:
        updates, new = jax.jit(functools.partial(tx.update, **dict(entry.extra)))(grads, state)
        assert spec(updates) == spec(grads)
        assert spec(new) == spec(state)


class Pair(NamedTuple):
    w: Any
    b: Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Layer:
    w: Any
    b: Any


KINDS = Pair, Layer, lambda w, b: (w, [b]), lambda w, b: {"a": {"b": b, "w": w}}


@pytest.mark.parametrize(
    ("entry", "kind"),
    suite(
        registry.in_turn(*KINDS, entries=registry.ALL),
        *("rmsprop_centered", "lamb", "muon_int8", "param_attrs", "exchange_quantized"),
    ),
)
def test_every_kind_of_tree(entry, kind):
    """Containers come back as they were, and the numbers do not depend on them."""
    tx, (w, b, gw, gb) = entry.make(), (normal(s, k) for k, s in enumerate([(3, 2), (2,)] * 2))
    params, grads = kind(w, b), kind(gw, gb)
    updates, _ = updated(entry, tx, grads, tx.init(params), params)
    assert jax.tree.structure(updates) == jax.tree.structure(params)
    flat_params, flat_grads = {"w": w, "b": b}, {"w": gw, "b": gb}
    flat, _ = updated(entry, tx, flat_grads, tx.init(flat_params), flat_params)
    got = sorted(jax.tree.leaves(updates), key=lambda x: x.ndim)
    want = sorted(jax.tree.leaves(flat), key=lambda x: x.ndim)
    chex.assert_trees_all_close(got, want, rtol=1e-6)


@EDGE
@pytest.mark.parametrize("integer_gradient", ["None", nightly("float0"), nightly("numpy zero")])
def test_integer_leaves_are_held(entry, integer_gradient):
    """No state, and an integer zero as update: the leaf stays what it was."""
    tx = entry.make()
    ids = jnp.arange(3)
    zero = {
        "None": None,
        "float0": np.zeros((3,), jax.dtypes.float0),
        "numpy zero": np.zeros((3,), np.int32),
    }[integer_gradient]
    params = {"w": normal((3,), 0), "ids": ids, "mask": jnp.array([True, False])}
    grads = {"w": normal((3,), 1), "ids": zero, "mask": np.zeros((2,), jax.dtypes.float0)}
    state = tx.init(params)
    for leaf in jax.tree.leaves(state):
        assert leaf.shape in ((), (3,), (2, 3), (3, 3), (1, 3)) + ((1,),) * entry.quantized
    assert len(jax.tree.leaves(state)) == len(jax.tree.leaves(tx.init({"w": params["w"]})))
    updates, state = updated(entry, tx, grads, state, params)
    assert updates["ids"].dtype == ids.dtype
    assert not np.any(updates["ids"])
    after = optax.apply_updates(params, updates)
    chex.assert_trees_all_equal((after["ids"], after["mask"]), (ids, params["mask"]))
    # ... and through the next transform of a chain.
    chained = optax.chain(tx, optfn.clip_by_norm(1.0))
    updates, _ = updated(entry, chained, grads, chained.init(params), params)
    assert not np.any(updates["ids"])
    for wrong in (jnp.ones((3,)), jnp.ones((3,), jnp.int32)):
        with pytest.raises(TypeError, match=r"'ids'.*int32"):
            updated(entry, tx, grads | {"ids": wrong}, state, params)


@pytest.mark.parametrize("name", suite(COMPLEX, *SUITE_OF_COMPLEX))
def test_complex_leaves(name):
    """The direction of a rotation-invariant rule turns with the gradient; nu stays real."""
    entry = registry.ALL[name]
    tx = entry.make()
    params = {"z": (normal((3,), 0) + 1j * normal((3,), 1)).astype(jnp.complex64)}
    grads = {"z": (normal((3,), 2) + 1j * normal((3,), 3)).astype(jnp.complex64)}
    state, update = tx.init(params), jax.jit(functools.partial(updated, entry, tx))
    updates, new = update(grads, state, params)
    assert spec(new) == spec(state)
    turn = np.complex64(np.exp(0.7j))
    turned = jax.tree.map(lambda x: np.asarray(x) * turn, (grads, params))
    turned_updates, _ = update(turned[0], state, turned[1])
    np.testing.assert_allclose(turned_updates["z"], updates["z"] * turn, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", NOT_COMPLEX)
def test_complex_leaves_are_refused_by_name(name):
    entry = registry.ALL[name]
    tx = entry.make()
    with pytest.raises(TypeError, match=r"complex.*'z'"):
        state = tx.init({"z": jnp.ones(2, jnp.complex64)})
        # A chain's parts without state see the leaf at the first update.
        z = {"z": jnp.ones(2, jnp.complex64)}
        updated(entry, tx, z, state, z)


@pytest.mark.parametrize(
    ("entry", "dtype"),
    suite(
        registry.in_turn(jnp.bfloat16, jnp.float16, entries=registry.ALL),
        *("momentum_int8", "adamw_decay_schedule", "adamax", "lamb", "muon_int8", "param_attrs"),
        *("skip_nonfinite", "exponential_moving_average", "exchange_quantized"),
    ),
)
def test_low_precision_leaves(entry, dtype):
    """State in float32, updates in the dtype of the parameter, finite for zero gradients."""
    dtype = jnp.bfloat16 if entry.bfloat16_only else dtype
    tx, params = entry.make(), tree_of(0, dtype)
    state = tx.init(params)
    is_narrow = entry.quantized or entry.bfloat16_only
    narrow = {jnp.dtype(d) for d in (jnp.bfloat16, jnp.int8, jnp.uint8) if is_narrow}
    for leaf in jax.tree.leaves(state):
        assert leaf.dtype in {jnp.dtype(d) for d in (jnp.float32, jnp.int32, jnp.bool_)} | narrow

    @jax.jit
    def step(grads, state, params):
        return updated(entry, tx, grads, state, params)

    with programs(step) as compiled:
        for grads in (jax.tree.map(jnp.zeros_like, params), tree_of(10, dtype), tree_of(10)):
            updates, new = step(grads, state, params)
            wide = jax.tree.map(lambda p: p.astype(jnp.float32), params)
            assert spec(updates) == spec(wide if entry.wide_updates else params)
            assert spec(new) == spec(state)
            chex.assert_tree_all_finite(updates)
            assert not any(np.isnan(x).any() for x in jax.tree.leaves(new))
        for _ in range(2):  # float32 gradients of narrow params compile once, whatever step it is
            updates, state = step(grads, state, params)
            params = optax.apply_updates(params, updates)
    assert len(compiled) == 2


@by_entry(registry.ALL, *registry.SUITE, *registry.SUITE_OF_TRANSFORMS, "accumulate")
def test_strict_dtype_promotion(entry):
    """No rule relies on promotion between dtypes; and it is a transformation of optax."""
    assert isinstance(entry.make(), optax.GradientTransformationExtraArgs)
    with jax.numpy_dtype_promotion("strict"):
        for dtype in (jnp.float32, jnp.bfloat16):
            tx, params = entry.make(), tree_of(0, dtype)
            grads = tree_of(10, dtype)
            state = jax.eval_shape(tx.init, params)
            step = functools.partial(updated, entry, tx)
            updates, _ = jax.eval_shape(step, grads, state, params)
            jax.eval_shape(optfn.apply_updates, params, updates)


def test_sums_of_narrow_losses_and_rows_of_another_dtype_under_strict_promotion():
    params, tx = jnp.ones(4, jnp.bfloat16), optfn.accumulate(optfn.sgd(0.1), 2)
    with jax.numpy_dtype_promotion("strict"):
        state = tx.init(params)
        for value in (jnp.ones((), jnp.bfloat16), 1.0):
            _, state = tx.update(params, state, params, value=value)
        rows = Rows(jnp.array([1, 3, 1]), jnp.ones((3, 2)), 5)
        total = jnp.zeros((5, 2), jnp.bfloat16) + rows
    np.testing.assert_array_equal(total, np.array([[0, 2, 0, 1, 0]] * 2).T)


@by_entry(registry.ALL, *registry.OTHER_SUITE, *registry.SUITE_OF_TRANSFORMS)
def test_float64_leaves_keep_float64_state(entry):
    with jax.enable_x64(True):
        tx, params, grads = entry.make(), tree_of(0, np.float64), tree_of(10, np.float64)
        state = jax.eval_shape(tx.init, params)
        step = functools.partial(updated, entry, tx)
        updates, new = jax.eval_shape(step, grads, state, params)
        assert spec(updates) == spec(jax.eval_shape(lambda p: p, params))
        assert spec(new) == spec(state)
        kept = [x for x in jax.tree.leaves(state) if x.shape == (3, 4)]
        assert entry.quantized or all(x.dtype == jnp.float64 for x in kept)


@functools.cache
def trained(entry: Any, dtype: Any, steps: int) -> np.ndarray:
    """Minimise ½‖p − target‖² with noisy gradients, the same ones for every dtype."""
    tx = entry.make()
    target = normal((64,), 0) + 2.0
    noise = normal((steps, 64), 1) * 0.1
    start = jnp.ones((64,), dtype) * 3

    def step(carry, eta):
        p, state = carry
        grads = (p.astype(jnp.float32) - target + eta).astype(dtype)
        updates, state = tx.update({"p": grads}, state, {"p": p})
        return (optfn.apply_updates({"p": p}, updates)["p"], state), None

    (p, _), _ = jax.lax.scan(step, (start, tx.init({"p": start})), noise)
    return np.asarray(p, np.float32)


@by_entry(registry.OPTIMIZERS, *TRAINED)
def test_200_bf16_steps_follow_float32(entry):
    """Within 3 % in norm, at rates whose steps bfloat16 parameters can take."""
    exact = trained(entry, jnp.float32, 200)
    rounded = trained(entry, jnp.bfloat16, 200)
    assert np.linalg.norm(rounded - exact) < 0.03 * np.linalg.norm(exact)


@EDGE
def test_a_tree_without_leaves(entry):
    tx = entry.make()
    for empty in ({}, None, {"a": None}):
        if empty is None and entry.needs_params:
            continue  # params=None means that none are given
        updates, _ = updated(entry, tx, empty, tx.init(empty), empty)
        assert updates == empty


@EDGE
def test_shapes_and_structures_must_match(entry):
    """Errors name the leaf; nothing is broadcast."""
    tx, params = entry.make(), {"a": {"w": jnp.ones((3, 2))}, "b": jnp.ones(2)}
    state = tx.init(params)
    with pytest.raises(ValueError, match=r"'a/w'.*\(2,\).*\(3, 2\)"):
        updated(entry, tx, {"a": {"w": jnp.ones(2)}, "b": jnp.ones(2)}, state, params)
    with pytest.raises(ValueError, match="missing 'b'"):
        updated(entry, tx, {"a": {"w": jnp.ones((3, 2))}}, state, params)
    with pytest.raises(ValueError, match="not expected 'c'"):
        updated(entry, tx, params | {"c": jnp.ones(2)}, state, params)
    with pytest.raises(ValueError, match=r"'b'.*None"):
        updated(entry, tx, params | {"b": None}, state, params)
    with pytest.raises(TypeError, match=r"'b'.*int32"):
        updated(entry, tx, params | {"b": jnp.ones(2, jnp.int32)}, state, params)
    with pytest.raises(TypeError, match=r"'b'.*complex"):
        updated(entry, tx, params | {"b": jnp.ones(2, jnp.complex64)}, state, params)
    with pytest.raises(TypeError, match=r"'b'.*'text'"):
        tx.init(params | {"b": "text"})
    with pytest.raises(TypeError, match=r"'b'.*key"):
        tx.init(params | {"b": jax.random.key(0)})


OF_ANY_PARAMS = {name for name, entry in registry.ALL.items() if entry.of_any_params}
SUITE_OF_OTHER_PARAMS = (
    "lars", "rmsprop", "adam_bfloat16", "adamw_int8", "ftrl", "muon_int8", "multi_precision",
    "master_weights_accumulate_attributes", "model_average", "exchange_quantized",
)  # fmt: skip


@pytest.mark.parametrize("name", sorted(OF_ANY_PARAMS))
def test_state_of_any_params(name):
    state = registry.ALL[name].make().init({"w": jnp.ones((2, 2))})
    assert all(x.shape == () for x in jax.tree.leaves(state))


@pytest.mark.parametrize(
    "name", suite([k for k in registry.ALL if k not in OF_ANY_PARAMS], *SUITE_OF_OTHER_PARAMS)
)
def test_state_of_other_params_is_an_error(name):
    entry = registry.ALL[name]
    tx = entry.make()
    state = tx.init({"w": jnp.ones((2, 2))})
    w = {"w": jnp.ones((3, 2))}
    with pytest.raises(ValueError, match=r"'w'.*other params"):
        updated(entry, tx, w, state, w)
    v = {"v": jnp.ones((2, 2))}
    with pytest.raises(ValueError, match="'v'"):
        updated(entry, tx, v, state, v)


@by_entry(
    registry.ALL,
    *("sgd_clip_l1", "lars", "rmsprop_bfloat16", "adamw_exclude", "adamax_int8", "lamb_corrected"),
    *("ftrl", "master_weights_24", "model_average"),
)
def test_hostile_magnitudes_stay_finite(entry):
    """Gradients of ±1e-30 and ±1e30, one and all elements, for five steps: update and params."""
    tx = entry.make()
    step = jax.jit(functools.partial(updated, entry, tx))
    params = {"w": normal((4,), 0), "zero": jnp.zeros(4)}
    for size in (1e-30, 1e30):
        grads = jax.tree.map(lambda p, s=size: s * jnp.array([1.0, -1.0, 0.0, 1.0]), params)
        p, state = params, tx.init(params)
        for _ in range(5):
            updates, state = step(grads, state, p)
            p = optfn.apply_updates(p, updates)
            chex.assert_tree_all_finite((updates, p))


@by_entry(registry.ALL, *registry.SUITE)
def test_non_finite_gradients_are_seen(entry):
    """A NaN gradient never turns into a finite update of its own element."""
    tx = entry.make()
    params = {"w": normal((4,), 0)}
    grads = {"w": jnp.array([1.0, jnp.nan, 1.0, 1.0])}
    state = tx.init(params)
    update = jax.jit(functools.partial(updated, entry, tx))
    for _ in range(2):  # the second completes an accumulation
        updates, state = update(grads, state, params)
    if entry.hides_nan:
        assert not np.any(updates["w"])
    else:
        assert np.isnan(updates["w"][1])
