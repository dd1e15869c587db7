"""FTRL-Proximal, whose recursion contains the learning rate."""

import math
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from optfn import core
from optfn.core import checks, leafwise, numerics
from optfn.core.checks import Number, Scalar, Schedule
from optfn.core.traits import traits
from optfn.core.types import OptState, Params, PyTree, Stepped, Updates
from optfn.transforms import learning_rate as rates
from optfn.transforms.in_place import run_in_passes
from optfn.transforms.regularization import decay_of_leaves

_NOT_POSITIVE = checks.Range("<= 0 and finite", lambda x: -math.inf < x <= 0)


@traits(link="optimizer")
class FtrlProximalState(NamedTuple):
    """State of `ftrl_proximal`: 8 bytes per parameter, the step and the rate."""

    rate: rates.RateState
    accumulator: Params
    linear: Params


def ftrl_accumulate(
    g: jax.Array, n: jax.Array, *, rate: Scalar, factor: Scalar
) -> tuple[jax.Array, jax.Array]:
    """Return (g, n + g²) with g = 0 where g is finite and n + g² overflows, and with n unchanged
    where rate·factor is 0."""
    # A finite gradient with an infinite square counts as 0: σ would be infinite.
    counted = jnp.where(jnp.isfinite(g) & jnp.isinf(n + jnp.square(g)), 0, g)
    is_zero = numerics.scalar(rate * factor, g) == 0
    return counted, jnp.where(is_zero, n, n + jnp.square(counted))


