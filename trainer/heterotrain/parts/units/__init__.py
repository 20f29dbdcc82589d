"""The units of a model: its layers, their initial values, and their random numbers."""
