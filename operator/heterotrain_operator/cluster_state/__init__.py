"""What is known of the cluster: small frozen views of jobs, pods and nodes, and the store that holds them."""
