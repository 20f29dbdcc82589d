"""The core of operator and trainer: contract, units of models, scaling rules, and the split that survivors repeat.

Inputs and results are plain values, and each result has a reason. Nothing here reads a clock, a file, a socket or a
random number, so the operator and the trainer's surviving workers make the same decisions.
"""
