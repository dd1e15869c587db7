"""The bytes of a training step on each device, as `plan_memory` returns them."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

_UNITS = {1: "B", 1e3: "kB", 1e6: "MB", 1e9: "GB"}


class MemoryPlan(NamedTuple):
    """Bytes of a training step on each device.

    params: bytes of the parameters.
    state: bytes of the optimizer's state, without those on the host.
    gradients: bytes of the gradient that each worker computes, before it is reduced. The gradient
      of a leaf that the update does not read, such as a frozen one, is neither computed nor sent.
      With "params" and `loss_fn`, a leaf that only scans take counts one layer before it is
      reduced, and the shard of all layers; without `loss_fn`, all layers.
    sent: bytes that each device sends in a call (a step, or a round of local steps), in a ring. It
      counts means, rows of tables, and the packets that a transform exchanges itself, in its last
      phase, and the matrices that products of an update need whole. A transform that does not
      declare their bytes (`optfn.mesh.layout.traffic`) counts as a mean. It does not count bytes
      sent between the stages of a pipeline.
    gathered_in_update: the paths of divided matrices that the optimizer treats whole, as `muon`
      does. The update sends several times the bytes of each such leaf, and nothing if
      `sharded(..., whole=)` names it.
    gathered_whole: with "params" and `loss_fn`, the line of your program that needs a divided leaf
      as a whole, by the path of the leaf; the operation where no line is known. A leaf that only
      scans take has none.
    host: with `state_memory`, bytes of the optimizer's state in the memory of the host, of each
      device.
    host_link_bytes: bytes that a call moves between a device and its host, in both directions
      together. Bytes that an update reads twice count twice.
    host_seconds: their time over the link, one direction at a time, while nothing else runs; None
      if the speed of the link is not known.

    `kept` is a property: the bytes of params and state.
    """

    params: int
    state: int
    gradients: int
    sent: int
    gathered_in_update: tuple[str, ...] = ()
    gathered_whole: Mapping[str, str] = MappingProxyType({})
    host: int = 0
    host_link_bytes: int = 0
    host_seconds: float | None = None

    @property
    def kept(self) -> int:
        """The bytes that each device keeps between steps: params and state."""
        return self.params + self.state

    def __repr__(self) -> str:
        """Return the bytes in one unit, the largest that leaves a number of at least 1."""
        names = ["params", "state", "kept", "gradients", "sent"]
        names += ["host", "host_link_bytes"] if self.host else []
        numbers = {name: getattr(self, name) for name in names}
        unit = max(x for x in _UNITS if x <= max(1, *numbers.values()))
        words = [f"{name}={x / unit:.3g} {_UNITS[unit]}" for name, x in numbers.items()]
        if self.host_seconds is not None:
            words.append(f"host_seconds={self.host_seconds:.3g}")
        if self.gathered_in_update:
            words.append(f"gathered_in_update={self.gathered_in_update}")
        if self.gathered_whole:
            words.append(f"gathered_whole={dict(self.gathered_whole)}")
        return f"MemoryPlan({', '.join(words)})"
