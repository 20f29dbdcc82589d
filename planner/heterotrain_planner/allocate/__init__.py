"""The workers that each job should have: jobs and pools in, grants with reasons out."""
