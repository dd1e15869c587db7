"""Data parallelism: layouts on a mesh, means over workers, bytes sent."""
