"""Shards of unequal size, in one pod or several."""
