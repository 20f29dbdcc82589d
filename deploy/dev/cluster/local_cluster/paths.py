"""Where everything lies: what is built once under the cache, what belongs to the running cluster below it."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Final

REPOSITORY: Final = Path(__file__).resolve().parents[4]
LOCAL: Final = REPOSITORY / "deploy/dev/cluster"


def cache() -> Path:
    """Return the folder of everything that may be deleted and is then built again."""
    if explicit := os.environ.get("HETEROTRAIN_CACHE"):
        return Path(explicit).resolve()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache").resolve() / "heterotrain"


def programs() -> Path:
    """Return the folder of the cluster's programs, for PATH."""
    return cache() / "bin"


def cluster() -> Path:
    """Return the folder of the running cluster: on one file system with the template, whose files it shares."""
    return cache() / "cluster"


def kubeconfig() -> Path:
    """Return the file by which the machine's administrator speaks to the cluster."""
    return cluster() / "kubeconfig"


def digest(paths: Iterable[Path], *also: str) -> str:
    """Return a short hash of the names and contents of files and folders, and of some words beside them.

    Bytecode is not part of it.
    """
    summary = hashlib.sha256()
    for word in also:
        summary.update(word.encode() + b"\0")
    for top in paths:
        for path in sorted(top.rglob("*")) if top.is_dir() else [top]:
            if path.is_file() and "__pycache__" not in path.parts:
                summary.update(str(path.relative_to(top.parent)).encode() + b"\0")
                summary.update(hashlib.sha256(path.read_bytes()).digest())
    return summary.hexdigest()[:16]
