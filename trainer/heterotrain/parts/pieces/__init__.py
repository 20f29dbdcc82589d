"""Sums of gradients of divided models."""
