"""Collectives over the axes of a mesh.

`axes` and `mesh` say what JAX knows of a mesh, `devices` who takes part. `means`, `gathers` and
`packets` (compressed) are the collectives, which `torus` runs dimension by dimension. The layers of
a tensor-parallel model have `tensor_parallel`.
"""
