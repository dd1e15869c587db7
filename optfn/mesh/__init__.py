"""The mesh: collectives over its axes, their programs in compilers, layouts, states on it."""
