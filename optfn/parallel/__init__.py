"""Meshes, state that belongs to single workers, and the data-parallel step."""
