"""Wrappers of rules: attributes of parameters, averages, precision, accumulation, guards."""
