"""The allocation over all jobs: which jobs compete for which nodes, what each requests, what each is granted."""
