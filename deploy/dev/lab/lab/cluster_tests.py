"""Whether the emulated cluster's own tests are due: a file of the cluster has changed since they passed here."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from local_cluster import lifecycle, paths

from lab.cluster import REPOSITORY

FOLDER = REPOSITORY / "tests/integration/cluster"
PARTS = (paths.LOCAL, lifecycle.CONFIGURATION, FOLDER)


def are_due(parts: Iterable[Path] = PARTS) -> bool:
    """Return whether the tests have not passed with these files on this machine."""
    return not _mark().exists() or _mark().read_text() != paths.digest(parts)


def passed(parts: Iterable[Path] = PARTS) -> None:
    """Note that the tests have passed with these files."""
    _mark().parent.mkdir(parents=True, exist_ok=True)
    _mark().write_text(paths.digest(parts))


def _mark() -> Path:
    return paths.cache() / "cluster-tests-passed"
