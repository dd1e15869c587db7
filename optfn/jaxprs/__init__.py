"""Functions as lists of equations: what interprets jaxprs, and depends on JAX's representation."""
