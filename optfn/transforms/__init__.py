"""The transforms that optimizers are chains of: regularization, clipping, moment, scaling."""
