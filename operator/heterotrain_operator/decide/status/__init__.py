"""The status of a job: counts, progress, conditions and events."""
