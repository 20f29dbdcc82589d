"""The training state, as tensors and bytes, and its transfer to ranks that lack it."""
