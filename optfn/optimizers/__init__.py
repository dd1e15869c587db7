"""The catalogue of optimizers: each is a chain of transforms."""
