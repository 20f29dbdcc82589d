"""Scenarios on simulated clusters: policies side by side, as tables and pictures."""
