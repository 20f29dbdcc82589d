"""The README's claims against docs/benchmarks.md: each figure is in both, and none of the README lacks a source."""

from __future__ import annotations

import re
from pathlib import Path
from statistics import median

import pytest

ROOT = Path(__file__).parents[3]
FENCED = re.compile(r"^ *```.*?^ *```$", re.MULTILINE | re.DOTALL)
FIRST, *_ = TEXT = (ROOT / "README.md").read_text(encoding="utf-8").partition("```")
README = " ".join(re.sub(r"!\[.*?\]", "", FENCED.sub("", "".join(TEXT))).split())
BENCHMARKS = (ROOT / "docs/benchmarks.md").read_text(encoding="utf-8")
CLAIM = re.compile(
    r"\b\d[\d.,]*(?: to \d+)? (?:s|ms|GB|×|minutes?|seconds?|times|samples/s)(?!\w)|\b0\.\d+\b|\d %|\b\d+ to \d+ later"
)
"""Durations, ratios, rates and percentages."""


def slug(heading: str) -> str:
    return re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-")


def sections() -> dict[str, str]:
    """Return the text below each heading, without the sections inside it, on one line."""
    parts = re.split(r"^#+ (.+)$", BENCHMARKS, flags=re.MULTILINE)[1:]
    return {slug(heading): " ".join(text.split()) for heading, text in zip(parts[::2], parts[1::2], strict=True)}


ROWS = re.findall(
    r"^\| (.+?) \| (`.+`) \| \[.+\]\(#(.+)\) \|$", BENCHMARKS.partition("\n## Claims of the README\n")[2], re.MULTILINE
)


@pytest.mark.parametrize(("claim", "figures", "section"), ROWS, ids=lambda text: text[:40])
def test_a_claim_is_in_the_readme_and_its_measurement_in_the_section(claim: str, figures: str, section: str) -> None:
    assert claim in README
    found = re.findall(r"`([^`]+)`", figures)
    assert found
    assert [each for each in found if each not in sections()[section]] == []


def test_no_figure_of_the_readme_is_without_a_measurement() -> None:
    rest = README
    for claim in sorted({row[0] for row in ROWS}, key=len, reverse=True):
        rest = rest.replace(claim, "")
    assert len(ROWS) > 8
    assert CLAIM.findall(rest) == []


def test_figures_that_are_the_same_by_name_are_the_same_by_value() -> None:
    """A claim that quotes a figure with its unit, such as 0.956 or 2.48, has it from the measurement."""
    for claim, figures, _ in ROWS:
        for number in re.findall(r"\b\d+\.\d+\b", claim):
            assert number in figures, claim


def test_the_medians_are_those_of_all_demos_in_the_table() -> None:
    demos = sections()["demo-and-tests"]
    rows = re.findall(r"\| (\d\.\d+) × \| (0\.\d+), (0\.\d+) \|", demos)
    assert len(rows) == int(re.search(r"Medians of the (\d+) runs", demos)[1])
    assert f"{len(rows)} demos" in README
    for values, digits in zip(zip(*rows, strict=True), (2, 3, 3), strict=True):
        numbers = sorted(map(float, values))
        times = " ×" if digits == 2 else ""
        figure = f"{median(numbers):.{digits}f}{times} ({numbers[0]:.{digits}f} to {numbers[-1]:.{digits}f})"
        assert figure in demos
        assert figure in README.replace("**", "")


def test_the_first_screen_is_short_and_says_what_never_ran() -> None:
    """At most 150 words come before the first command. Until several GPUs have run it, some name those that did."""
    assert len(FIRST.split()) <= 150
    assert FIRST.count("![") == 1
    if "Only [One GPU](#one-gpu) was measured on a GPU" in BENCHMARKS:
        assert "GPUs so far: one H100 and one H200 only" in " ".join(FIRST.split())
