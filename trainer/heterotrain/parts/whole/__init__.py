"""The whole model on every rank: data parallelism."""