def ftrl_linear(
    g: jax.Array,
    n: jax.Array,
    z: jax.Array,
    p: jax.Array,
    *,
    rate: Scalar,
    factor: Scalar,
    lr_power: Scalar,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return (g, n, z') with z' = z + g − σ·p, or z' = z where rate·factor is 0, and with g and n
    unchanged."""
    lr = numerics.scalar(rate * factor, g)
    is_zero = lr == 0
    counted, new_n = ftrl_accumulate(g, n, rate=rate, factor=factor)
    root, new_root = numerics.power(n, -lr_power), numerics.power(new_n, -lr_power)
    sigma = (new_root - root) / jnp.where(is_zero, 1, lr)
    return g, n, jnp.where(is_zero, z, z + counted - sigma * p)


def ftrl_minimiser(
    n: jax.Array,
    z: jax.Array,
    p: jax.Array,
    *,
    rate: Scalar,
    factor: Scalar,
    l1: Scalar,
    l2: Scalar,
    lr_power: Scalar,
) -> jax.Array:
    """Return p' − p for the minimiser p' that belongs to n and z, which is 0 where |z| ≤ l1, or
    return 0 where rate·factor is 0."""
    lr = numerics.scalar(rate * factor, z)
    l1, l2 = numerics.scalar(l1, z) + 1e-10, numerics.scalar(l2, z) + 1e-10
    is_zero = lr == 0
    root = numerics.power(n, -lr_power) / jnp.where(is_zero, 1, lr)
    new_p = (l1 * jnp.sign(z) - z) / (root + 2 * l2)
    new_p = jnp.where(jnp.abs(z) <= l1, 0, new_p)  # a comparison with NaN is false: NaN remains
    return jnp.where(is_zero, 0, new_p - p)


def _minimise_leaf(
    g: jax.Array, n: jax.Array, z: jax.Array, p: jax.Array, **scalars: Scalar
) -> tuple[jax.Array, ...]:
    """Return (p' − p, n, z) by `ftrl_minimiser`, with n and z unchanged and without a use of g, as
    a rule for `leafwise.apply`."""
    return ftrl_minimiser(n, z, p, **scalars), n, z


_apply = partial(leafwise.apply, rows="touched")


# The passes over n and z. z' reads the old n, and is computed before n is overwritten.
def _update_linear(n: PyTree, z: PyTree, g: Updates, p: Params, **scalars: Any) -> Any:
    """Return (n, z') with z' by `ftrl_linear` and n unchanged, in the pass that reads the old n."""
    return _apply(ftrl_linear, g, n, z, params=p, **scalars)[1:]


def _accumulate(n: PyTree, z: PyTree, g: Updates, p: Params, **scalars: Any) -> Any:
    """Return (n', z) with n' by `ftrl_accumulate` and z unchanged, in the pass that overwrites
    n."""
    return _apply(ftrl_accumulate, g, n, **scalars)[1], z


@core.transform(needs_params=True)
def ftrl_proximal(
    learning_rate: Number | Schedule,
    *,
    l1: Number = 0.0,
    l2: Number = 0.0,
    lr_power: Number = -0.5,
    lazy: bool = True,
) -> core.Unchecked:
    """Step to the minimiser of the regularized sum of all gradients so far, which is exactly 0
    where |z| ≤ l1, or change nothing where the rate is 0.

        n' = n + g²
        σ = (n'^(−k) − n^(−k))/lr
        z = z + g − σ·p
        p' = (l1·sign(z) − z)/(n'^(−k)/lr + 2·l2) where |z| > l1, else 0
        u = p' − p

    The recursion contains the rate, so no `scale_by_learning_rate` may follow. p' is proportional
    to the rate for the same z, so a rate that rises, as in a warm-up, enlarges the parameters. As
    in fluid, 1e-10 is added to l1 and l2. If lr is 0, p, n and z do not change. A gradient whose
    square overflows counts as 0. An element whose dense gradient has always been 0 becomes 0.

    z', n' and p' are computed in three passes, in this order, because z' reads the old n, and p'
    the new n and z. So a compiled step with donated state updates all three in place.

    Args:
      learning_rate: lr ≥ 0, as in `scale_by_learning_rate`.
      l1: the weight of the penalty on |p|, ≥ 0; it makes parameters exactly zero.
      l2: the weight of the penalty on p², ≥ 0.
      lr_power: k, ≤ 0; −½ divides by the root of n.
      lazy: whether a row-sparse gradient changes only n, z and p of the rows that it touches, as in
        Paddle's sparse operator. If not, it becomes dense, and all rows that have never had a
        gradient become 0. For dense gradients both are the same.

    `update` takes `decay_factors`, factors of l1 and l2 by path, which `ftrl` with `param_attrs`
    passes.

    State: accumulator (n) and linear (z), 8 bytes per parameter, and the rate. Needs params; real
    leaves.

    Source: McMahan et al. 2013, "Ad click prediction", algorithm 1; fluid's FtrlOptimizer. (Paddle
    1.8.5 passes l1 as l2 in Python, which is not repeated here.)
    """
    lr = rates.check_rate(learning_rate)
    l1, l2 = checks.nonnegative("l1", l1), checks.nonnegative("l2", l2)
    lr_power = checks.number("lr_power", lr_power, _NOT_POSITIVE)
    lazy = checks.flag("lazy", lazy)

    def init(params: Params) -> FtrlProximalState:
        return FtrlProximalState(
            rates.init(lr), leafwise.zeros_like(params), leafwise.zeros_like(params)
        )

    def update(updates: Updates, state: OptState, params: Params = None, **extra: Any) -> Stepped:
        rate, rate_state = rates.advance_rate(lr, state.rate)
        # Once for the three passes.
        updates = leafwise.merge_rows(updates) if lazy else leafwise.densify_rows(updates)

        factor = rates.rate_factor(extra.get("rate_factors"), updates)
        at: dict[str, Any] = {"rate": rate, "factor": factor}
        passes = partial(_update_linear, lr_power=lr_power, **at), partial(_accumulate, **at)
        n, z = run_in_passes(passes, (state.accumulator, state.linear), updates, params)
        penalties: dict[str, Any] = {"l1": l1, "l2": l2}
        if (factors := extra.get("decay_factors")) is not None:
            penalties = {
                k: decay_of_leaves(None, x, updates, factors) for k, x in penalties.items()
            }
        minimise = partial(_minimise_leaf, lr_power=lr_power)
        updates = _apply(minimise, updates, n, z, params=params, **at, **penalties)[0]
        return updates, FtrlProximalState(rate_state, n, z)

    return core.Unchecked(init, update, decays=True)
