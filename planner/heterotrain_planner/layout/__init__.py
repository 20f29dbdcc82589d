"""Layouts of a model over devices: which devices form a member, what each one holds, and how long a step takes."""
