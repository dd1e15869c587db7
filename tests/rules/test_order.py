"""Links of a chain that stand at the wrong place: the warnings, and that right chains give none."""

import warnings

import chains
import jax
import jax.numpy as jnp
import optax
import pytest
from grids import suite
from registry import OPTIMIZERS

import optfn
from optfn.distributed import data_mesh, exchange, quantize
from optfn.train import order

PARAMS = {"w": jnp.arange(1.0, 5.0)}


def init(tx):
    return optfn.make_train_step(lambda p, x: jnp.sum((p["w"] - x) ** 2), tx).init(PARAMS)


def ema():
    return optfn.exponential_moving_average(0.9)


def late_decay():
    return optfn.chain(optfn.sgd(0.1), optfn.add_decayed_weights(0.3))


def label_all(label):
    return lambda params: jax.tree.map(lambda x: label, params)


GROWS = r"add_decayed_weights\(.*\) adds to the step of sgd\(0.1\)"
MISPLACED = {
    "a masked decay behind the rate": (
        lambda: optfn.chain(
            optfn.sgd(0.1), optax.masked(optfn.add_decayed_weights(0.3), {"w": True})
        ),
        GROWS,
    ),
    "a masked decay behind the rate, in optax's chain": (
        lambda: optax.chain(
            optfn.sgd(0.1), optax.masked(optfn.add_decayed_weights(0.3), label_all(True))
        ),
        "adds to the step",
    ),
    "a decay behind the rate in a partition": (
        lambda: optax.partition({"a": late_decay(), "b": optfn.sgd(0.1)}, {"w": "a"}),
        GROWS,
    ),
    "a decay behind the rate in a partition, by a function": (
        lambda: optfn.skip_nonfinite(optax.partition({"a": late_decay()}, label_all("a"))),
        GROWS,
    ),
    "an average before a rule": (
        lambda: optfn.chain(ema(), optfn.sgd(0.1)),
        r"exponential_moving_average\(0.9\) is an average, but sgd\(0.1\) follows",
    ),
    "in optax's chain, inside a wrapper": (
        lambda: optfn.skip_nonfinite(optax.chain(ema(), optax.sgd(0.1))),
        "is an average, but a link without a state follows",
    ),
    "a plateau after a rate of its own": (
        lambda: optfn.chain(optfn.adam(1e-3), optfn.schedules.reduce_on_plateau(1e-3)),
        "already applied a learning rate of 0.001",
    ),
    "a plateau after the rates of a partition": (
        lambda: optfn.chain(
            optax.partition({"a": optfn.adam(0.5), "b": optfn.sgd(0.1)}, label_all("a")),
            optfn.schedules.reduce_on_plateau(1e-3),
        ),
        "already applied a learning rate of 0.5",
    ),
    "two exchanges": (
        lambda: optfn.chain(exchange(quantize(8)), exchange(quantize(1)), optfn.sgd(0.1)),
        r"exchange\(quantize\(8\)\) and exchange\(quantize\(1\)\) both exchange",
    ),
    "two learning rates": (
        lambda: optfn.chain(optfn.adam(1e-3), optfn.record_metrics(optfn.sgd(1.0))),
        r"adam\(0.001\) has already applied a learning rate, and sgd\(1.0\)",
    ),
    "a clip before a scale of the loss": (
        lambda: optfn.chain(
            optfn.clip_by_global_norm(1.0), optfn.dynamic_loss_scale(optfn.sgd(0.1))
        ),
        r"Put it inside, as in dynamic_loss_scale\(chain\(clip_by_global_norm\(1.0\), …",
    ),
    "a guard around a scale of the loss": (
        lambda: optfn.skip_nonfinite(optfn.dynamic_loss_scale(optfn.sgd(0.1))),
        "the scale never falls",
    ),
    "norms around a scale of the loss": (
        lambda: optfn.record_metrics(optfn.dynamic_loss_scale(optfn.sgd(0.1))),
        "norms that it reads are multiplied by the scale",
    ),
    "no learning rate": (
        lambda: optfn.chain(optfn.clip_by_global_norm(1.0), optfn.scale_by_adam()),
        "applies no learning rate",
    ),
}


@pytest.mark.parametrize("name", MISPLACED)
def test_a_misplaced_link_warns_at_the_users_line(name):
    make, message = MISPLACED[name]
    with pytest.warns(UserWarning, match=message) as caught:
        init(make())
    assert len(caught) == 1
    assert caught[0].filename == __file__


RIGHT = {
    "a masked decay behind the rate of other leaves": lambda: optfn.chain(
        optfn.sgd(0.1), optax.masked(optfn.add_decayed_weights(0.3), {"w": False})
    ),
    "a decay behind the rate for no leaves": lambda: optax.partition(
        {"a": late_decay(), "b": optfn.sgd(0.1)}, {"w": "b"}
    ),
    "nothing behind an average": lambda: optfn.chain(optfn.sgd(0.1), ema(), optax.identity()),
    "nothing behind an average, in a mask": lambda: optfn.chain(
        optfn.sgd(0.1), ema(), optax.masked(optax.identity(), {"w": True})
    ),
    "one exchange for some leaves, one for others": lambda: optax.partition(
        {
            "a": optfn.chain(exchange(quantize(8)), optfn.sgd(0.1)),
            "b": optfn.chain(exchange(quantize(1)), optfn.sgd(0.1)),
        },
        {"w": "a"},
    ),
    "a scale around a clip, norms and a guard": lambda: optfn.accumulate(
        optfn.dynamic_loss_scale(
            optfn.skip_nonfinite(
                optfn.record_metrics(optfn.sgd(0.1, grad_clip=optfn.clip_by_global_norm(1.0)))
            )
        ),
        2,
    ),
    "a user's own rule without a rate": lambda: halved_gradient(),
    "a wrapper of the user's turns the sign": lambda: optfn.chain(
        negated(optfn.adam(0.1)), optfn.scale_by_learning_rate(0.1)
    ),
    "alone": lambda: negated(optfn.scale_by_adam()),
    "a negative decay of optax behind a step": lambda: optfn.chain(
        optfn.adam(0.1), optax.add_decayed_weights(-0.01)
    ),
} | {name: x.make for name, x in OPTIMIZERS.items()}


