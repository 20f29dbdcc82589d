"""How one global batch is divided: the least step time that floors, caps and memory allow, exact to the last sample."""
