"""Functions as lists of equations: pullbacks, and recomputation in the backward pass."""