def negated(tx):
    def update(updates, state, params=None):
        updates, state = tx.update(updates, state, params)
        return jax.tree.map(jnp.negative, updates), state

    return optax.GradientTransformation(tx.init, update)


@optfn.core.transform()
def halved_gradient():
    return optfn.core.stateless(lambda updates, params: jax.tree.map(lambda g: -g / 2, updates))


def test_rates_beside_a_rate_of_1_are_fractions_of_a_plateaus():
    params = {"w": jnp.ones(4), "head": jnp.ones(4)}
    rates = {"all": optfn.adam(1.0), "slow": optfn.sgd(0.1)}
    labels = {"w": "slow", "head": "all"}
    tx = optfn.chain(optax.partition(rates, labels), optfn.schedules.reduce_on_plateau(1e-3))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optfn.make_train_step(lambda p, x: jnp.sum(p["w"] - x), tx).init(params)


@pytest.mark.parametrize("name", RIGHT)
def test_a_right_chain_gives_no_warning(name):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        init(RIGHT[name]())


WRONG = chains.quietly(chains.wrong_orders)
RIGHT_ORDERS = chains.quietly(chains.right_orders)
BEHIND_MASTERS = chains.quietly(chains.behind_masters)


def warnings_of(tx, params=chains.PARAMS):
    """Return the warnings at `init` of a step."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        order.warn_of_order("tx", tx, tx.init(params), params)
    return [str(x.message) for x in caught]


def test_every_wrong_order_speaks():
    silent = [name for name, tx in WRONG.items() if not warnings_of(tx)]
    assert not silent


def test_no_right_order_speaks():
    loud = {name: found for name, tx in RIGHT_ORDERS.items() if (found := warnings_of(tx))}
    assert not loud
    narrow = {
        name: found
        for name, tx in RIGHT_ORDERS.items()
        if "masters" in name and (found := warnings_of(tx, chains.NARROW))
    }
    assert not narrow


@pytest.mark.parametrize("name", suite(chains.OPTAX_OPTIMIZERS, *chains.OPTAX_OPTIMIZERS[::4]))
def test_no_optimizer_of_optax_is_accused(name):
    """Alone, and in chains and wrappers."""
    tx = getattr(optax, name)(1e-3)
    for around in chains.AROUND.values():
        clipped = optax.chain(optfn.clip_by_global_norm(1.0), around(tx))
        last = optfn.chain(around(tx), chains.ema())
        for made in (around(tx), clipped, last, optfn.accumulate(tx, 2)):
            assert not warnings_of(made)


def test_a_change_behind_masters_is_an_error():
    """Of copies and of remainders alike; float32 params have no masters."""
    for name, tx in BEHIND_MASTERS.items():
        with pytest.raises(ValueError, match="keeps masters"):
            order.warn_of_order("tx", tx, tx.init(chains.NARROW), chains.NARROW)
        assert isinstance(chains.quietly(warnings_of, tx), list), name


def test_a_guard_of_optax_around_masters_is_refused():
    """Its branches must give updates of one dtype; optax alone raises the error of a cond."""
    tx = optax.apply_if_finite(optfn.adam(1e-2, multi_precision=True), 5)
    with pytest.raises(
        ValueError, match=r"master_weights\(.*keeps masters.*Use optfn.skip_nonfinite"
    ):
        optfn.make_train_step(lambda p, x: jnp.sum(p["w"] ** 2), tx).init(chains.NARROW)
    state = optfn.make_train_step(lambda p, x: jnp.sum(p["w"] ** 2), tx).init(PARAMS)
    assert state.step == 0  # float32 params have no masters


def test_need_clip_without_a_clip_of_its_own_warns():
    attrs = {"w": optfn.ParamAttr(need_clip=False)}
    with pytest.warns(UserWarning, match=r"need_clip=False of param_attrs\['w'\] has no effect"):
        init(optfn.chain(optfn.clip_by_global_norm(1.0), optfn.adam(1e-3, param_attrs=attrs)))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        init(optfn.adam(1e-3, param_attrs=attrs, grad_clip=optfn.clip_by_global_norm(1.0)))


def test_a_window_above_all_updates_warns():
    with pytest.warns(UserWarning, match="average_window_rate=2 is a fraction"):
        optfn.model_average(2.0)


def test_an_exchange_alone_as_the_outer_optimizer_warns():
    options = {"local_steps": 2, "outer": exchange(quantize(8)), "mesh": data_mesh(2)}
    with pytest.warns(UserWarning, match="outer=exchange.* applies no learning rate"):
        optfn.make_train_step(
            lambda p, x: jnp.mean((p["w"] - x) ** 2), optfn.sgd(0.1), **options
        ).init(PARAMS)
