"""Data parallelism: layouts on a mesh, means over workers, plans of memory."""
