"""Models of flax and equinox, transformations of optax: checks, and errors with a remedy."""
