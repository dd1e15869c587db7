"""The transforms of which optimizers are chains: regularization, clipping, moments, scaling."""
