"""Time and cost of a batch or of a whole job, before anything runs."""
