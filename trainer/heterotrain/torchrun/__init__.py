"""Unchanged scripts for torchrun: their fixed world in the environment, and a restart when the membership changes."""
