"""Data sets, the selection of each step's samples, prefetching, and the log of committed samples."""
