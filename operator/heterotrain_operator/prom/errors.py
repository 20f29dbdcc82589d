"""Errors of reading from Prometheus.

PromError
├── PromUnavailable   it can't be reached, denies access, or does not answer in time
└── PromBadAnswer     its answer is not a valid answer to the query
"""

from __future__ import annotations


class PromError(Exception):
    """Telemetry could not be read; the text is one sentence for users."""

    reason = "Unavailable"


class PromUnavailable(PromError):  # noqa: N818  # named for the cause
    """Prometheus can't be reached, denies access, or does not answer in time."""


class PromBadAnswer(PromError):  # noqa: N818  # named for the cause
    """The answer of Prometheus is not a valid answer to the query."""

    reason = "InvalidAnswer"
