"""Checks of a machine, and of the network between machines, before a training: ``python -m heterotrain.preflight``."""
