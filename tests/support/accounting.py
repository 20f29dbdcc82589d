"""pytest plugin: with ``--results=FILE``, one JSON line for each test that has ended, for the runner of all tiers.

A test's line has its ``id``, its ``outcome`` (passed, failed or skipped), its wall seconds and its processor seconds.
The latter include those of its descendants, both while they live and after their parents have waited for them, so
ranks that a template process forks count, too. Two more lines tell the number of tests that will run and the
processor seconds of everything but tests: imports, collection and the processes of pytest-xdist.
"""

from __future__ import annotations

import json
import os
import resource
import time
from collections.abc import Generator
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import pytest

TICK_S: Final = 1 / os.sysconf("SC_CLK_TCK")
COST: Final = "processor_s"


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option."""
    parser.addoption("--results", metavar="FILE", help="write outcome and cost of each test to this file")


def pytest_configure(config: pytest.Config) -> None:
    """Measure where tests run, and write in one process."""
    if file := config.getoption("--results"):
        worker = hasattr(config, "workerinput")
        config.pluginmanager.register(Meter(config), "meter")
        if not worker:
            config.pluginmanager.register(Writer(Path(file)), "results writer")


class Meter:
    """What tests cost, in the process that runs them."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._last_s = 0.0
        self._rest_s = 0.0

    @pytest.hookimpl(hookwrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self) -> Generator[None]:
        """Note the time before a test."""
        self._rest_s += self._since()
        yield

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_makereport(self, call: pytest.CallInfo[None]) -> Generator[None, Any, None]:
        """Attach the cost to a test's last report."""
        outcome = yield
        if call.when == "teardown":
            outcome.get_result().user_properties.append((COST, round(self._since(), 3)))

    def _since(self) -> float:
        """Return the seconds since the last call; a process that was killed and not waited for takes its own along."""
        before_s, self._last_s = self._last_s, processor_s()
        return max(self._last_s - before_s, 0.0)

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self) -> None:
        """Tell the process that writes what the rest has cost."""
        rest_s = self._rest_s + self._since()
        if hasattr(self._config, "workeroutput"):
            self._config.workeroutput[COST] = rest_s
        elif not self._config.pluginmanager.hasplugin("dsession"):
            self._config.pluginmanager.get_plugin("results writer").rest_s += rest_s


class Writer:
    """The file; ``rest_s`` are the processor seconds of everything but tests."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("w", buffering=1)
        self._reports: dict[str, list[pytest.TestReport]] = {}
        self._has_counted = False
        self.rest_s = 0.0

    def _write(self, **line: Any) -> None:
        self._file.write(json.dumps(line) + "\n")

    def _count(self, tests: int) -> None:
        if not self._has_counted:
            self._has_counted = True
            self._write(tests=tests)

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """Write how many tests this process will run."""
        if session.items:
            self._count(len(session.items))

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, ids: list[str]) -> None:
        """Write how many tests all processes will run."""
        self._count(len(ids))

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        """Add what a process of pytest-xdist has spent on everything but tests."""
        self.rest_s += getattr(node, "workeroutput", {}).get(COST, 0.0)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Write a file that cannot be collected as a failure."""
        if report.failed:
            self._write(id=report.nodeid, outcome="failed", wall_s=0.0, processor_s=0.0)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Write a test at its end; the report of a process that died has no phase."""
        reports = self._reports.setdefault(report.nodeid, [])
        reports.append(report)
        if report.when in {"setup", "call"}:
            return
        del self._reports[report.nodeid]
        outcomes = {each.outcome for each in reports}
        outcome = next((name for name in ("failed", "skipped") if name in outcomes), "passed")
        cost_s = dict(report.user_properties).get(COST, 0.0)
        wall_s = round(sum(each.duration for each in reports), 3)
        self._write(id=report.nodeid, outcome=outcome, wall_s=wall_s, processor_s=cost_s)

    @pytest.hookimpl(trylast=True)
    def pytest_unconfigure(self) -> None:
        """Write the cost of the rest."""
        self._write(rest_s=round(self.rest_s, 3))
        self._file.close()


def processor_s() -> float:
    """Return the processor seconds of this process and of all its descendants since their starts."""
    waited = resource.getrusage(resource.RUSAGE_CHILDREN)
    living = sum(_tree_s(child) for child in _children(os.getpid()))
    return time.process_time() + waited.ru_utime + waited.ru_stime + living


def _tree_s(pid: int) -> float:
    with suppress(OSError):
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return sum(map(int, fields[11:15])) * TICK_S + sum(_tree_s(child) for child in _children(pid))
    return 0.0


def _children(pid: int) -> list[int]:
    found: list[int] = []
    with suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            with suppress(OSError):
                found += map(int, (task / "children").read_text().split())
    return found
