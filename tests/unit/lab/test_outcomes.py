"""What a run of tests concludes from results, second tries and the list of unstable tests."""

from __future__ import annotations

from pathlib import Path

import pytest
from lab.cluster import REPOSITORY
from lab.testing import outcomes
from lab.testing.outcomes import Ended, Results, known_unstable, verdict, worth_retrying


def ended(name: str, outcome: str = "passed") -> Ended:
    return Ended(name, outcome, 1.0, 0.5)


TESTS = [ended("a"), ended("b", "skipped"), ended("c", "failed"), ended("d", "failed")]


def test_a_test_that_passes_at_the_second_try_counts_once_and_as_passed() -> None:
    found = verdict(TESTS, {"c": ended("c"), "d": ended("d", "failed")})
    assert found.counts == "2 passed, 1 failed, 1 skipped"
    assert (found.recovered, found.failed, found.not_gating) == (("c",), ("d",), ())


def test_a_test_that_did_not_end_at_the_second_try_has_failed() -> None:
    assert verdict(TESTS, {}).failed == ("c", "d")


def test_a_known_unstable_test_does_not_gate() -> None:
    found = verdict(TESTS, {"d": ended("d", "failed")}, ("d",))
    assert found.counts == "1 passed, 1 failed, 2 skipped"
    assert (found.failed, found.not_gating) == (("c",), ("d",))


def test_a_test_stands_twice_on_the_list_before_it_stops_gating() -> None:
    text = "# why\n\n2026-01-02 tests/a.py::x[1 2]\n2026-01-03 tests/b.py::y\n2026-02-02 tests/a.py::x[1 2]\n"
    assert known_unstable(text) == ("tests/a.py::x[1 2]",)


def test_listed_tests_exist() -> None:
    lines = [line for line in (REPOSITORY / "tests/unstable.txt").read_text().splitlines() if line[:1] not in {"", "#"}]
    for line in lines:
        file, _, name = line.split(" ", 1)[1].partition("::")
        assert (
            f"def {name.partition('[')[0].rpartition('::')[2] or name.partition('[')[0]}("
            in (REPOSITORY / file).read_text()
        ), f"{line}: delete lines of tests that there are no more"


def test_a_broken_change_is_not_retried() -> None:
    few = Results({str(number): ended(str(number), "failed") for number in range(outcomes.MOST_RETRIED)})
    assert len(worth_retrying(few)) == outcomes.MOST_RETRIED
    assert worth_retrying(few + Results({"one more": ended("one more", "failed")})) == ()


@pytest.mark.parametrize("rest", ["", '{"id": "c", "outco'])
def test_results_are_read_while_they_are_written(tmp_path: Path, rest: str) -> None:
    path = tmp_path / "results"
    assert outcomes.read(path) == Results()
    path.write_text(
        '{"tests": 3}\n{"id": "a", "outcome": "passed", "wall_s": 2.0, "processor_s": 1.5}\n'
        '{"id": "b", "outcome": "failed", "wall_s": 1.0, "processor_s": 0.5}\n{"rest_s": 4.0}\n' + rest
    )
    found = outcomes.read(path)
    assert (found.expected, found.failed, found.processor_s, found.rest_s) == (3, ("b",), 2.0, 4.0)
