"""Parts: what a rank holds of the model, and how it computes with that."""
