"""A check that a compiled step overwrites its state and copies no large array."""

import math
import re
from typing import Any

from optfn.core import checks
from optfn.train.state import TrainState
from optfn.train.step import TrainStep

# copy-start begins an asynchronous copy.
_COPY = re.compile(r"= (\w+)\[([\d,]*)\]\S* (?:copy|copy-start)\((.*)")
_TYPE = re.compile(r"\w+\[([\d,]*)\]")
_DONATED = re.compile(r"\((\d+), \{[\d, ]*\}")
_NAME = re.compile(r'op_name="([^"]*)"')


def assert_in_place(step: Any, *args: Any, min_size: int = 4096) -> None:
    """Compile a step, and raise an AssertionError unless it overwrites donated arguments and copies
    no array of the size of one.

    Use it when you write a step yourself. JAX pairs donated arguments with results of the same
    shape in order. If the order differs, or if the loss reads parameters after they are
    overwritten, XLA copies whole arrays, and the step takes up to four times as long.

    Args:
      step: a TrainStep, or a function from `jax.jit(..., donate_argnums=...)`.
      *args: the arguments of the step, arrays or ShapeDtypeStructs. The step is compiled, not run.
      min_size: copies of arrays with fewer elements are ignored; ≥ 1. So are copies of arrays that
        have another number of elements than each donated array: values inside of the step.

    Raises:
      AssertionError: nothing is donated, or arrays are copied; the error lists them.
      TypeError: `step` cannot be lowered, or it is a TrainStep and `args` do not begin with a
        TrainState.

    >>> import jax.numpy as jnp, optfn
    >>> step = optfn.make_train_step(lambda p, x: jnp.sum((p - x) ** 2), optfn.adam(0.1))
    >>> optfn.assert_in_place(step, step.init(jnp.zeros(10_000)), jnp.ones(10_000))
    """
    function = step.compiled if isinstance(step, TrainStep) else step
    if not hasattr(function, "lower"):
        raise TypeError(
            "step must be a TrainStep or a function from jax.jit, since it has to be lowered; "
            f"got {checks.show(step)}"
        )
    if isinstance(step, TrainStep):
        if not isinstance(args[0] if args else None, TrainState):
            raise TypeError(
                "the arguments of a TrainStep are (state, batch), and the state is a TrainState "
                f"such as step.init(params); got {', '.join(map(checks.show, args)) or 'none'}"
            )
        args = step.list_arguments(*args)
    compiled = function.lower(*args).compile()
    memory = compiled.memory_analysis()
    # Some backends have no analysis; then only the copies are checked.
    if memory is not None and not memory.alias_size_in_bytes:
        raise AssertionError(
            "the step overwrites nothing: no argument is donated (jax.jit(..., donate_argnums=0)), "
            "or no donated argument has the shape and dtype of a result"
        )
    # Other copies are of values inside of the step, such as transposed activations.
    text = compiled.as_text()
    donated = _find_donated_sizes(text)
    copies = []
    for dtype, shape, rest in _COPY.findall(text):
        sizes = shape.split(",") if shape else []  # a scalar has no sizes
        size = math.prod(map(int, sizes))
        if size >= min_size and size in donated:
            name = _NAME.search(rest)
            copies.append(f"{dtype}[{shape}]" + (f" in {name.group(1)}" if name else ""))
    if copies:
        raise AssertionError(
            f"the step copies {len(copies)} arrays of {min_size} elements or more: "
            + ", ".join(copies[:10])
            + (", …" if len(copies) > 10 else "")
            + ". Donate params and state, and return them in the order of the arguments"
        )


def _find_donated_sizes(text: str) -> set[int]:
    """Return the numbers of elements that a device has of the donated arguments.

    Args:
      text: the compiled program. Its first line has the types of its parameters, and which of them
        are donated. JAX's list has parameters too that the program does not read.
    """
    head = text.partition("\n")[0]
    types = head.partition("entry_computation_layout={(")[2].partition(")->")[0]
    shapes = [sizes.split(",") if sizes else [] for sizes in _TYPE.findall(types)]
    donated = _DONATED.findall(head.partition("entry_computation_layout=")[0])
    return {math.prod(map(int, shapes[int(number)])) for number in donated}
