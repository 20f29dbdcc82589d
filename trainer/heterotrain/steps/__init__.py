"""The loop: one step after the other, each committed by all ranks or by none."""
