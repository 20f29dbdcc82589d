"""Connections between ranks: links that notice a lost peer, one formation's process groups, the step's small all-gather."""
