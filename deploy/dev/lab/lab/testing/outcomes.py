"""What became of each test: results of pytest, the second try of failed tests, and tests that are known as unstable."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

GATES_UNTIL: Final = 2
"""A test that stands on the list of unstable tests this often does not gate."""
MOST_RETRIED: Final = 10
"""With more failures in a part, the change is broken rather than its tests unstable."""


@dataclass(frozen=True, slots=True)
class Ended:
    """One test that has ended; ``outcome`` is passed, failed or skipped."""

    name: str
    outcome: str
    wall_s: float
    processor_s: float


@dataclass(frozen=True, slots=True)
class Results:
    """A part's tests so far, the number that will run, and the processor seconds of all that is not a test."""

    tests: Mapping[str, Ended] = field(default_factory=dict)
    expected: int = 0
    rest_s: float = 0.0

    def __add__(self, other: Results) -> Results:
        """Return both parts' tests."""
        tests = {**self.tests, **other.tests}
        return Results(tests, self.expected + other.expected, self.rest_s + other.rest_s)

    @property
    def failed(self) -> tuple[str, ...]:
        """Names of the failed tests."""
        return tuple(name for name, test in self.tests.items() if test.outcome == "failed")

    @property
    def processor_s(self) -> float:
        """Processor seconds of the tests alone."""
        return sum(test.processor_s for test in self.tests.values())


def read(path: Path) -> Results:
    """Return what a file of ``support.accounting`` contains; a half line at its end does not count yet."""
    tests: dict[str, Ended] = {}
    expected, rest_s = 0, 0.0
    text = path.read_text() if path.exists() else ""
    for line in text.splitlines(keepends=True):
        if not line.endswith("\n"):
            continue
        found = json.loads(line)
        if "id" in found:
            tests[found["id"]] = Ended(found["id"], found["outcome"], found["wall_s"], found["processor_s"])
        expected += found.get("tests", 0)
        rest_s += found.get("rest_s", 0.0)
    return Results(tests, expected, rest_s)


def worth_retrying(results: Results) -> tuple[str, ...]:
    """Return the failed tests of a part with real processes, or none if there are too many of them."""
    return results.failed if len(results.failed) <= MOST_RETRIED else ()


def known_unstable(text: str) -> tuple[str, ...]:
    """Return the tests that do not gate, from the lines ``DATE TEST`` of the list."""
    lines = (line.strip() for line in text.splitlines())
    counts = Counter(line.partition(" ")[2] for line in lines if line and not line.startswith("#"))
    return tuple(sorted(name for name, count in counts.items() if count >= GATES_UNTIL))


@dataclass(frozen=True, slots=True)
class Verdict:
    """The outcome of all tests after the second try.

    Attributes:
        passed: tests that passed at once or at the second try.
        skipped: tests that were skipped, and failed ones that do not gate.
        failed: names of tests that failed and gate.
        recovered: names of tests that passed at the second try only.
        not_gating: names of failed tests that do not gate.
    """

    passed: int
    skipped: int
    failed: tuple[str, ...]
    recovered: tuple[str, ...]
    not_gating: tuple[str, ...]

    @property
    def counts(self) -> str:
        """The sums, each test once."""
        return f"{self.passed} passed, {len(self.failed)} failed, {self.skipped} skipped"


def verdict(first: Iterable[Ended], second: Mapping[str, Ended], unstable: Sequence[str] = ()) -> Verdict:
    """Return the verdict over all tests; ``second`` are the second tries."""
    tests = list(first)
    failed = [test.name for test in tests if test.outcome == "failed"]
    recovered = [name for name in failed if name in second and second[name].outcome == "passed"]
    still = [name for name in failed if name not in recovered]
    gates = tuple(name for name in still if name not in unstable)
    not_gating = tuple(name for name in still if name in unstable)
    skipped = sum(test.outcome == "skipped" for test in tests) + len(not_gating)
    passed = len(tests) - skipped - len(gates)
    return Verdict(passed, skipped, gates, tuple(recovered), not_gating)
