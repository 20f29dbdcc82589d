"""The Kubernetes objects of a job: pods, Service, PodDisruptionBudget and the ConfigMap of the plan."""
