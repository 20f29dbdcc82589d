"""Prose with its place in a file, and findings about it. Values only."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

FILLER = "_"
"""Stands for each character of a code span, an address or a link target: one word without meaning."""

_SENTENCE_END = re.compile(r"""[.!?…]["'”’)\]*_]*(?=\s)""")
_ABBREVIATION = re.compile(
    r"(?:^|[\s(\[])(?:[A-Za-z]|e\.g|i\.e|etc|vs|cf|al|ca|approx|resp|fig|no|vol|pp)\.$", re.IGNORECASE
)
_WORD = re.compile(r"\S*\w\S*")


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One place where a text breaks a rule."""

    path: Path
    line: int
    column: int
    rule: str
    message: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}:{self.column}: {self.rule}: {self.message}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Passage:
    """A paragraph, a heading, a table cell or a description.

    Attributes:
        path: the file.
        line: line of the first character, from 1.
        column: column of the first character, from 1.
        raw: the characters as they are in the file.
        text: the prose: as long as ``raw``, with ``FILLER`` or spaces in place of markup and code.
        where: what people call this place where a line number is not enough, such as a field of the CRD.
    """

    path: Path
    line: int
    column: int
    raw: str
    text: str
    where: str = ""

    def finding(self, offset: int, rule: str, message: str) -> Finding:
        """Return a finding about the character at ``offset``."""
        before = self.raw[:offset]
        last = before.rfind("\n")
        column = self.column + offset if last < 0 else offset - last
        place = f"{self.where}: " if self.where else ""
        line = self.line + before.count("\n")
        return Finding(path=self.path, line=line, column=column, rule=rule, message=f"{place}{message}")

    def sentences(self) -> Iterator[tuple[int, str]]:
        """Yield each sentence with its offset. Colons and semicolons do not end a sentence."""
        start = 0
        for match in _SENTENCE_END.finditer(self.text):
            if not _ABBREVIATION.search(self.text, start, match.start() + 1):
                yield from self._sentence(start, match.end())
                start = match.end()
        yield from self._sentence(start, len(self.text))

    def _sentence(self, start: int, end: int) -> Iterator[tuple[int, str]]:
        part = self.text[start:end]
        if part.strip():
            yield start + len(part) - len(part.lstrip()), part.strip()


def words(sentence: str) -> int:
    """Return the number of words: whatever stands between spaces and has a letter or a digit."""
    return len(_WORD.findall(sentence))


@dataclass(frozen=True, slots=True, kw_only=True)
class Document:
    """A file as the rules see it.

    Attributes:
        path: the file, relative to the repository.
        lines: its lines without line ends.
        passages: its prose.
        fixed_lines: numbers of lines, from 1, that cannot be wrapped: code, tables, HTML.
    """

    path: Path
    lines: tuple[str, ...]
    passages: tuple[Passage, ...]
    fixed_lines: frozenset[int] = frozenset()
