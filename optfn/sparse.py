"""Row-sparse gradients of embedding tables, and hashing into them."""

from optfn.loss.gradient import densify, value_and_grad
from optfn.tables.hashing import hash_ids
from optfn.tables.rows import Rows
from optfn.tables.sharded_table import ShardedTable

__all__ = ["Rows", "ShardedTable", "densify", "hash_ids", "value_and_grad"]
