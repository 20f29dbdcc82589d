"""Habits of the project's prose that a pattern can find: ``habits.toml``, next to this file."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from prose_lint.passages import Document, Finding


@dataclass(frozen=True, slots=True, kw_only=True)
class Habit:
    """One habit.

    Attributes:
        name: of the rule, for exceptions.
        pattern: finds it; a space in the file stands for any white space.
        write: what to write instead.
        wrong: texts that it has to find.
        right: texts that it must not find.
    """

    name: str
    pattern: re.Pattern[str]
    write: str
    wrong: tuple[str, ...]
    right: tuple[str, ...]


def habits() -> tuple[Habit, ...]:
    """Return all habits of ``habits.toml``."""
    listed = tomllib.loads(Path(__file__).with_name("habits.toml").read_text())
    return tuple(
        Habit(
            name=name,
            pattern=re.compile(each["pattern"].replace(" ", r"\s+"), re.IGNORECASE | re.MULTILINE),
            write=each["write"],
            wrong=tuple(each["wrong"]),
            right=tuple(each.get("right", ())),
        )
        for name, each in listed.items()
    )


def findings(document: Document, habits: tuple[Habit, ...]) -> Iterator[Finding]:
    """Yield each place of a document that has one of the habits."""
    for passage in document.passages:
        for habit in habits:
            for match in habit.pattern.finditer(passage.text):
                found = " ".join(match.group().split())
                yield passage.finding(match.start(), habit.name, f'"{found}": {habit.write}')
