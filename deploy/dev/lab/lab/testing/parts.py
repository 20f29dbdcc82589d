"""The parts of the tests: which folders, which programs, and what runs beside what.

This table is the only place that says where a test runs. Each test file below ``tests/`` and ``research/tests/``
belongs to one part.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path, PurePosixPath


class Mode(Enum):
    """What is asked of a run; the value is the word of the command line."""

    CHECK = "check"
    GATE = "gate"
    ALL = "all"


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Tests that go together.

    Attributes:
        name: what ``PART=`` calls it.
        chunks: folders or files for one pytest process each; the processes may run side by side.
        marks: pytest's ``-m``.
        processes: of pytest-xdist; 1 is a plain pytest.
        is_real: real processes run, so a failed test runs once more, alone, at the end.
        on_cluster: needs the running cluster.
        prepared_by: targets of the Makefile that run before.
        arguments: more arguments of pytest.
        packages: folder of packages to import, below the environment.
        command: a program in place of pytest.
    """

    name: str
    chunks: tuple[tuple[str, ...], ...] = ()
    marks: str = ""
    processes: int = 1
    is_real: bool = False
    on_cluster: bool = False
    prepared_by: tuple[str, ...] = ()
    arguments: tuple[str, ...] = ()
    packages: str = ""
    command: tuple[str, ...] = ()

    @property
    def folders(self) -> tuple[str, ...]:
        """All folders and files."""
        return tuple(folder for chunk in self.chunks for folder in chunk)


MAKE = ("make", "--no-print-directory")
TRAINER = "tests/unit/trainer"

# The longest first: the last one to start should be short.
CHECKED = (
    Part(name="trainer", chunks=((TRAINER,), (f"{TRAINER}/checkpoints", f"{TRAINER}/telemetry", f"{TRAINER}/data"))),
    Part(name="planner", chunks=(("tests/unit/planner",), ("tests/unit/planner/allocate",))),
    Part(name="operator", chunks=(("tests/unit/operator", "tests/unit/skew"), ("tests/shell",))),
    Part(name="lint", command=(*MAKE, "lint")),
    Part(name="cli", chunks=(("tests/unit/cli",),)),
    Part(name="core", chunks=(("tests/unit/core",),)),
    Part(name="docs", chunks=(("tests/unit/docs",),)),
    Part(name="lab", chunks=(("tests/unit/lab",),)),
    Part(name="research", chunks=(("research/tests/decisions",),)),
)
HEAVY = Part(name="heavy", marks="heavy")
"""Tests of the parts above that take seconds of a processor; the files that have the mark are searched for."""
CONNECTIONS = Part(
    name="connections",
    chunks=((f"{TRAINER}/network", f"{TRAINER}/membership", f"{TRAINER}/torchrun"),),
    processes=2,
    is_real=True,
)
"""Unit tests with real connections, threads and processes that wait for each other."""
DISTRIBUTED = Part(name="distributed", chunks=(("tests/distributed",),), processes=2, is_real=True)
PACKAGING = Part(name="packaging", chunks=(("tests/packaging",),))
CLUSTER_TESTS = (
    Part(
        name="integration", chunks=(("tests/integration",),), is_real=True, on_cluster=True, processes=2,
        arguments=("--dist", "loadfile"),
    ),
    Part(
        name="e2e", chunks=(("tests/e2e",),), is_real=True, on_cluster=True, prepared_by=("stores-packages",),
    ),
)  # fmt: skip
OTHERS = (
    Part(name="chaos", command=(*MAKE, "chaos")),
    Part(
        name="stores",
        chunks=(("tests/stores", "tests/unit/trainer/checkpoints/test_checkpoint.py"),),
        prepared_by=("stores-packages",),
        packages="stores",
        arguments=("-k", "not unknown_protocol"),
    ),
    Part(name="guides", chunks=(("tests/guides",),), prepared_by=("guides-packages",)),
    Part(name="comparisons", chunks=(("research/tests/comparisons",),)),
    Part(name="wheel", chunks=(("tests/wheel",),)),
    Part(name="oldest-torch", command=(*MAKE, "oldest-torch")),
    Part(name="coscheduling", chunks=(("tests/coscheduling",),), is_real=True),
    Part(name="kueue", chunks=(("tests/kueue",),), is_real=True),
)
OWN_CLUSTERS = Part(name="cluster", chunks=(("tests/integration/cluster",),), is_real=True)
"""Starts and stops clusters of its own, so none may be running."""
PARTS = (*CHECKED, HEAVY, CONNECTIONS, DISTRIBUTED, PACKAGING, *CLUSTER_TESTS, *OTHERS, OWN_CLUSTERS)


