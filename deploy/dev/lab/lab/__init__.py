"""Runs jobs on a real cluster and measures them: what `make demo`, `make bench` and the end-to-end tests share."""
