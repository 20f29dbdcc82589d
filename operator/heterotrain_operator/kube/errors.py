"""Errors of calls to the API server.

KubeError
├── NotFound        the object, its namespace or its kind does not exist
├── Conflict        the object has changed meanwhile, or exists already: read it again at once
├── Rejected         the API server refuses the request (invalid, forbidden, quota): repeating it is useless
├── Throttled       the API server requests a pause of ``retry_after_s``
└── Unavailable     the API server can't be reached, fails, or does not answer in time
"""

from __future__ import annotations


class KubeError(Exception):
    """A call to the API server failed; the text is the server's own message, if any."""


class NotFound(KubeError):  # noqa: N818  # an adjective reads better in except clauses
    """The object does not exist."""


class Conflict(KubeError):  # noqa: N818  # an adjective reads better in except clauses
    """The object has changed meanwhile, or exists already."""


class Rejected(KubeError):  # noqa: N818  # an adjective reads better in except clauses
    """The API server refuses the request. ``status_code`` is 400, 401, 403, 405, 413 or 422."""

    def __init__(self, message: str, *, status_code: int) -> None:
        super().__init__(message)
        self.status_code = status_code


class Throttled(KubeError):  # noqa: N818  # an adjective reads better in except clauses
    """The API server requests a pause."""

    def __init__(self, message: str, *, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class Unavailable(KubeError):  # noqa: N818  # an adjective reads better in except clauses
    """The API server can't be reached, fails, or does not answer in time."""
