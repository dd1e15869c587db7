"""Benchmarks: one script per question, which measures both sides in one process."""
