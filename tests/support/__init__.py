"""Helpers of several test tiers: fake and real clusters, simulated training, simulated telemetry."""
