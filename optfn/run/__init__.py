"""The training loop, with evaluation, history, logs, progress and checkpoints."""
