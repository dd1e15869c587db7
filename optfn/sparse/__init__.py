"""Row-sparse gradients of embedding tables."""

from optfn.leaves.rows import Rows
from optfn.sparse.gradient import Table, densify, value_and_grad

__all__ = ["Rows", "Table", "densify", "value_and_grad"]
