"""Arrays that hold several tensors: packed buffers, stacked layers, and their tensors."""
