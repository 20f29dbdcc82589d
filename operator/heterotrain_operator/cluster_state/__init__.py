"""The observed state of the cluster: small frozen views of jobs, pods and nodes, and the store that holds them."""
