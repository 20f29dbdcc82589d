"""A discrete-event simulator around the operator's own decisions.

Nothing here reads a clock: simulated time is a number, and randomness comes from a generator that the caller seeds. All
results are simulated, and must be labelled as such wherever they are shown.
"""
