"""Functions that save fewer residuals for their backward, and compute the missing ones again.

This is RecomputeOptimizer of fluid, but as a transformation of the function. Values and gradients
are the same, so any optimizer and any training loop can use the result.
"""

from collections.abc import Callable, Sequence
from typing import Any

from optfn.core import checks
from optfn.loss.recomputation.budget import choose_segmentation
from optfn.loss.recomputation.chain import LayerFn, equal_segments, recompute_chain
from optfn.loss.recomputation.named_segments import recompute_function


def recompute(
    fn: Callable[..., Any] | Sequence[Callable[..., Any]],
    *,
    checkpoints: Sequence[str] | None = None,
    segments: str | int | None = None,
    memory_budget: int | None = None,
    offload: bool = False,
) -> Callable[..., Any]:
    """Return a function with the values and gradients of `fn` that takes less memory and more time,
    because the backward pass runs segments of it again.

    Use it if the activations of a model do not fit in memory. There are two forms, and the
    functions that they return have different signatures:

        f = recompute(fn, checkpoints=names)                    # one function
        f(*args, **kwargs)                                      # as fn itself is called

        f = recompute([f1, …, fn], segments=… | memory_budget=…)    # a chain of functions
        f([params1, …, paramsn], x)                             # fn(paramsn, … f1(params1, x))

    One function is cut at values that it names:

        def model(params, x):
            for p in params:
                x = checkpoint_name(block(p, x), "block")       # of jax.ad_checkpoint
            return head(x)

        recompute(model, checkpoints=("block",))(params, x)

    A chain is cut between its functions, into a number of segments, or so that it fits in memory:

        recompute([block] * len(params), segments="sqrt")(params, x)

    Only the inputs of a segment are saved, not its residuals: in backward, each segment runs again
    from its inputs (`jax.checkpoint`). If the result is a scalar, the loss, the segment after the
    last cut does not run again, because its backward follows at once.

    Args:
      fn: with `checkpoints`, any function, traced as under jit. With `segments` or
        `memory_budget`, a list of functions (params, x) -> x.
      checkpoints: names of values; each value is saved wherever it occurs.
      segments: "sqrt", √n segments with nearly equal numbers of functions; "each", one per
        function; or their number, 1 to n.
      memory_budget: bytes for the temporaries of the gradient, as
        `compiled.memory_analysis().temp_size_in_bytes` counts them. When the function is traced,
        dynamic programming over the sizes of the residuals and the FLOPs of each function finds the
        segments, possibly nested, with the fewest FLOPs, and compiling the gradient checks them.
        The last function should be the loss, so that it is counted.
      offload: with `checkpoints`, whether the named values wait in the pinned memory of the host
        for the backward pass, which fetches them again. Each of them then crosses the link to the
        host twice. Around a layer it works in `optfn.distributed.scan_layers` and `lax.scan`. The
        function is one segment: all but the named values runs again, the loss too.

    Returns:
      With `checkpoints`, a function with the signature of `fn`; otherwise a function
      ([params1, …, paramsn], x) -> x.

    Raises:
      ValueError: not exactly one of the three options is given, or `offload` without names; or
        there are more segments than
        functions. When the result is called: `fn` does not use a name (the message lists those that
        it uses), or the budget cannot be met (the message has the minimum).
      TypeError: an argument is of the wrong kind.

    Source: Chen, Xu, Zhang and Guestrin 2016, arXiv 1604.06174 (√n segments); Beaumont et al.
    2019, arXiv 1911.13214 (the budget: `optfn.loss.recomputation.rotor`).

    >>> import jax, jax.numpy as jnp
    >>> deep = recompute([lambda p, x: jnp.sin(p * x)] * 9, segments="sqrt")
    >>> [round(float(g), 3) for g in jax.grad(deep)([1.0] * 9, 0.5)[:3]]
    [0.206, 0.225, 0.244]
    """
    if not callable(fn) and not isinstance(fn, list | tuple):
        raise TypeError(
            "fn must be a function (with checkpoints) or a list of functions (params, x) -> x "
            f"(with segments or memory_budget); got {fn!r}"
        )
    options = {"checkpoints": checkpoints, "segments": segments, "memory_budget": memory_budget}
    chosen = [name for name, value in options.items() if value is not None]
    if len(chosen) != 1:
        raise ValueError(
            f"pass exactly one of checkpoints, segments and memory_budget; got "
            f"{' and '.join(chosen) or 'none'}"
        )
    if checks.flag("offload", offload) and checkpoints is None:
        raise ValueError(
            "offload=True needs checkpoints: the names of the values that wait on the host"
        )
    if checkpoints is not None:
        return recompute_function(fn, checkpoints, offload=offload)
    fns = _check_functions(fn, chosen[0])
    if segments is not None:
        segmentation = equal_segments(len(fns), segments)
        return recompute_chain(fns, lambda params, x: segmentation)
    budget = checks.count("memory_budget", memory_budget)
    return recompute_chain(fns, choose_segmentation(fns, budget))


def _check_functions(fns: Any, option: str) -> tuple[LayerFn, ...]:
    """Return the functions of a chain as a tuple, or raise a TypeError unless they are a list or
    tuple of one or more functions."""
    if isinstance(fns, list | tuple) and fns and all(map(callable, fns)):
        return tuple(fns)
    raise TypeError(f"fn must be a list of functions (params, x) -> x with {option}; got {fns!r}")
