"""Pipeline parallelism: stages of a model on different devices."""
