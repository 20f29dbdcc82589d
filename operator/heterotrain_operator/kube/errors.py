"""What can go wrong between us and the API server.

KubeError
├── NotFound        the object (or its namespace, or its kind) is not there
├── Conflict        somebody changed the object meanwhile, or it exists already: look again at once
├── Refused         the API server understood and says no (invalid, forbidden, quota): asking again changes nothing
├── Throttled       it asks us to wait ``retry_after_s``
└── Unavailable     it can't be reached, answers with an error of its own, or not in time
"""

from __future__ import annotations


class KubeError(Exception):
    """A call to the API server did not succeed; the text is the server's own message where there is one."""


class NotFound(KubeError):  # noqa: N818 - reads like what it says
    """The object is not there."""


class Conflict(KubeError):  # noqa: N818 - reads like what it says
    """Somebody changed the object meanwhile, or it exists already."""


class Refused(KubeError):  # noqa: N818 - reads like what it says
    """The API server says no. ``status_code`` is 400, 401, 403, 405, 413 or 422."""

    def __init__(self, message: str, *, status_code: int) -> None:
        super().__init__(message)
        self.status_code = status_code


class Throttled(KubeError):  # noqa: N818 - reads like what it says
    """The API server asks us to wait."""

    def __init__(self, message: str, *, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class Unavailable(KubeError):  # noqa: N818 - reads like what it says
    """The API server can't be reached, fails, or does not answer in time."""
