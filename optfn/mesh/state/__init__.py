"""The state of an optimizer on the workers of a mesh: names, per-worker arrays, placement."""
