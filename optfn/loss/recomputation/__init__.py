"""Recomputation in the backward pass: named values, chains of functions, memory budgets."""
