"""Run all tiers of tests: those on the cluster and, at the same time, lint and unit tests; then the distributed ones.

Tests on the cluster wait for pods, nodes and scrapes most of the time, and unit tests use the processors meanwhile. The
distributed tests run alone: their limits for a silent peer are fractions of a second, which a loaded machine exceeds.
So do the unit tests of connections between ranks (``ALONE``).
Each lane runs its fastest tiers first. All tiers run, also after one has failed, so that one run tells everything that
is wrong; only a cluster that does not start ends the run. ``SIDE_BY_SIDE=no`` runs the lanes one after the other. If no
cluster is running, one is started for the tests.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ET
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

from lab.cluster import REPOSITORY
from lab.install import OPERATOR_NAMESPACE, this_cluster
from lab.lanes import Failed, Programs

MAKE = ("make", "--no-print-directory")
PARALLEL = ("-n", "auto", "--maxprocesses", "4")
ALONE = ("tests/unit/trainer/network", "tests/unit/trainer/membership", "tests/unit/trainer/torchrun")
"""Unit tests with real connections, threads and processes that wait for each other. They take a minute on two
processors, and run with the distributed tests: beside a cluster, any of their threads may be held up for seconds."""


@dataclass(slots=True)
class Tiers:
    """The lanes; ``was_running`` tells whether there was a cluster before."""

    programs: Programs
    was_running: bool = field(default_factory=lambda: local_cluster("status") == 0)

    def without_cluster(self) -> None:
        """Run the tiers that only compute; while programs and images are built, these take what is left."""
        self.programs.run("lint", *MAKE, "lint", yields=True, may_fail=True)
        apart = [f"--ignore={folder}" for folder in ALONE]
        self.tests("unit", *PARALLEL, *apart, "tests/unit", "tests/shell", yields=True)

    def distributed(self) -> None:
        """Run the tests of processes and threads that wait for one another for much of the time."""
        self.tests("distributed", "-n", "2", *ALONE, "tests/distributed")

    def on_cluster(self) -> None:
        """Start the cluster and run the tiers that need it."""
        self.programs.hold_back()
        self.programs.run("programs and images", *MAKE, "images")
        self.programs.go_on()
        self.programs.run("cluster", *MAKE, "cluster-running")
        cluster = this_cluster()
        # Integration tests run their own operators; an operator installed before would act on the same jobs.
        cluster.run(
            "helm", "uninstall", "heterotrain", "--namespace", OPERATOR_NAMESPACE, "--ignore-not-found", "--wait",
            timeout_s=300,
        )  # fmt: skip
        self.tests("packaging", "tests/packaging", environment=cluster.environment)  # with the cluster's helm
        self.tests(
            "integration", "tests/integration", "--ignore", "tests/integration/cluster", environment=cluster.environment
        )
        self.tests("e2e", "tests/e2e", environment=cluster.environment)
        if not self.was_running:
            local_cluster("down")
            self.tests("cluster", "tests/integration/cluster", environment=cluster.environment)

    def tests(
        self, tier: str, *arguments: str, environment: Mapping[str, str] | None = None, yields: bool = False
    ) -> None:
        """Run pytest with a result file of this tier's own."""
        command = (sys.executable, "-m", "pytest", "-q", f"--junitxml={self.programs.folder / tier}.xml", *arguments)
        self.programs.run(f"{tier} tests", *command, environment=environment, yields=yields, may_fail=True)


def local_cluster(command: str) -> int:
    """Run a command of the emulated cluster without its output and return its exit code."""
    silent = subprocess.DEVNULL
    return subprocess.run(
        [sys.executable, "-m", "local_cluster", command],
        env={**os.environ, "PYTHONPATH": str(REPOSITORY / "deploy/dev/cluster")},
        stdout=silent, stderr=silent, check=False,
    ).returncode  # fmt: skip


def summary(files: Iterable[Path]) -> str:
    """Return the sums of JUnit result files: ``N passed, N failed, N skipped``."""
    tests = failed = skipped = 0
    for path in files:
        for suite in ET.parse(path).getroot().iter("testsuite"):  # noqa: S314  # the project's own test run wrote them
            tests += int(suite.get("tests", 0))
            failed += int(suite.get("failures", 0)) + int(suite.get("errors", 0))
            skipped += int(suite.get("skipped", 0))
    return f"{tests - failed - skipped} passed, {failed} failed, {skipped} skipped"


def main() -> int:
    """Run everything and return the exit code."""
    os.chdir(REPOSITORY)
    os.environ.pop("PYTHONPATH", None)  # mypy and pytest have settings of their own
    signal.signal(signal.SIGTERM, _interrupt)
    with tempfile.TemporaryDirectory(prefix="heterotrain-tests-") as folder:
        programs = Programs(Path(folder))
        tiers = Tiers(programs)
        lanes = [tiers.without_cluster, tiers.on_cluster]
        groups = [[lane] for lane in lanes] if os.environ.get("SIDE_BY_SIDE") == "no" else [lanes]
        try:
            for group in (*groups, [tiers.distributed]):
                programs.side_by_side(group)
        except Failed as failed:
            programs.say(f"stopped: {failed} failed")
            return 1
        except KeyboardInterrupt:
            programs.say("interrupted")
            return 130
        finally:
            if not tiers.was_running:
                local_cluster("down")
            print("\n" + ", ".join(f"{name} {seconds:.0f} s" for name, seconds in programs.seconds.items()))
            print(summary(sorted(programs.folder.glob("*.xml"))))
    if programs.failed:
        programs.say(f"failed: {', '.join(programs.failed)}")
        return 1
    programs.say("done")
    return 0


def _interrupt(_signal: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main())
