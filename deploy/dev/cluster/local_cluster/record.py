"""The record: parts of the cluster outside its folder, written before their use so that `down` works after a crash."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace

from local_cluster import paths
from local_cluster.process import Problem, ProcessId, say


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """The cluster as last recorded.

    Attributes:
        topology: the text of the configuration that it was started from.
        nodes: first process of each node with power.
        is_up: whether `up` completed.
    """

    topology: str
    nodes: dict[str, ProcessId] = field(default_factory=dict)
    is_up: bool = False

    def with_node(self, name: str, process: ProcessId | None) -> Record:
        """Return the record with ``process`` as the node's first process, or with the node off for ``None``."""
        others = {other: known for other, known in self.nodes.items() if other != name}
        return replace(self, nodes=others if process is None else {**others, name: process})

    @property
    def is_alive(self) -> bool:
        """Whether any node runs."""
        return any(process.is_alive for process in self.nodes.values())


def load() -> Record | None:
    """Return the record, or ``None`` if no cluster has been started."""
    try:
        document = json.loads((paths.cluster() / "record.json").read_text())
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise Problem(
            f"{paths.cluster()}/record.json is damaged: kill the cluster's processes, then delete that folder"
        ) from error
    nodes = {name: ProcessId(**process) for name, process in document.pop("nodes").items()}
    return Record(nodes=nodes, **document)


def save(record: Record) -> None:
    """Write the record atomically."""
    path = paths.cluster() / "record.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_suffix(".draft")
    draft.write_text(json.dumps(asdict(record)))
    draft.replace(path)


def update(change: Callable[[Record], Record]) -> None:
    """Change the record under a lock: nodes start in parallel, and tests cut their power meanwhile.

    Raises:
        Problem: no cluster has been started.
    """
    with (paths.cluster() / "record.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        save(change(present()))


def present() -> Record:
    """Return the record.

    Raises:
        Problem: no cluster has been started.
    """
    known = load()
    if known is None:
        raise Problem("no cluster is running: `make cluster` starts one")
    return known


@contextmanager
def exclusively(what: str) -> Iterator[None]:
    """Lock the cluster against changes by other processes; the kernel releases the lock when this process ends.

    Raises:
        Problem: another process is changing it.
    """
    with _locked("cluster.lock", what) as holder:
        if holder:
            raise Problem(f"{holder} is changing the cluster: wait until it is done")
        yield


@contextmanager
def building(what: str) -> Iterator[None]:
    """Lock programs and images against other builds; wait for a build that is already running."""
    while True:
        with _locked("build.lock", what) as holder:
            if not holder:
                yield
                return
        say(f"    waiting for {holder}, which is already building")
        with (paths.cache() / "build.lock").open() as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)


@contextmanager
def _locked(name: str, what: str) -> Iterator[str]:
    """Take a lock and yield an empty text, or yield a description of its holder."""
    path = paths.cache() / name
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a+") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.seek(0)
            holder = lock.read().strip() or "another process"
        else:
            lock.truncate(0)
            lock.write(f"`{what}` (process {os.getpid()})")
            lock.flush()
            holder = ""
        yield holder
