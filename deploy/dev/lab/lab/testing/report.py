"""What a run of tests tells at its end: a table by part, the slowest tests, second tries, and the sums."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

from lab.testing.budget import Budget
from lab.testing.outcomes import Ended, Results, Verdict

SLOWEST: Final = 40
PRINTED: Final = 10


@dataclass(frozen=True, slots=True)
class PartCost:
    """A part's row.

    Attributes:
        wall_s: from the start of its first program to the end of its last.
        processor_s: of its tests and, where it has one, of the cluster meanwhile.
        rest_s: of imports and collection.
        slow: by how much the machine was slower than that of the budget.
    """

    wall_s: float
    processor_s: float
    rest_s: float
    slow: float
    tests: int


def table(costs: Mapping[str, PartCost], budget: Budget) -> str:
    """Return a row for each part, with processor seconds as the machine of the budget would take them."""
    rows = [("part", "tests", "wall s", "processor s", "and imports", "slowness", "at its speed", "budget")]
    for name, cost in costs.items():
        allowed = budget.parts_s.get(name)
        own = f"{cost.processor_s:.0f}", f"{cost.rest_s:.0f}", f"{cost.slow:.2f}", f"{cost.processor_s / cost.slow:.0f}"
        row = (name, str(cost.tests), f"{cost.wall_s:.0f}", *own, "" if allowed is None else f"{allowed:.0f}")
        rows.append(row if cost.tests else (*row[:3], "", "", "", "", ""))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = [cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)]
        lines.append("  ".join([row[0].ljust(widths[0]), *cells]).rstrip())
    return "\n".join(lines)


def slowest(results: Results) -> list[Ended]:
    """Return the tests that took the longest, by wall or by processor seconds."""
    return sorted(results.tests.values(), key=lambda test: -max(test.wall_s, test.processor_s))[:SLOWEST]


def document(results: Results, costs: Mapping[str, PartCost], found: Verdict) -> dict[str, Any]:
    """Return the contents of ``out/tests.json``."""
    return {
        "parts": {name: asdict(cost) for name, cost in costs.items()},
        "slowest": [asdict(test) for test in slowest(results)],
        "failed": list(found.failed),
        "passed_at_the_second_try": list(found.recovered),
        "failed_but_does_not_gate": list(found.not_gating),
        "counts": found.counts,
    }


def slowest_lines(results: Results) -> str:
    """Return the first lines of the list of slowest tests."""
    lines = [f"{test.wall_s:8.1f} {test.processor_s:8.1f}  {test.name}" for test in slowest(results)[:PRINTED]]
    return "\n".join(["  wall s  proc. s  slowest tests (more in out/tests.json)", *lines])


def second_tries(found: Verdict, day: str, unstable: Sequence[str]) -> str:
    """Return what happened to failed tests, and the lines for the list of unstable tests."""
    lines = [f"failed, then passed alone: {name}" for name in found.recovered]
    lines += [f"failed, does not gate: {name}" for name in found.not_gating]
    lines += [f"FAILED {name}" for name in found.failed]
    if found.recovered:
        lines += ["for tests/unstable.txt:", *(f"{day} {name}" for name in found.recovered)]
    if unstable:
        lines.append(f"{len(unstable)} tests do not gate until they are mended: {', '.join(unstable)}")
    return "\n".join(lines)
