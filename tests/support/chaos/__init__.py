"""Seeded fault scenarios for the operator: real operator code, a simulated cluster, and hours of virtual time.

``api_server`` keeps objects as Kubernetes does, ``connection`` is the faulty network in front of it, ``machines`` are
scheduler, kubelets and controllers, ``training`` is what runs in the pods, ``telemetry`` is Prometheus, ``replica`` is
one operator process, ``faults`` are the faults, and ``history`` draws, plays and judges one history.
"""
