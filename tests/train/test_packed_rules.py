"""A buffer of several leaves changes rules that treat a leaf as a whole: these are refused, and
masks and labels that look at a leaf.

The property over optax's catalogue: a transformation trains packed params as it trains the tree, or
the step refuses it.
"""

import functools
import inspect
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import registry
from grids import suite
from optax import contrib

import optfn
from optfn import core
from optfn.core import leafwise
from optfn.optimizers.assembly import optimizer
from optfn.train.packed_rules import refuse_changed_rules

RATE = 0.05
# Of these the bits that each leaf draws differ with the tree, not the rule.
RANDOM = {"add_noise", "noisy_sgd", "dpsgd", "differentially_private_aggregate", "sophia"}
# It differs by less than the tolerance, since it moves by a millionth of the params at first.
SLOW = {"scale_by_distance_over_gradients"}


def params():
    shapes = {"a": (6, 5), "b": (5,), "c": (6, 5), "d": (5,), "e": (5, 4)}
    draw = np.random.default_rng(0).normal
    sizes = enumerate(shapes.items())
    return {k: ((1 + i) * draw(size=s)).astype(np.float32) for i, (k, s) in sizes}


def loss_fn(params, factor):
    """A loss whose gradients are bounded and smooth: rounding does not grow from step to step."""
    terms = (jnp.sum(0.1 * (1 + i) * jnp.logaddexp(x, -x)) for i, x in enumerate(params.values()))
    return factor * sum(terms)


@functools.cache
def train(tx, packed):
    """Return the params after some steps, of packed params or of the tree."""
    tx = optax.with_extra_args_support(tx)
    unpack = optfn.unpack if packed else lambda x: x

    @jax.jit
    def begin(x):
        x = optfn.pack(x) if packed else x
        return x, tx.init(x)

    @jax.jit
    def step(x, state, factor):
        def value_fn(x):
            return loss_fn(unpack(x), factor)

        loss, grads = jax.value_and_grad(value_fn)(x)
        updates, state = tx.update(grads, state, x, value=loss, grad=grads, value_fn=value_fn)
        return optax.apply_updates(x, updates), state

    x, state = begin(params())
    for k in range(5):
        x, state = step(x, state, 1.0 + k % 3)
    return jax.device_get(jax.jit(unpack)(x))


def difference(tx):
    """Return the largest relative difference between packed params and the tree."""
    pairs = zip(*(jax.tree.leaves(train(tx, packed)) for packed in (False, True)), strict=True)
    return max(float(np.max(np.abs(a - b)) / np.max(np.abs(a))) for a, b in pairs)


def refusal(tx):
    """Return the message of the refusal, "" if packed params are accepted."""
    try:
        refuse_changed_rules("tx", tx, params())
    except ValueError as error:
        return str(error)
    return ""


# What is known of optax's catalogue; CI tries CHOSEN, and `make nightly` the whole catalogue.
ACCUSED = {"lamb", "lars", "sm3", "adafactor", "novograd", "adaptive_grad_clip", "muon"}
RIGHT = {"adam", "adamw", "sgd", "lion", "rmsprop", "nadam", "yogi", "prodigy"}
CHOSEN = {"lamb", "sm3", "muon", "adam", "prodigy"}


def catalogue(names):
    """Yield (name, transformation) of the factories of optax that take a rate, a number or none.

    `names` chooses some of them; None takes all.
    """
    for module in (optax, contrib):
        for name, factory in inspect.getmembers(module, callable):
            if inspect.isclass(factory) or (names is not None and name not in names):
                continue
            for arguments in ((), (RATE,), (RATE, 0.9)):
                try:
                    with warnings.catch_warnings():
                        warnings.simplefilter("ignore")
                        tx = factory(*arguments)
                    if isinstance(tx, optax.GradientTransformation):
                        train(tx, packed=False)
                        yield name, tx
                        break
                except Exception:
                    continue


@optimizer
def halves(
    learning_rate, *, grad_clip=None, regularization=None, param_attrs=None, multi_precision=False
):
    """Half of the sign of the gradient."""

    def rule(updates, params=None):
        return jax.tree.map(lambda g: 0.5 * jnp.sign(g), updates)

    return core.chain(optax.stateless(rule), optfn.scale_by_learning_rate(learning_rate))


def by_axes(params):
    return jax.tree.map(lambda x: x.ndim > 1, params)


def by_path(params):
    """Mark the leaves that are called "b" and "d"."""

    def is_marked(path, x):
        return "b" in jax.tree_util.keystr(path) or "d" in jax.tree_util.keystr(path)

    return jax.tree_util.tree_map_with_path(is_marked, params)


