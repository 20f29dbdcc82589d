"""What is trained, as tensors and bytes, and how it moves to those who lack it."""
