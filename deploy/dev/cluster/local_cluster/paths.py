"""Paths: the cache for everything that is built once, and the running cluster's folder below it."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Final

REPOSITORY: Final = Path(__file__).resolve().parents[4]
LOCAL: Final = REPOSITORY / "deploy/dev/cluster"


def cache() -> Path:
    """Return the folder of everything that can be rebuilt, so it may be deleted."""
    if explicit := os.environ.get("HETEROTRAIN_CACHE"):
        return Path(explicit).resolve()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache").resolve() / "heterotrain"


def programs() -> Path:
    """Return the folder of the cluster's programs, for PATH."""
    return cache() / "bin"


def cluster() -> Path:
    """Return the folder of the running cluster, on the same file system as the template because it links its files."""
    return cache() / "cluster"


def kubeconfig() -> Path:
    """Return the path of the administrator's kubeconfig."""
    return cluster() / "kubeconfig"


def digest(paths: Iterable[Path], *also: str) -> str:
    """Return a short hash of the names and contents of files and folders, and of additional words.

    Bytecode is left out.
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
