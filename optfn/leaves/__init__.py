"""Kinds of leaves, and what is done with those that are not plain arrays."""
