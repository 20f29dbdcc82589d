"""A part that needs more processor seconds than its budget fails, and a slow machine does not."""

from __future__ import annotations

from pathlib import Path

import pytest
from lab.cluster import REPOSITORY
from lab.testing import budget, parts
from lab.testing.budget import Budget, excess, slowness

TEN = Budget({"unit": 10.0}, work_s=1.0)


@pytest.mark.parametrize(
    ("processor_s", "slow", "fails"), [(11.4, 1.0, False), (11.6, 1.0, True), (22.9, 2.0, False), (23.1, 2.0, True)]
)
def test_a_budget_has_a_margin_and_counts_at_the_speed_of_its_machine(
    processor_s: float, slow: float, fails: bool
) -> None:
    assert bool(excess("unit", processor_s, slow, TEN)) is fails


def test_the_sentence_tells_both_numbers_and_what_to_do() -> None:
    told = excess("unit", 30.0, 2.0, TEN)
    assert told.startswith("unit: 15 processor seconds exceed the budget of 10 by more than 15%: make tests cheaper")


def test_a_part_without_a_budget_may_take_any_time() -> None:
    assert excess("other", 1e9, 1.0, TEN) == ""


@pytest.mark.parametrize(
    ("samples_s", "expected"), [([], 1.0), ([0.5, 0.6, 0.7], 1.0), ([2.0, 2.0, 90.0], 2.0), ([3.0], 3.0)]
)
def test_a_faster_machine_counts_as_the_budgets_own_and_one_long_sample_does_not_count(
    samples_s: list[float], expected: float
) -> None:
    assert slowness(samples_s, 1.0) == expected


def test_samples_of_a_part_are_those_while_it_ran() -> None:
    sampler = budget.Sampler([(1.0, 0.1), (2.0, 0.2), (3.0, 0.3)])
    assert sampler.between(1.5, 3.0) == [0.2, 0.3]


def test_samples_are_taken_in_the_background(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(budget, "SAMPLE_EVERY_S", 0.001)
    sampler = budget.Sampler()
    sampler.start()
    while not sampler.samples_s:
        pass
    sampler.stop()
    assert all(taken_s > 0 for _, taken_s in sampler.samples_s)


def test_the_repositorys_budget_names_parts() -> None:
    assert set(budget.budget_of(REPOSITORY / "pyproject.toml").parts_s) <= {part.name for part in parts.PARTS}


@pytest.mark.parametrize("number", ["0", "-3", "inf", "nan"])
def test_a_budget_is_a_positive_number(tmp_path: Path, number: str) -> None:
    project = tmp_path / "pyproject.toml"
    project.write_text(f"[tool.heterotrain.budget]\nfixed-work = 1\ncore = {number}\n")
    with pytest.raises(ValueError, match=r"the budget of 'core' in .* write a positive number"):
        budget.budget_of(project)
