"""Checkpoints in a store: when they are written, and what a run can be repeated from."""
