"""The workers of a job: their states, the cause of each end, how many fit, and how many each pool should have."""
