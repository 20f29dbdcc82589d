"""Pure decisions: from views of the cluster to objects, plan, status and events. No IO, clock, logs or randomness."""
