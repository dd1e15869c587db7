"""Row-sparse gradients of embedding tables, and hashing into them."""

from optfn.sparse.gradient import densify, value_and_grad
from optfn.sparse.hashing import hash_ids
from optfn.sparse.rows import Rows
from optfn.sparse.sharded_table import ShardedTable

__all__ = ["Rows", "ShardedTable", "densify", "hash_ids", "value_and_grad"]
