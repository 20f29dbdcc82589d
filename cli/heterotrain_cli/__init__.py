"""Command line for people: forecast and simulate."""