def by_size(updates, params):
    return jax.tree.map(lambda g: RATE * g / np.sqrt(g.size), updates)


def by_each_rate(rates):
    """Return steps with an array of rates for each leaf, one for each row."""

    def rule(updates, params):
        def scale(g):
            rows = g.reshape(-1, g.shape[-1]) if g.ndim else g
            return -(rows * rates[: len(rows), None]).reshape(g.shape) if g.ndim else -RATE * g

        return jax.tree.map(scale, updates)

    return optax.stateless(rule)


def of_each(fn):
    return optax.stateless(lambda g, p: jax.tree.map(lambda x: -RATE * fn(x), g))


def labeled(labels, **rules):
    return optax.partition({True: rules["true"], False: rules["false"]}, labels)


WHOLE = {
    "behind a global norm": optax.chain(optax.clip_by_global_norm(1.0), optax.lamb(RATE)),
    "in a chain of optfn": optfn.chain(optax.lamb(RATE)),
    "accumulated": optfn.chain(optax.MultiSteps(optax.lamb(RATE), 2)),
    "injected": optax.inject_hyperparams(optax.lamb)(learning_rate=RATE),
    "a global norm of some leaves": optax.masked(optax.clip_by_global_norm(1.0), by_axes),
    "a decay by path": optax.adamw(RATE, weight_decay=0.5, mask=by_path),
    "frozen by path": optax.chain(optax.sgd(RATE), optax.masked(optax.set_to_zero(), by_path)),
    "rules by axes": labeled(by_axes, true=optfn.adam(RATE), false=optax.sgd(RATE)),
    "rates of optfn by axes": labeled(by_axes, true=optfn.sgd(RATE), false=optfn.sgd(RATE / 2)),
    "rates of optfn by path": labeled(by_path, true=optfn.adam(RATE), false=optfn.adam(RATE / 2)),
    "a norm behind muon of optfn": optax.chain(
        optfn.scale_by_muon(), optax.clip_by_block_rms(1e-3)
    ),
    "rules of optfn by path": labeled(
        by_path, true=optfn.sgd(RATE), false=optfn.chain(optfn.scale_by_rms(), optfn.sgd(RATE))
    ),
    "a clip of optfn by axes": optax.chain(
        optax.masked(optfn.clip_by_value(1e-2), by_axes), optfn.sgd(RATE)
    ),
    "a scale by size": optax.stateless(by_size),
    "a small decay of matrices": optax.adamw(RATE, weight_decay=0.02, mask=by_axes),
    "rates of rows": by_each_rate(RATE * np.arange(1.0, 70.0, dtype=np.float32)),
    "rolled": of_each(lambda x: jnp.roll(x.ravel(), 1).reshape(x.shape)),
    "sorted": of_each(lambda x: jnp.sort(x.ravel()).reshape(x.shape)),
    "the first element": of_each(lambda x: x + x.ravel()[0]),
    "scattered": of_each(lambda x: x.ravel().at[0].set(0.0).reshape(x.shape)),
}
ELEMENTWISE = {
    "elements behind a global norm": optax.chain(optax.clip_by_global_norm(1.0), optax.adam(RATE)),
    "a flat vector": optax.flatten(optax.lamb(RATE)),
    "optfn in optax's chain": optax.chain(optfn.clip_by_norm(1.0), optfn.lamb(RATE)),
    "optfn, injected": optax.inject_hyperparams(optfn.lamb)(learning_rate=RATE),
    "optfn in a partition": optax.partition(
        {"x": optfn.lamb(RATE)}, lambda params: jax.tree.map(lambda x: "x", params)
    ),
    "a scale behind optfn": optax.chain(
        optfn.muon(RATE, matrices="a|c"), optfn.clip_by_norm(0.1), optax.scale(0.5)
    ),
    "frozen by optfn": optax.chain(
        optfn.adam(RATE, param_attrs={"a|b": optfn.ParamAttr(trainable=False)}), optax.scale(0.5)
    ),
    "a rule of one's own, frozen and with rates by optfn": halves(
        RATE,
        param_attrs={
            "a": optfn.ParamAttr(trainable=False),
            "b": optfn.ParamAttr(learning_rate=2.0, regularization=optfn.l2_decay(0.1)),
        },
    ),
    "only finite": optax.apply_if_finite(optax.adam(RATE), 3),
    "elements, accumulated": optfn.chain(optax.MultiSteps(optax.adam(RATE), 2)),
}
TRAINED = ("rules by axes", "sorted", "only finite")  # these in CI, and all others at night


