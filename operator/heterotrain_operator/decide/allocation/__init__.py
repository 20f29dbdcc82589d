"""The allocation over all jobs: which jobs compete for which nodes, their demands, and the workers granted to them."""
