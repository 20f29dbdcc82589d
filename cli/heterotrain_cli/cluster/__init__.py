"""Commands for jobs on a cluster."""
