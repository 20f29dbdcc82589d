"""The numerics of a step: number format, gradient buckets, compression, BatchNorm, gradient noise, learning rate."""
