"""The speed of each member: raw counters become observations, observations a time model."""
