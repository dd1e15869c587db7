"""Collectives over the axes of a mesh.

`axes` and `mesh` read and set JAX's mesh, its axes and shardings; `devices` says which devices take
part. `means`, `gathers` and `packets` (compressed) are the collectives, and `torus` runs them
dimension by dimension. `tensor_parallel` is for the layers of a tensor-parallel model.
"""
