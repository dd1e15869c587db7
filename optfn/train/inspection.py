"""A check of a compiled step: it overwrites its state, and copies no large array."""

import math
import re
from typing import Any

from optfn import checks
from optfn.train.step import TrainStep

_COPY = re.compile(r"= (\w+)\[([\d,]*)\]\S* (?:copy|copy-start)\((.*)")
_NAME = re.compile(r'op_name="([^"]*)"')


def assert_in_place(step: Any, *args: Any, min_size: int = 4096) -> None:
    """Check that a compiled step overwrites its donated arguments, and copies no large array.

    JAX pairs donated arguments with results of the same shape in their order; in another order, or
    where the loss reads parameters after they are overwritten, XLA copies whole arrays, and the
    step takes up to four times as long.

    Args:
      step: a TrainStep, or a function from `jax.jit(..., donate_argnums=...)`.
      *args: the arguments of the step, arrays or ShapeDtypeStructs. Nothing is run.
      min_size: the elements from which a copy counts, ≥ 1.

    Raises:
      AssertionError: nothing is donated, or arrays are copied; the error lists them.
      TypeError: `step` cannot be lowered.

    >>> import jax.numpy as jnp, optfn
    >>> step = optfn.make_train_step(lambda p, x: jnp.sum((p - x) ** 2), optfn.adam(0.1))
    >>> optfn.assert_in_place(step, step.init(jnp.zeros(10_000)), jnp.ones(10_000))
    """
    function = step.compiled if isinstance(step, TrainStep) else step
    if not hasattr(function, "lower"):
        raise TypeError(
            "step must be a TrainStep or a jitted function, which can be lowered; "
            f"got {checks.shown(step)}"
        )
    compiled = function.lower(*args).compile()
    memory = compiled.memory_analysis()
    if memory is not None and not memory.alias_size_in_bytes:
        raise AssertionError(
            "the step overwrites nothing: no argument is donated, or none fits a result"
        )
    copies = [
        f"{dtype}[{shape}]" + (f" in {name.group(1)}" if (name := _NAME.search(rest)) else "")
        for dtype, shape, rest in _COPY.findall(compiled.as_text())
        if math.prod(map(int, filter(None, shape.split(",")))) >= min_size
    ]
    if copies:
        raise AssertionError(
            f"the step copies {len(copies)} arrays of {min_size} elements or more: "
            + ", ".join(copies[:10])
            + (", …" if len(copies) > 10 else "")
            + ". Take and return params and state in the same order, donated"
        )
