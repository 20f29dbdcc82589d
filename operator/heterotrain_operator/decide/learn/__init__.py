"""What is learned of a job from its telemetry, and the part of it that the status keeps for a new operator."""
