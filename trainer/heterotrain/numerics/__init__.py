"""How a step's numbers are computed: format, buckets, wire, statistics, noise, learning rate."""
