"""One branch of the machine's control groups per node: in every hierarchy of version 1, or in the only one of 2."""

from __future__ import annotations

import os
from pathlib import Path

from local_cluster.process import Problem, wait_until

ROOT = Path("/sys/fs/cgroup")
BRANCH = "heterotrain"
SHARES_PER_NODE = 1024


def is_version_2() -> bool:
    """Return whether the machine has the unified hierarchy only."""
    return (ROOT / "cgroup.controllers").exists()


def hierarchies() -> list[Path]:
    """Return the top folder of each hierarchy.

    They include the hierarchy that only names services, and the version 2 hierarchy of a hybrid machine.
    """
    if is_version_2():
        return [ROOT]
    # "cpu" and "cpu,cpuacct" may be links to one hierarchy: one of them is enough.
    return sorted({path.resolve() for path in ROOT.iterdir() if path.is_dir()})


def create_branch(node: str) -> str:
    """Create the node's branch and return its path in each hierarchy, in kubelet's form."""
    for top in hierarchies():
        _branch(top / BRANCH)
        _branch(top / BRANCH / node)
    if (shares := ROOT / "cpu" / BRANCH / "cpu.shares").exists():
        # With the default, all nodes together would get no more CPU time than one other process of the machine.
        shares.write_text(str(SHARES_PER_NODE * len([path for path in shares.parent.iterdir() if path.is_dir()])))
    return f"/{BRANCH}/{node}"


def _branch(path: Path) -> None:
    path.mkdir(exist_ok=True)
    for name in ("cpuset.cpus", "cpuset.mems"):
        # In version 1 a new cpuset is empty, and nothing can run in it.
        own, parent = path / name, path.parent / name
        if not is_version_2() and own.exists() and not own.read_text().strip():
            own.write_text(parent.read_text())
    if is_version_2() and path.name != BRANCH:
        for folder in (path.parent.parent, path.parent, path):
            available = set((folder / "cgroup.controllers").read_text().split())
            enabled = available & {"cpu", "cpuset", "memory", "pids", "io", "hugetlb"}
            (folder / "cgroup.subtree_control").write_text(" ".join(f"+{name}" for name in sorted(enabled)))


def remove_branches() -> None:
    """Remove the branches of all nodes; every process in them must have ended before."""
    for top in hierarchies():
        trunk = top / BRANCH
        for folder, _, _ in os.walk(trunk, topdown=False):
            _remove(Path(folder))


def _remove(folder: Path) -> None:
    def is_gone() -> bool:
        try:
            folder.rmdir()
        except FileNotFoundError:
            return True
        except OSError:  # busy for some milliseconds while the kernel removes the last process
            return False
        return True

    try:
        wait_until(is_gone, f"{folder} to be empty", timeout_s=10, every_s=0.01)
    except Problem as error:
        raise Problem(f"{folder} still holds processes: {(folder / 'cgroup.procs').read_text().split()}") from error
