"""Which samples a step takes, where they come from, and the log of those that entered the weights."""
