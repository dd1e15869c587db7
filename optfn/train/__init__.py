"""Around the optimizer: its state, and the step that trains."""
