"""The numbers of a step: format, BatchNorm, gradient noise, learning rate."""
