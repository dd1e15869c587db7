"""optfn inside optax, optax inside optfn, and both inside flax, equinox and haiku."""

import functools

import catalogue
import chex
import equinox as eqx
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax
import problems
import pytest
import registry
from flax import linen, nnx
from grids import by_entry, suite

import optfn

SOME = by_entry(registry.OPTIMIZERS, "decayed_adagrad", "adam_clip_l2")


def params_and_grads():
    rng = np.random.default_rng(0)
    tree = {"a": {"w": rng.normal(size=(3, 2)), "b": rng.normal(size=2)}, "c": rng.normal(size=4)}
    grads = jax.tree.map(lambda x: 0.3 * x + 0.1, tree)
    return jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), (tree, grads))


def run(tx, params, grads):
    return problems.steps(tx, params, [grads] * 3, apply=optax.apply_updates)[-1][1:]


@SOME
def test_a_masked_optimizer_is_the_optimizer_of_the_subtree(entry):
    params, grads = params_and_grads()
    mask = {"a": True, "c": False}
    masked = optax.chain(
        optax.masked(entry.make(), mask), optax.masked(optax.set_to_zero(), {"a": False, "c": True})
    )
    alone, _ = run(entry.make(), {"a": params["a"]}, {"a": grads["a"]})
    new, _ = run(masked, params, grads)
    chex.assert_trees_all_close(new["a"], alone["a"], rtol=1e-6)
    chex.assert_trees_all_equal(new["c"], params["c"])


@SOME
def test_chain_around_and_inside(entry):
    """optax's clip before ours, and optax's transforms as grad_clip and regularization."""
    params, grads = params_and_grads()
    ours, _ = run(optax.chain(optfn.clip_by_global_norm(0.5), entry.make()), params, grads)
    theirs, _ = run(optax.chain(optax.clip_by_global_norm(0.5), entry.make()), params, grads)
    # The clips round differently, and an entry of muon's matrix is a sum of entries of size 0.5.
    chex.assert_trees_all_close(ours, theirs, rtol=1e-5, atol=3e-7)
    tx = optfn.sgd(
        0.1, grad_clip=optax.clip_by_global_norm(0.5), regularization=optax.add_decayed_weights(0.1)
    )
    clip, decay = optfn.clip_by_global_norm(0.5), optfn.l2_decay(0.1)
    expected, _ = run(optfn.sgd(0.1, grad_clip=clip, regularization=decay), params, grads)
    chex.assert_trees_all_close(run(tx, params, grads)[0], expected, rtol=1e-5)


# Further numbers of those that have any.
NUMBERS = {
    "momentum": {"momentum": 0.9}, "lars": {"momentum": 0.9}, "asgd": {"weight_decay": 0.1},
    "rmsprop": {"momentum": 0.5}, "ftrl": {"l1": 0.01},
}  # fmt: skip
INJECTED = [name for name in catalogue.OPTIMIZERS if name != "muon"]


@pytest.mark.parametrize("name", suite(INJECTED, "asgd", "adamw", "ftrl"))
def test_inject_hyperparams(name):
    """Every numeric argument may be an array, traced under jit; the numbers stay the same."""
    params, grads = params_and_grads()
    factory, numbers = getattr(optfn, name), {"learning_rate": 0.1} | NUMBERS.get(name, {})
    static = ("batch_num",) if name == "asgd" else ()
    injected = optax.inject_hyperparams(factory, static_args=static)(**numbers)
    state, p = injected.init(params), params
    step = jax.jit(injected.update)
    for _ in range(3):
        updates, state = step(grads, state, p)
        p = optax.apply_updates(p, updates)
    chex.assert_trees_all_close(p, run(factory(**numbers), params, grads)[0], rtol=1e-4, atol=1e-5)
    assert float(optfn.get_learning_rate(state)) == pytest.approx(0.1)
    with pytest.raises(ValueError, match="a schedule or an array determines it"):
        optfn.set_learning_rate(state, 0.5)


def test_inject_hyperparams_with_low_precision_params():
    """hyperparam_dtype=float32 keeps b2 from rounding to 1."""
    params, grads = params_and_grads()
    low = functools.partial(jax.tree.map, lambda x: x.astype(jnp.bfloat16))
    inject = optax.inject_hyperparams(optfn.adam, hyperparam_dtype=jnp.float32)
    new, _ = run(inject(learning_rate=0.1), low(params), low(grads))
    expected, _ = run(optfn.adam(0.1), low(params), low(grads))
    chex.assert_trees_all_close(new, expected, rtol=1e-2)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore:.*has no effect without tables")
