"""Checks of what other libraries made: models as params, and transformations."""
