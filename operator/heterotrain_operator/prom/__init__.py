"""Telemetry from Prometheus: queries, parsed answers, HTTP."""
