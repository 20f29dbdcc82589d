"""Which of two counts a test gets, and which tests the gate leaves out."""

from __future__ import annotations

from pathlib import Path

import pytest
from support import repeat
from support.suites import output_of


@pytest.mark.parametrize(("value", "expected"), [(None, False), ("", False), ("gate", False), ("all", True)])
def test_the_gate_is_the_default(value: str | None, expected: bool) -> None:
    environment = {} if value is None else {repeat.VARIABLE: value}
    assert repeat.is_thorough(environment) is expected


def test_another_word_is_an_error_that_names_both() -> None:
    with pytest.raises(ValueError, match="REPEAT is 'most': write gate or all"):
        repeat.is_thorough({repeat.VARIABLE: "most"})


def test_a_long_run_draws_a_seed_that_can_be_repeated() -> None:
    environment = {repeat.VARIABLE: repeat.ALL}
    repeat.choose_seed(environment)
    drawn = environment[repeat.SEED]
    repeat.choose_seed(environment)
    assert environment[repeat.SEED] == drawn
    assert 0 <= int(drawn) < repeat.MOST_SEED
    gate: dict[str, str] = {}
    repeat.choose_seed(gate)
    assert not gate


@pytest.mark.parametrize("text", ["-1", "many", "", "2147483648", "1" * 5000, "٣"])
def test_a_wrong_seed_is_an_error(text: str) -> None:
    with pytest.raises(ValueError, match="write a whole number from 0 to 2147483647"):
        repeat.choose_seed({repeat.VARIABLE: repeat.ALL, repeat.SEED: text})


SUITE = """
import pytest

def test_always(): pass

@pytest.mark.thorough
def test_seldom(): pass

@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.thorough)])
def test_seeds(seed): pass
"""


@pytest.mark.parametrize(("value", "expected"), [("gate", "2 passed, 2 deselected"), ("all", "4 passed")])
def test_the_gate_leaves_out_what_is_marked_thorough(tmp_path: Path, value: str, expected: str) -> None:
    assert expected in output_of(SUITE, tmp_path, {repeat.VARIABLE: value})


def test_a_test_may_not_write_into_the_sources(tmp_path: Path) -> None:
    target = Path(__file__).with_name("stray.py")
    printed = output_of(f"def test_it(): open({str(target)!r}, 'w')", tmp_path)
    assert "a test writes into the sources, which others count: use tmp_path" in printed
    assert not target.exists()
