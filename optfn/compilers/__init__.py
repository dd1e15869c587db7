"""Expressions written for compilers, and calls grouped for them."""
