"""The state of an optimizer on the workers of a mesh: its names, per-worker parts and placement."""
