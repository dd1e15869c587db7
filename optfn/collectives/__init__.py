"""Collectives over the axes of a mesh, and what they are made of."""
