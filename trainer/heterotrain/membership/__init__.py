"""Membership: plans of the operator, formations that survivors make by themselves, and what a formation agrees on."""
