"""What goes around a rule: attributes of parameters, averages, precision, accumulation, guards."""
