"""Grants: what the allocation lets one job use, and the part of it that the job's status keeps."""