@dataclass(frozen=True, slots=True)
class Plan:
    """What runs, in this order: a pool, two lanes side by side, and the rest one after the other."""

    pool: tuple[Part, ...]
    lanes: tuple[tuple[Part, ...], ...]
    rest: tuple[Part, ...]

    @property
    def parts(self) -> tuple[Part, ...]:
        """All parts."""
        return (*self.pool, *(part for lane in self.lanes for part in lane), *self.rest)


class UnknownPart(ValueError):  # noqa: N818  # its message is for people
    """The command line names a part that there is not, or that this mode does not have."""


def plan(mode: Mode, chosen: Sequence[str] = (), *, own_clusters: bool = False) -> Plan:
    """Return what runs in a mode: everything, or the chosen parts of it.

    The whole check leaves out tests that are marked ``heavy``, and the gate runs those in its first lane. A chosen part
    of the gate is complete. With ``own_clusters`` the whole gate has those tests of the emulated cluster, too.

    Raises:
        UnknownPart: the mode has no such part.
    """
    first: tuple[Part, ...] = (CONNECTIONS, DISTRIBUTED)
    second: tuple[Part, ...] = (PACKAGING, *CLUSTER_TESTS)
    rest: tuple[Part, ...] = ()
    if mode is Mode.CHECK:
        first, second = (), (PACKAGING,) if PACKAGING.name in chosen else ()
    elif mode is Mode.ALL:
        rest = (*OTHERS, OWN_CLUSTERS)
    elif not chosen or HEAVY.name in chosen:
        first = (HEAVY, *first)
        rest = (OWN_CLUSTERS,) if own_clusters and not chosen else ()
    whole = Plan(CHECKED, (first, second), rest)
    if unknown := [name for name in chosen if name not in {part.name for part in whole.parts}]:
        known = ", ".join(part.name for part in whole.parts)
        raise UnknownPart(f"there is no part {unknown[0]!r} here: choose from {known}")

    def keep(parts: Sequence[Part]) -> tuple[Part, ...]:
        return tuple(part for part in parts if not chosen or part.name in chosen)

    return Plan(keep(CHECKED), tuple(filter(None, (keep(first), keep(second)))), keep(rest))


def left_out(folders: Sequence[str]) -> tuple[str, ...]:
    """Return the folders below ``folders`` that other chunks run."""
    every = {folder for part in PARTS for folder in part.folders if not folder.endswith(".py")}
    return tuple(
        sorted(
            folder
            for folder in every - set(folders)
            if any(PurePosixPath(own) in PurePosixPath(folder).parents for own in folders)
        )
    )


def heavy_files(repository: Path) -> tuple[str, ...]:
    """Return the checked parts' files that mark a test as heavy; collecting all files would take a minute."""
    roots = {folder for part in CHECKED for folder in part.folders}
    files = {file for folder in roots for file in (repository / folder).rglob("test_*.py")}
    not_checked = [repository / folder for folder in CONNECTIONS.folders]
    return tuple(
        str(file.relative_to(repository))
        for file in sorted(files)
        if "mark.heavy" in file.read_text() and not any(folder in file.parents for folder in not_checked)
    )
