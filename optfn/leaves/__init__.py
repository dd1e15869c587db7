"""Leaves of trees (dense, row-sparse, packed or masked), and how rules apply to them."""
