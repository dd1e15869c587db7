"""The public chain: a leaf that a link freezes is frozen for all links."""

from optfn import core
from optfn.wrappers.attributes import without_frozen

chain = core.record_call(without_frozen(core.chain))
