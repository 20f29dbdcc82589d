"""A discrete-event simulator around the operator's own decisions: what a cluster would do, before it is paid for.

Nothing here reads a clock: simulated time is a number, and chance comes from a generator that the caller seeds. Whatever
comes out of it is simulated, and has to be called so wherever it is shown.
"""
