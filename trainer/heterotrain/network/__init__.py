"""Connections between ranks: heartbeats that detect a lost peer, a formation's process groups, a step's all-gather."""
