"""Locks between test processes of this machine, for what a cluster has once.

``pytest-xdist`` could send such tests to one process by a mark, but that has no effect with pytest 9.2: the group is
lost with the test's changed name.
"""

from __future__ import annotations

import fcntl
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def machine_lock(name: str, *, shared: bool = False) -> Iterator[None]:
    """Hold a lock; with ``shared``, together with others that share it."""
    with Path(tempfile.gettempdir(), f"heterotrain-tests-{name}.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_SH if shared else fcntl.LOCK_EX)
        yield


@contextmanager
def definition_of_jobs(*, alone: bool = False) -> Iterator[None]:
    """Keep the cluster's definition of jobs as it is meanwhile; ``alone`` is for a test that changes it."""
    with machine_lock("definition", shared=not alone):
        yield
