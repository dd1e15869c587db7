"""The rows of docs/moving/torch.md and optax.md: where optfn takes the same steps.

Those of torch need it installed.
"""

from functools import partial

import jax
import numpy as np
import optax
import pytest
from problems import run

import optfn
from optfn import schedules

RNG = np.random.default_rng(0)
PARAMS = {"w": RNG.normal(size=(5, 4)).astype(np.float32), "b": np.ones(4, np.float32)}
GRADS = [
    jax.tree.map(lambda x: RNG.normal(size=x.shape).astype(np.float32), PARAMS) for _ in range(9)
]
EPS = 1e-2  # large, so that its place shows
RMSPROP = optfn.chain(
    optfn.scale_by_decayed_adagrad(decay=0.99, eps=EPS),
    optfn.scale_by_momentum(0.9),
    optfn.scale_by_learning_rate(0.1),
)
CASES = {
    "SGD": (
        optfn.momentum(0.1, 0.9, nesterov=True, regularization=optfn.l2_decay(0.1)),
        {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1},
    ),
    "Adam": (
        optfn.adam(0.1, eps=EPS, eps_hat=False, regularization=optfn.l2_decay(0.1)),
        {"eps": EPS, "weight_decay": 0.1},
    ),
    "AdamW": (optfn.adamw(0.1, eps=EPS, weight_decay=0.1), {"eps": EPS, "weight_decay": 0.1}),
    "Adagrad": (optfn.adagrad(0.1, eps=EPS), {"eps": EPS}),
    "Adadelta": (optfn.adadelta(0.1, rho=0.9, eps=EPS), {"rho": 0.9, "eps": EPS}),
    "RMSprop": (RMSPROP, {"alpha": 0.99, "eps": EPS, "momentum": 0.9}),
}


@pytest.mark.parametrize("name", CASES)
def test_optimizers_make_the_steps_of_torch(name):
    torch, (tx, options) = pytest.importorskip("torch"), CASES[name]
    theirs = {k: torch.nn.Parameter(torch.tensor(x)) for k, x in PARAMS.items()}
    optimizer = getattr(torch.optim, name)(theirs.values(), lr=0.1, **options)
    for grads in GRADS:
        for k, g in grads.items():
            theirs[k].grad = torch.tensor(g)
        optimizer.step()
    ours = run(tx, PARAMS, GRADS)[0][-1]
    for k in PARAMS:
        np.testing.assert_allclose(ours[k], theirs[k].detach().numpy(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("ours", "name", "options"),
    [
        (schedules.step_decay(0.1, 10, 0.5), "StepLR", {"step_size": 10, "gamma": 0.5}),
        (schedules.multi_step(0.1, [5, 20]), "MultiStepLR", {"milestones": [5, 20]}),
        (schedules.exponential(0.1, 1, 0.9), "ExponentialLR", {"gamma": 0.9}),
        (schedules.cosine(0.1, 1, 40), "CosineAnnealingLR", {"T_max": 40}),
        (schedules.polynomial(0.1, 20, 0.0, 2.0), "PolynomialLR", {"total_iters": 20, "power": 2}),
        (schedules.linear_warmup(0.1, 10, 0.05, 0.1), "LinearLR",
         {"start_factor": 0.5, "total_iters": 10}),
        (schedules.one_cycle(0.1, 30), "OneCycleLR", {"max_lr": 0.1, "total_steps": 30}),
        (
            schedules.one_cycle(0.1, 31, pct_start=0.4, anneal="linear", three_phase=True),
            "OneCycleLR",
            {"max_lr": 0.1, "total_steps": 31, "pct_start": 0.4, "three_phase": True}
            | {"anneal_strategy": "linear"},
        ),
    ],
)  # fmt: skip
def test_schedules_are_those_of_torch(ours, name, options):
    torch = pytest.importorskip("torch")
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    scheduler = getattr(torch.optim.lr_scheduler, name)(optimizer, **options)
    for i in range(30):
        assert float(ours(i)) == pytest.approx(optimizer.param_groups[0]["lr"], rel=1e-4)
        optimizer.step()
        scheduler.step()


SAME = {
    "sgd": (optfn.momentum(0.1, 0.9, nesterov=True), optax.sgd(0.1, 0.9, nesterov=True)),
    "adam": (optfn.adam(0.1, eps=EPS, eps_hat=False), optax.adam(0.1, eps=EPS)),
    "adamw": (
        optfn.adamw(0.1, eps=EPS, weight_decay=0.1), optax.adamw(0.1, eps=EPS, weight_decay=0.1)
    ),
    "adadelta": (optfn.adadelta(1.0, rho=0.9, eps=EPS), optax.adadelta(1.0, 0.9, EPS)),
    "rmsprop": (optfn.rmsprop(0.1, rho=0.9, eps=EPS), optax.rmsprop(0.1, 0.9, EPS)),
    "lamb": (
        optfn.lamb(0.1, weight_decay=0.1, bias_correction=True), optax.lamb(0.1, weight_decay=0.1)
    ),
    "lars": (optfn.lars(0.1, 0.9, lars_weight_decay=0.0), optax.lars(0.1)),
}  # fmt: skip
OTHERS = {
    "adam": (optfn.adam(0.1, eps=EPS), optax.adam(0.1, eps=EPS)),
    "adagrad": (
        optfn.adagrad(0.1, eps=EPS, initial_accumulator_value=0.1), optax.adagrad(0.1, 0.1, EPS)
    ),
    "adamax": (optfn.adamax(0.1, eps=EPS), optax.adamax(0.1, eps=EPS)),
    "lars": (optfn.lars(0.1, 0.9, lars_weight_decay=0.1), optax.lars(0.1, 0.1)),
}  # fmt: skip


def agree(ours, theirs):
    ours, theirs = (jax.tree.leaves(run(tx, PARAMS, GRADS)[0][-1]) for tx in (ours, theirs))
    return all(map(partial(np.allclose, rtol=1e-4, atol=1e-5), ours, theirs))


@pytest.mark.parametrize("name", SAME)
def test_optimizers_take_the_steps_of_optax(name):
    assert agree(*SAME[name])


@pytest.mark.parametrize("name", OTHERS)
def test_optimizers_that_the_page_calls_different_are(name):
    assert not agree(*OTHERS[name])


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (schedules.exponential(0.1, 10, 0.5), optax.exponential_decay(0.1, 10, 0.5)),
        (schedules.polynomial(0.1, 50, 0.01, 2.0), optax.polynomial_schedule(0.1, 0.01, 2, 50)),
        (
            schedules.warmup_cosine(0.1, 5, 30, end=0.01),
            optax.warmup_cosine_decay_schedule(0.0, 0.1, 5, 30, 0.01),
        ),
        (schedules.cosine(0.1, 1, 50), optax.cosine_decay_schedule(0.1, 50)),
        (schedules.multi_step(0.1, [10]), optax.piecewise_constant_schedule(0.1, {10: 0.1})),
    ],
)
def test_schedules_are_those_of_optax(ours, theirs):
    i = np.arange(40)
    np.testing.assert_allclose(jax.vmap(ours)(i), jax.vmap(theirs)(i), rtol=1e-5)
