"""Examples that train real models: `make demo`, or `python -m examples.demo`."""
