"""The check of `master_weights` that params are their masters, rounded.

If a link behind the masters changes the update, or a program sets params by hand, params and
masters part. The next update would then pull params back to masters that never were theirs, and the
run would silently train wrongly.

A run whose updates are added as `apply_updates` adds them is never accused. Let p be the parameter
before the update, M the master that the optimizer wants, and ⊕ and ⊖ sum and difference, rounded to
the dtype of the master. `master_weights` keeps

    R = p ⊕ (M ⊖ p)
    M′ = M if round(R) = round(M), else R
    u = M′ ⊖ p,  and the parameter becomes p′ = round(p ⊕ u)

If M′ = M, then p ⊕ u = R, so p′ = round(M′). If M′ = R, then p ⊕ (R ⊖ p) = R, so p′ = round(M′)
too: R − p has no rounding error where R is within a factor of 2 of p, nor where M ⊖ p cancels most
of p, and elsewhere its error is below half a unit of the last place of R. So the next update
compares a master with its rounding. The second case is rare, but a long run has it: where M is far
smaller than p, as at a crossing of zero, M ⊖ p is rounded to 2⁻²⁵ of p, and no update reaches M.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from optfn.core import checks, tree
from optfn.core.types import Params
from optfn.leaves import contents
from optfn.mesh.compilers import xla

MOST_ENTRIES = 1024


def sample(x: jax.Array) -> jax.Array:
    """Return at most 1,024 entries of the first row of an array, every s-th with s = ⌈length/1024⌉,
    or a scalar unchanged.

    Where devices divide x, each takes these entries from its shard: XLA would send whole shards for
    entries side by side, and for a row that is not the first one.
    """
    if not x.ndim:
        return x
    stride = max(1, -(-x.shape[-1] // MOST_ENTRIES))
    return x[(*(slice(1) for _ in x.shape[:-1]), slice(None, None, stride))]


def is_rounded(p: jax.Array, master: jax.Array) -> jax.Array:
    """Tell for each entry whether p is its master rounded, within half a unit of p's last place,
    which counts as true if either is NaN or p is ±∞.

    The half has a margin of 3 %, for loops that round the update before they add it. NaN and ∞
    come from the update, and are no change from outside.
    """
    info, wide = jnp.finfo(p.dtype), p.astype(master.dtype)
    # XLA may flush subnormal numbers of either dtype to 0, so the unit is a normal number.
    least = max(info.smallest_normal, float(jnp.finfo(wide.dtype).smallest_normal) / info.eps)
    unit = float(info.eps) * jnp.maximum(jnp.abs(wide), float(least))
    return ~(jnp.abs(master - wide) > 0.516 * unit)


def first_moved(masters: Params, params: Params) -> jax.Array:
    """Find the first leaf that is not its master rounded, and return as int32 1 + its index among
    the leaves with a master, or 0 if there is none.

    Of each leaf, the entries of `sample` are compared.
    """
    pairs = [(p, x) for _, x, p in tree.items(masters, params) if not tree.is_masked(x)]
    moved = [jnp.any(~is_rounded(sample(p), sample(x))) for p, x in pairs]
    if not moved:
        return jnp.zeros((), jnp.int32)
    flags = jnp.stack(moved)
    return jnp.where(jnp.any(flags), 1 + jnp.argmax(flags), 0).astype(jnp.int32)


def error_of_moved(masters: Params, number: int) -> ValueError:
    """Return, without raising it, the ValueError that names the moved leaf, which is leaf `number`,
    counted from 1, of those with a master."""
    return _error(_names(masters), number)


def _names(masters: Params) -> list[str]:
    """Return the path of each leaf that has a master, or of a packed buffer one text that lists the
    paths in it."""
    pairs = zip(contents.leaf_names(masters), tree.leaves(masters), strict=True)
    return [tree.list_names(names) for names, x in pairs if not tree.is_masked(x)]


def _error(names: list[str], number: int) -> ValueError:
    """Return the ValueError that leaf `number`, counted from 1, of these names is not its master
    rounded, with the ways out."""
    return ValueError(
        f"master_weights: {names[number - 1]} is not its master, rounded, so something besides the "
        "update changed this parameter. If a link behind the masters changes the update, "
        "put it inside: master_weights(chain(…)), with the optimizer without multi_precision. If "
        "you set params by hand, make a new state by init, or keep masters as remainders, "
        "multi_precision=32, which follow your change. If a loop of your own adds the update, add "
        "it as optfn.apply_updates does, in the dtype of the update"
    )


def raise_if_moved(masters: Params, number: jax.Array) -> None:
    """Raise a ValueError that names the moved leaf if `number` is not 0, also from a jitted program
    on a CPU, but not from one for a TPU or GPU.

    `number` counts the leaves with a master from 1, and is 0 if no leaf moved.

    Programs for TPUs and GPUs have no such call of the host: a TPU cannot be stopped by an error of
    one, and a GPU would wait for the host in each step. There the number waits in the state until
    `TrainStep` or `metrics` reads it.
    """
    names = _names(masters)

    def stop(number: Any) -> None:
        if number:
            raise _error(names, int(number))

    def call_host(number: jax.Array) -> jax.Array:
        lax.cond(number > 0, lambda x: jax.debug.callback(stop, x), lambda x: None, number)
        return number

    if checks.is_traced(number):
        xla.call_for_platform(call_host, lambda number: number, number)
    else:
        stop(number)
