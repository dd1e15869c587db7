"""The loss of a step: its mean, its one trace, its gradients, on one device or on many.

`loss_program.py` traces the loss and reads its lookups, scans and divided params; `objective.py`
makes a function of it that returns values and gradients. `jaxprs/` reads and rewrites equations,
and `recomputation/` runs equations again in the backward pass.
"""
