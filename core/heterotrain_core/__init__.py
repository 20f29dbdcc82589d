"""The pure part of heterotrain: contract, performance model, split, goodput, allocation.

Values go in, values with a reason come out. Nothing here reads a clock, a file, a socket or a random number, so that
the operator, the trainer's survivors and the simulator all run the very same decisions.
"""
