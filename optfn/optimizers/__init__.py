"""The catalogue: every optimizer is a chain of transforms, assembled in one place."""
