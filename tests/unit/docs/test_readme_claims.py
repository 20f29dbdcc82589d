"""The README's claims against docs/benchmarks.md: each figure is in both, and none of the README lacks a source."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
FENCED = re.compile(r"^ *```.*?^ *```$", re.MULTILINE | re.DOTALL)
README = " ".join(FENCED.sub("", (ROOT / "README.md").read_text(encoding="utf-8")).split())
BENCHMARKS = (ROOT / "docs/benchmarks.md").read_text(encoding="utf-8")
CLAIM = re.compile(
    r"\b\d[\d.,]*(?: to \d+)? (?:s|ms|minutes?|seconds?|times|samples/s)\b|\b0\.\d+\b|\d %|\b\d+ to \d+ later"
)
"""Durations, ratios, rates and percentages."""
ESTIMATES = {"15 minutes, after the images are pushed"}
"""What the README itself calls an estimate."""


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
    for claim in sorted({*(row[0] for row in ROWS), *ESTIMATES}, key=len, reverse=True):
        rest = rest.replace(claim, "")
    assert len(ROWS) > 10
    assert CLAIM.findall(rest) == []


def test_figures_that_are_the_same_by_name_are_the_same_by_value() -> None:
    """A claim that quotes a figure with its unit, such as 0.956 or 2.48, has it from the measurement."""
    for claim, figures, _ in ROWS:
        for number in re.findall(r"\b\d+\.\d+\b", claim):
            assert number in figures, claim


def test_what_never_ran_is_said_first() -> None:
    """Until several GPUs have run it, the README says so before it explains anything."""
    if "Only [One GPU](#one-gpu) was measured on a GPU" in BENCHMARKS:
        assert "it has run on one H100 only" in README.partition("- **Shares.**")[0]
