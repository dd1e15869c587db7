"""The door to programs that XLA on CPU needs; all other platforms run plain expressions.

XLA on CPU makes a pass over memory for each array that a program writes, and keeps in memory what
two of them read. The compilers of TPUs and GPUs make one kernel of several results and reductions,
and compute again what two kernels read; there a loop or a view in rows of another length costs.
"""

from collections.abc import Callable
from typing import Any

import jax

# The platforms that are behind the door; none where a test runs the plain expressions on a CPU.
BEHIND_THE_DOOR = ("cpu",)


def on_cpu(
    cpu: Callable[..., Any],
    plain: Callable[..., Any],
    *arguments: Any,
    also: tuple[str, ...] = (),
) -> Any:
    """Return cpu(*arguments) in a program for a CPU, and plain(*arguments) in any other.

    Both are traced, so a jaxpr has a cond of both; lowered for one platform, nothing of the other
    is left. They give trees of the same shapes and dtypes. `also` names further platforms that are
    behind the door.
    """
    branches = dict.fromkeys((*BEHIND_THE_DOOR, *also), cpu)
    return jax.lax.platform_dependent(*arguments, default=plain, **branches)
