"""The split whose waiting times are expected, not known."""
