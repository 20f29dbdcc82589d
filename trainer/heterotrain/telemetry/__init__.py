"""A rank's output: metrics for scrapes, curves for TensorBoard, tagged log lines, and the budget for measuring."""
