"""A step before it runs: memory and traffic from its trace, seconds from its compiled schedule."""
