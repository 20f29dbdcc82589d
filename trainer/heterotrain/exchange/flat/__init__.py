"""Whole models: buckets of gradients, each summed over all ranks while backward is still running."""
