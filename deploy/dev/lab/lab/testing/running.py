"""Run a plan: parts in a pool and in lanes, the cluster that some need, and the second try of failed tests."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from lab.cluster import REPOSITORY
from lab.install import OPERATOR_NAMESPACE, this_cluster
from lab.testing import outcomes, parts
from lab.testing.lanes import Programs
from lab.testing.outcomes import Ended, Results
from lab.testing.parts import MAKE, Part

NO_TESTS = 5
"""pytest's exit code where all tests of some folders were deselected."""
PLACES = max(2, min(os.cpu_count() or 1, 8))
ACCOUNTS = ("/sys/fs/cgroup/cpuacct/heterotrain/cpuacct.usage", "/sys/fs/cgroup/heterotrain/cpu.stat")
"""Where the kernel adds up the processor time of the emulated cluster, with control groups of version 1 and 2."""


@dataclass(slots=True)
class Span:
    """When a part ran, on the monotonic clock, and what the cluster spent meanwhile."""

    first_s: float
    last_s: float
    cluster_s: float = 0.0


@dataclass(slots=True)
class Runner:
    """Runs parts and keeps what became of them.

    Attributes:
        programs: what runs now.
        arguments: more arguments of pytest.
        spares_heavy: whether checked parts leave out tests that are marked ``heavy``.
        results: by part.
        again: results of second tries.
        spans: by part.
    """

    programs: Programs
    arguments: Sequence[str] = ()
    spares_heavy: bool = False
    results: dict[str, Results] = field(default_factory=dict)
    again: dict[str, Ended] = field(default_factory=dict)
    spans: dict[str, Span] = field(default_factory=dict)
    _cluster: Mapping[str, str] | None = None

    def pool(self, pool: Sequence[Part]) -> None:
        """Run parts, as many programs at a time as there are processors."""
        jobs = [job for part in pool for job in self._jobs(part)]
        self.programs.drain(jobs, at_once=PLACES)

    def lanes(self, lanes: Sequence[Sequence[Part]]) -> None:
        """Run lanes side by side, each part after the other."""
        self.programs.side_by_side([partial(self._lane, lane) for lane in lanes])

    def second_try(self, ran: Sequence[Part]) -> None:
        """Run failed tests of real processes once more, one after the other, with nothing else."""
        for part in ran:
            if part.is_real and (names := outcomes.worth_retrying(self.results.get(part.name, Results()))):
                self.programs.side_by_side([partial(self._again, part, names)])

    def _lane(self, lane: Sequence[Part]) -> None:
        if any(part.on_cluster for part in lane):
            self._start_cluster()
        for part in lane:
            for job in self._jobs(part):
                job()

    def _start_cluster(self) -> None:
        """Start the cluster, without an operator: integration tests run their own, which would act on the same jobs."""
        self.programs.hold_back()
        self.programs.run("programs and images", *MAKE, "images")
        self.programs.go_on()
        self.programs.run("cluster", *MAKE, "cluster-running")
        cluster = this_cluster()
        cluster.run(
            "helm", "uninstall", "heterotrain", "--namespace", OPERATOR_NAMESPACE, "--ignore-not-found", "--wait",
            timeout_s=300,
        )  # fmt: skip
        self._cluster = cluster.environment

    def _jobs(self, part: Part) -> list[Callable[[], None]]:
        """Return the programs of a part, the first of which prepares the others."""
        if part.command:
            return [partial(self._follow, part, partial(self._program, part))]
        chunks = part.chunks or ((files,) if (files := parts.heavy_files(REPOSITORY)) else ())
        names = [part.name] if len(chunks) == 1 else [f"{part.name} {at}" for at in range(1, len(chunks) + 1)]
        return [
            partial(self._follow, part, partial(self._tests, part, name, chunk))
            for name, chunk in zip(names, chunks, strict=True)
        ]

    def _follow(self, part: Part, run: Callable[[], None]) -> None:
        """Run one program and note when it ran and what the cluster spent meanwhile."""
        before_s, began_s = cluster_processor_s(), time.monotonic()
        run()
        span = self.spans.setdefault(part.name, Span(began_s, began_s))
        span.last_s = time.monotonic()
        if part.on_cluster:
            span.cluster_s += max(cluster_processor_s() - before_s, 0.0)

    def _program(self, part: Part) -> None:
        self.programs.run(part.name, *part.command, yields=True, may_fail=True)

    def _tests(self, part: Part, name: str, chunk: Sequence[str]) -> None:
        for target in part.prepared_by:
            self.programs.run(target, *MAKE, target)
        marks = "not heavy" if self.spares_heavy and part in parts.CHECKED else part.marks
        found = self._pytest(
            part, name, *(["-m", marks] if marks else []), *part.arguments, *self.arguments,
            *(["-n", str(part.processes)] if part.processes > 1 else []),
            *(f"--ignore={folder}" for folder in parts.left_out(chunk)), *chunk,
        )  # fmt: skip
        self.results[part.name] = self.results.get(part.name, Results()) + found

    def _again(self, part: Part, names: Sequence[str]) -> None:
        found = self._pytest(part, f"{part.name} again", *self.arguments, *names)
        self.again |= found.tests

    def _pytest(self, part: Part, name: str, *arguments: str) -> Results:
        path = self._file(name)
        environment = {**(self._cluster or os.environ)}
        if part.packages:
            environment["PYTHONPATH"] = str(Path(sys.prefix) / part.packages)
        code = self.programs.run(
            name, sys.executable, "-m", "pytest", "-q", f"--results={path}", *arguments,
            environment=environment, yields=True, may_fail=True, fine=(0, NO_TESTS),
        )  # fmt: skip
        found = outcomes.read(path)
        if code in {0, NO_TESTS} or found.failed:
            return found
        broken = Ended(f"{name}: pytest ended with code {code}", "failed", 0.0, 0.0)
        return found + Results({broken.name: broken})

    def progress(self, name: str) -> str:
        """Return how many tests of a program have ended."""
        found = outcomes.read(self._file(name))
        failed = f", {len(found.failed)} failed" if found.failed else ""
        return f"{name} {len(found.tests)} of {found.expected}{failed}" if found.expected else name

    def _file(self, name: str) -> Path:
        return self.programs.folder / f"{name.replace(' ', '-')}.jsonl"


def cluster_processor_s() -> float:
    """Return the processor seconds that the emulated cluster's nodes and pods have spent, or 0 without one."""
    nanoseconds, statistics = map(Path, ACCOUNTS)
    with suppress(OSError):
        return int(nanoseconds.read_text()) / 1e9
    with suppress(OSError):
        lines = dict(line.split() for line in statistics.read_text().splitlines())
        return int(lines["usage_usec"]) / 1e6
    return 0.0


def local_cluster(command: str) -> int:
    """Run a command of the emulated cluster without its output and return its exit code."""
    silent = subprocess.DEVNULL
    return subprocess.run(
        [sys.executable, "-m", "local_cluster", command],
        env={**os.environ, "PYTHONPATH": str(REPOSITORY / "deploy/dev/cluster")},
        stdout=silent, stderr=silent, check=False,
    ).returncode  # fmt: skip
