"""Files with the credentials of stores, which others renew: the kubelet in a mounted Secret, for example.

Clients of stores read such a file once. Whoever keeps a connection for long compares the version and connects again.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Final

FILES: Final[Mapping[str, str]] = {
    "AWS_SHARED_CREDENTIALS_FILE": "~/.aws/credentials",
    "AWS_CONFIG_FILE": "~/.aws/config",
    "GOOGLE_APPLICATION_CREDENTIALS": "~/.config/gcloud/application_default_credentials.json",
}
"""Variables of the vendors' clients that name such a file, and the file where the variable is not set."""

Version = tuple[tuple[int, int, int] | None, ...]


def version(environ: Mapping[str, str] = os.environ) -> Version:
    """Return a value that changes when one of the files is written or replaced; ``None`` stands for no file."""
    return tuple(_version_of(Path(environ.get(name) or usual)) for name, usual in FILES.items())


def _version_of(path: Path) -> tuple[int, int, int] | None:
    try:
        found = path.expanduser().stat()
    except (OSError, RuntimeError):  # there is none, or no home
        return None
    return found.st_ino, found.st_mtime_ns, found.st_size
