"""Interpreters of jaxprs: the modules that depend on how JAX represents a traced function."""
