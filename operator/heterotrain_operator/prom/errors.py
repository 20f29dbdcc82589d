"""What can go wrong between us and Prometheus.

PromError
├── PromUnavailable   it can't be reached, refuses us, or does not answer in time
└── PromBadAnswer     it answers with something that is no answer
"""

from __future__ import annotations


class PromError(Exception):
    """Telemetry could not be read; the text is one sentence for people."""

    reason = "Unavailable"


class PromUnavailable(PromError):  # noqa: N818  # reads like what it says
    """Prometheus can't be reached, refuses us, or does not answer in time."""


class PromBadAnswer(PromError):  # noqa: N818  # reads like what it says
    """Prometheus answers with something that is no answer."""

    reason = "BadAnswer"
