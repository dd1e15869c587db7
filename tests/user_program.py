"""A program of a user, checked by mypy and pyright against the installed package.

Each line with an ignore is a mistake that the annotations of optfn must tell; an ignore that is not
needed is an error of the check.
"""
# pyright: reportUnnecessaryTypeIgnoreComment=true

import jax.numpy as jnp
import numpy as np

import optfn
from optfn.distributed import MemoryPlan, data_mesh, plan_memory

params = {"w": jnp.zeros(3)}


def loss_fn(params: dict[str, jnp.ndarray], x: jnp.ndarray) -> jnp.ndarray:
    return jnp.mean((x @ params["w"] - 1.0) ** 2)


schedule = optfn.schedules.noam(512, 4000)
tx = optfn.adam(
    schedule,
    grad_clip=optfn.clip_by_global_norm(1.0),
    param_attrs={"w": optfn.ParamAttr(learning_rate=0.5)},
)
state, history = optfn.minimize(loss_fn, tx, params, [jnp.eye(3)] * 3, progress=False)
step: optfn.TrainStep = optfn.make_train_step(loss_fn, tx)
state, metrics = step(step.init(params), jnp.eye(3))
losses: np.ndarray = history["loss"]
plan: MemoryPlan = plan_memory(tx, params, data_mesh(1))
total: int = plan.params + plan.state
text: str = optfn.summary(tx, params)


def mistakes() -> None:
    optfn.adam(beta1=0.9)  # type: ignore[call-arg]
    optfn.adam(1e-3, lazy=[])  # type: ignore[arg-type]
    optfn.ParamAttr(trainable="no")  # type: ignore[arg-type]
    optfn.momentum(0.1)  # type: ignore[call-arg]
    optfn.minimize(loss_fn, tx, params, [], steps="all")  # type: ignore[arg-type]
    print(plan.gradient)  # type: ignore[attr-defined]
    print(optfn.adamm)  # type: ignore[attr-defined]


def another() -> str:
    return history["loss"]  # type: ignore[return-value]
