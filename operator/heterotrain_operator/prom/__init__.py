"""Reading telemetry from Prometheus: queries, answers parsed into counters, HTTP."""
