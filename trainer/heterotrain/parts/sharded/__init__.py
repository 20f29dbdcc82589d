"""A model that ``fully_shard`` divides among the ranks of a worker."""
