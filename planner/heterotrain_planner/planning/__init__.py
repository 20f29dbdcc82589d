"""Global batch and shares of a job's plan, decided from its telemetry."""
