"""Leaves of trees, dense, row-sparse, packed or masked, and how a rule meets them."""
