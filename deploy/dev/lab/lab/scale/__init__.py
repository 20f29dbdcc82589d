"""The operator at scale: a thousand jobs and ten thousand pods on simulated nodes, on a real control plane."""
