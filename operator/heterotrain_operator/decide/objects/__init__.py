"""The Kubernetes objects of a job: pods, PodDisruptionBudget and the ConfigMap of the plan."""
