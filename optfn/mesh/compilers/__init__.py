"""Expressions written for XLA, each with its reason, and one call for a group of arrays."""
