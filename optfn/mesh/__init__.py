"""The mesh: collectives over its axes, what compilers make of them, layouts, states on it."""
