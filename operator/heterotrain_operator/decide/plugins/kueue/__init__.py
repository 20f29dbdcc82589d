"""Kueue: queues with quotas."""
