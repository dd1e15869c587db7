"""The links of optimizers' chains: regularization, clipping, moments, scaling."""
