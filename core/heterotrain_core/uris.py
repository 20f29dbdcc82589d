"""Credentials in URIs: recognized, so that a job with such a URI is refused, and hidden in every message.

A URI is copied into pod specs, logs, the status and the record next to a checkpoint. All of these have more readers
than a credential may have.
"""

from __future__ import annotations

import re

PASSWORD = "://[^/@]*:(@|[0-9]+@|([^0-9@]|[0-9]+[^0-9/@])[^@]*@)"  # noqa: S105  # a pattern
"""Matches ``user:password@`` after the protocol, also where the password contains a slash, as keys of S3 may.

A port, as in ``ftp://host:21/folder``, is none. A user alone is none either: Azure's URIs name the container there.
Python, CEL and JSON schema read the expression alike."""
QUERY = "[?]"
"""A folder of checkpoints needs no query, and tokens and signatures travel in one."""
_HIDDEN = (
    (re.compile(r"(?<=://)[^/@\s'\"]*:(?:@|[0-9]+@|(?:[^0-9@\s'\"]|[0-9]+[^0-9/@\s'\"])[^@\s'\"]*@)"), "***@"),
    (re.compile(r"(://[^?\s'\"]*\?)[^\s'\"]+"), r"\1***"),
)


def job_folder(uri: str, *, namespace: str, name: str, uid: str) -> str:
    """Return the URI of a job's own folder below that of its checkpoints; names alone may be used again."""
    return f"{uri.rstrip('/')}/{namespace}-{name}-{uid}"


def has_credentials(uri: str) -> bool:
    """Return whether a URI contains a password, or a query, which may contain one."""
    return re.search(PASSWORD, uri) is not None or re.search(QUERY, uri) is not None


def redacted(text: str) -> str:
    """Return a text with ``***`` in place of passwords and queries of all URIs in it."""
    if "://" not in text:
        return text
    for pattern, instead in _HIDDEN:
        text = pattern.sub(instead, text)
    return text
