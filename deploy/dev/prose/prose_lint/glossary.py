"""docs/glossary.md as data: the terms, and the words that they replace.

Each row of its tables is ``| term | meaning | elsewhere | not |``. A word in backticks in the last column is refused
wherever the linter looks; other words there are explained to people only.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace

from prose_lint.passages import Document, Finding

RULE = "replaced-word"
COLUMNS = 4
_QUOTED = re.compile(r'"[^"\n]*"|“[^”]*”|`[^`]*`')
_CODE_WORD = re.compile(r"[a-z][A-Z]")


@dataclass(frozen=True, slots=True, kw_only=True)
class Term:
    """One row of the glossary."""

    name: str
    meaning: str
    replaced: tuple[str, ...]


def terms(text: str) -> tuple[Term, ...]:
    """Return the terms of a glossary.

    Raises:
        ValueError: a row has another number of columns, or no meaning.
    """
    found = []
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.startswith("|"):
            continue
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
        if len(cells) != COLUMNS or not cells[1]:
            raise ValueError(
                f"line {number} of the glossary has {len(cells)} columns, or no meaning: {COLUMNS} are needed"
            )
        name = cells[0].replace("*", "").replace("`", "")
        if set(cells[0]) <= set("-: ") or name == "term":
            continue
        found.append(Term(name=name, meaning=cells[1], replaced=tuple(re.findall(r"`([^`]+)`", cells[-1]))))
    return tuple(found)


def without_replaced(glossary: Document) -> Document:
    """Return a glossary without the last column of its tables: the only place where replaced words may stand."""
    kept = [
        passage
        for passage in glossary.passages
        if glossary.lines[passage.line - 1][passage.column - 1 + len(passage.raw) :].strip() != "|"
    ]
    return replace(glossary, passages=tuple(kept))


class Vocabulary:
    """The replaced words of a glossary, ready to be looked for."""

    def __init__(self, terms: tuple[Term, ...]) -> None:
        """A term that contains a replaced word, such as "ground truth", is not touched by it."""
        self._write = {word.lower(): term.name for term in terms for word in term.replaced}
        self._words = _one_of(iter(self._write))
        self._code = _one_of((w for t in terms for w in t.replaced if _CODE_WORD.search(w)), ignore_case=False)
        self._own = _one_of(term.name for term in terms)

    def findings(self, document: Document, *, quotes_allowed: bool = False) -> Iterator[Finding]:
        """Yield the replaced words of a document.

        Args:
            document: with its prose.
            quotes_allowed: whether quoted words and code may be old ones, as in a changelog.
        """
        for passage in document.passages:
            skipped = [match.span() for match in self._own.finditer(passage.text)]
            if quotes_allowed:
                skipped += [match.span() for match in _QUOTED.finditer(passage.raw)]
            # Names in CamelCase are looked for in code, too: there is no other place for them.
            found = {m.start(): m for m in self._words.finditer(passage.text)}
            found |= {m.start(): m for m in self._code.finditer(passage.raw)}
            for start, match in sorted(found.items()):
                if any(begin <= start and match.end() <= end for begin, end in skipped):
                    continue
                write = self._write[re.sub(r"\s+", " ", match.group("word")).lower()]
                yield passage.finding(start, RULE, f'write "{write}" instead of "{match.group()}" (docs/glossary.md)')


def _one_of(words: Iterator[str], *, ignore_case: bool = True) -> re.Pattern[str]:
    choices = sorted({r"\s+".join(map(re.escape, word.split())) for word in words}, key=len, reverse=True)
    pattern = rf"\b(?P<word>{'|'.join(choices) or '(?!)'})(?:s|es|'s)?\b"
    return re.compile(pattern, re.IGNORECASE if ignore_case else 0)
