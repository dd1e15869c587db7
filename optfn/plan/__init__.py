"""Seconds of a compiled step, read from its schedule."""
