"""The public chain: a leaf that a link freezes is frozen for all links."""

from optfn import core
from optfn.wrappers.attributes import without_frozen

chain = without_frozen(core.chain)
