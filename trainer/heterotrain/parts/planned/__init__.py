"""Parts that plans assign: stages or unequal shards."""
