"""The answer of the allocation for one job, and what of it is persisted in the job's status."""
