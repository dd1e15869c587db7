"""The training step: its loss and gradients, the update, rounds of local steps, its state."""
