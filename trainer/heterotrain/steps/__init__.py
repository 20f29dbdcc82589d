"""The training loop: steps that all ranks commit or none does, and the formations in which they run."""
