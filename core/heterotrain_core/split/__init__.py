"""Division of one global batch: the least step time that floors, caps and memory allow, exact to the last sample."""
