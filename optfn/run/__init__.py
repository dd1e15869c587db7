"""The training loop: evaluation, history, logs, progress and checkpoints."""