@pytest.mark.parametrize(
    "names",
    [pytest.param(CHOSEN, id="chosen"), pytest.param(None, id="all", marks=pytest.mark.nightly)],
)
def test_optax_trains_packed_params_as_the_tree_or_is_refused(names):
    wrong, accused, right = [], set(), set()
    for name, tx in catalogue(names):
        said = refusal(tx)
        if name in RANDOM:
            assert not said, said
            continue
        differs = not difference(tx) < 1e-4  # also NaN
        (accused if said else right).add(name)
        if name not in SLOW and differs != bool(said):
            wrong.append((name, differs, said))
    assert not wrong
    assert accused >= ACCUSED & (names or ACCUSED)
    assert right >= RIGHT & (names or RIGHT)


@pytest.mark.parametrize("name", WHOLE | ELEMENTWISE)
def test_a_rule_of_whole_leaves_is_refused_and_one_of_elements_accepted(name):
    said = refusal((WHOLE | ELEMENTWISE)[name])
    assert "cannot be combined with packed=True" in said if name in WHOLE else not said


@pytest.mark.parametrize("name", suite(WHOLE | ELEMENTWISE, *TRAINED))
def test_the_two_lists_say_which_rules_packing_changes(name):
    assert (difference((WHOLE | ELEMENTWISE)[name]) > 1e-4) == (name in WHOLE)


@pytest.mark.parametrize("name", suite(registry.ALL, "muon_int8", "lamb", "adam_clip_l2", "stack"))
def test_the_rules_of_optfn_are_not_accused(name):
    """Not even where they are traced, as parts of a transformation of another library."""
    assert not refusal(optax.chain(registry.ALL[name].make()))


@core.transform(needs_params=True)
def clip_by_rms(limit):
    def rule(g, p):
        return g / jnp.maximum(1.0, jnp.sqrt(jnp.mean(g**2)) / limit)

    def update(updates, state, params=None, **extra):
        return leafwise.apply(rule, updates, params=params), state

    return core.rule(lambda params: optax.EmptyState(), update)


def test_the_error_names_leaf_values_and_remedy():
    step = optfn.make_train_step(
        loss_fn, optfn.chain(clip_by_rms(0.1), optfn.sgd(RATE)), packed=True
    )
    with pytest.raises(ValueError, match=r"tx=chain\(clip_by_rms\(0.1\), sgd\(0.05\)\) cannot"):
        step.init(params())
    with pytest.raises(ValueError, match=r"leaf '.' the update is .* flat buffer .*optfn.lamb"):
        step.lower(params(), jnp.ones(()))
    step = optfn.make_train_step(loss_fn, optax.lamb(RATE), packed=True)
    with pytest.raises(ValueError, match=r"tx=optax.chain\(…\) cannot .*leaf '.' the update is"):
        step.init(params())


def test_a_matrix_alone_in_its_buffer_is_flat_too():
    matrix = {"w": jnp.ones((6, 5))}
    with pytest.raises(ValueError, match="leaf 'w' the update is"):
        refuse_changed_rules("tx", contrib.muon(RATE), matrix)
    refuse_changed_rules("tx", optax.lamb(RATE), matrix)  # the norm of all


UNKNOWN = {
    "cannot be traced": lambda g: jax.tree.map(lambda x: x / float(jnp.max(x)), g),
    "needs a step": lambda g: jax.lax.pmean(g, "data"),
}


@pytest.mark.parametrize("rule", UNKNOWN.values(), ids=UNKNOWN)
def test_a_rule_that_is_not_known_is_not_accused(rule):
    assert not refusal(optax.stateless(lambda g, params: rule(g)))


def test_a_rule_of_scalars_is_refused():
    def by_axes(params):
        return jax.tree.map(lambda x: x.ndim == 0, params)

    tx = optax.chain(optax.sgd(RATE), optax.masked(optax.scale(0.5), by_axes))
    with pytest.raises(ValueError, match=r"leaf 'scale' the update is"):
        refuse_changed_rules("tx", tx, {"w": jnp.ones((6, 5)), "scale": jnp.ones(())})


@pytest.mark.parametrize("dtype", ["bfloat16", "complex64"])
def test_params_of_any_dtype_are_compared(dtype):
    tree = {"w": jnp.ones((6, 5), dtype), "b": jnp.ones(5, dtype)}
    refuse_changed_rules("tx", optax.sgd(RATE, momentum=0.9), tree)
    with pytest.raises(ValueError, match=r"leaf '.' the update is"):
        refuse_changed_rules("tx", optax.lars(RATE), tree)
