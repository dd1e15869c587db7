"""Wrappers of optimizers: attributes of parameters, averages, precision, accumulation, guards."""
