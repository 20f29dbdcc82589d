"""Everything that the operator and the pods have to agree on, and nothing else.

``keys`` names labels and annotations, ``env`` names environment variables and mount paths, ``metrics`` names the
Prometheus series, ``plan`` and ``codec`` hold the plan, ``config`` the part that is fixed for a pod's life, and
``outcome`` the termination message of a worker.
"""
