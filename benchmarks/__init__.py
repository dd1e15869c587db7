"""Benchmarks: one script per question, each beside its peer in one process."""