@SOME
def test_nnx_optimizer(entry):
    """nnx wraps state leaves and drops `value` from paths at update."""

    model, x = nnx.Linear(3, 2, rngs=nnx.Rngs(0)), jnp.arange(6.0).reshape(2, 3)
    optimizer = nnx.Optimizer(model, entry.make(), wrt=nnx.Param)

    @nnx.jit
    def step(model, optimizer):
        grads = nnx.grad(lambda m: jnp.mean((m(x) - 1.0) ** 2))(model)
        optimizer.update(model, grads)

    def loss(p, x):
        return jnp.mean((x @ p["kernel"] + p["bias"] - 1.0) ** 2)

    plain_step = optfn.make_train_step(loss, entry.make())
    state = plain_step.init({k: jnp.array(getattr(model, k)[...]) for k in ("kernel", "bias")})
    for _ in range(3):
        step(model, optimizer)
        state, _ = plain_step(state, x)
    np.testing.assert_allclose(model.kernel[...], state.params["kernel"], rtol=1e-4, atol=1e-5)
    rate = optfn.get_learning_rate(optimizer.opt_state)
    np.testing.assert_allclose(rate, optfn.get_learning_rate(state.opt_state))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_nnx_learning_rate_is_set_inside_its_wrapper():
    model = nnx.Linear(3, 2, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optfn.adam(0.1), wrt=nnx.Param)
    changed = optfn.set_learning_rate(optimizer.opt_state, 0.01)
    assert jax.tree.structure(changed) == jax.tree.structure(optimizer.opt_state)
    optimizer.opt_state = changed
    grads = nnx.grad(lambda m: m(jnp.ones((1, 3))).sum())(model)
    before = jnp.array(model.bias[...])
    optimizer.update(model, grads)
    np.testing.assert_allclose(model.bias[...] - before, -0.01, rtol=1e-4)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_nnx_paths_are_the_same_at_init_and_update():
    """A pattern of paths sees linear/kernel in both."""
    model = nnx.Linear(3, 2, rngs=nnx.Rngs(0))
    seen = []

    def exclude(path):
        seen.append(path)
        return path == "bias"

    optimizer = nnx.Optimizer(model, optfn.adamw(0.1, exclude=exclude), wrt=nnx.Param)
    optimizer.update(model, nnx.grad(lambda m: m(jnp.ones((1, 3))).sum())(model))
    assert set(seen) == {"bias", "kernel"}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_attributes_on_the_trees_of_every_library():
    """The same two leaves by path, in a flax, an nnx, a haiku and an equinox model."""
    x = jnp.ones((1, 3))
    flax_params = linen.Dense(2).init(jax.random.key(0), x)
    net = hk.transform(lambda x: hk.Linear(2, name="out")(x))
    haiku_params = net.init(jax.random.key(0), x)
    nnx_params = nnx.state(nnx.Linear(3, 2, rngs=nnx.Rngs(0)), nnx.Param)
    equinox_params = eqx.filter(eqx.nn.Linear(3, 2, key=jax.random.key(0)), eqx.is_array)
    for params, bias, weight in (
        (flax_params, "params/bias", "params/kernel"),
        (haiku_params, "out/b", "out/w"),
        (nnx_params, "bias", "kernel"),
        (equinox_params, "bias", "weight"),
    ):
        attrs = {bias: optfn.ParamAttr(trainable=False), weight: optfn.ParamAttr(learning_rate=0.5)}
        tx = optfn.sgd(1.0, param_attrs=attrs)
        grads = jax.tree.map(jnp.ones_like, params)
        updates, _ = tx.update(grads, tx.init(params), params)
        assert jax.tree.structure(updates) == jax.tree.structure(params)
        by_ndim = {u.ndim: np.unique(u) for u in jax.tree.leaves(updates)}
        np.testing.assert_array_equal(by_ndim[1], 0.0)
        np.testing.assert_array_equal(by_ndim[2], -0.5)
        with pytest.raises(ValueError, match=f"'{weight}'"):
            optfn.sgd(1.0, param_attrs={"nothing": optfn.ParamAttr()}).init(params)
