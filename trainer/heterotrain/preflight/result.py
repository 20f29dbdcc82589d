"""The result of a check, and all results as text. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum


class Verdict(StrEnum):
    """What a check has found."""

    OK = "ok"
    SKIPPED = "skipped"
    """There is nothing to check here."""
    WARNING = "warning"
    """Training works, but slowly or with a limit."""
    FAILED = "failed"
    """Training would fail."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One check.

    Attributes:
        name: of what was checked.
        verdict: what was found.
        message: the finding with its figures; for a warning or a failure also what to do.
    """

    name: str
    verdict: Verdict
    message: str


def has_failed(checks: Sequence[Check]) -> bool:
    """Return whether training would fail."""
    return any(check.verdict is Verdict.FAILED for check in checks)


def lines(by_rank: Sequence[Sequence[Check]], names: Sequence[str]) -> list[str]:
    """Return all results as text: one line for a check with the same result on all ranks, else one for each rank.

    Args:
        by_rank: checks of each rank, in the same order on each.
        names: of the ranks, for people.
    """
    found = []
    for same in zip(*by_rank, strict=True):
        groups: dict[tuple[Verdict, str], list[str]] = {}
        for check, name in zip(same, names, strict=True):
            groups.setdefault((check.verdict, check.message), []).append(name)
        for (verdict, message), who in groups.items():
            where = "" if len(groups) == 1 else f" [{', '.join(who)}]"
            found.append(f"{verdict.value:8} {same[0].name:14}{where} {message}")
    return found


def summary(by_rank: Sequence[Sequence[Check]]) -> str:
    """Return the result in one line."""
    every = [check.verdict for checks in by_rank for check in checks]
    failed, warnings = every.count(Verdict.FAILED), every.count(Verdict.WARNING)
    if failed:
        return f"{failed} of {len(every)} checks failed: training would fail here"
    if warnings:
        return f"no check failed; {warnings} of {len(every)} found something that costs speed or sets a limit"
    skipped = every.count(Verdict.SKIPPED)
    return f"no check failed: {every.count(Verdict.OK)} passed, {skipped} had nothing to check here"
