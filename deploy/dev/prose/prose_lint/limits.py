"""The two limits: columns of a line, and words of a sentence."""

from __future__ import annotations

import re
from collections.abc import Iterator

from prose_lint.exceptions import COMMENT
from prose_lint.passages import Document, Finding, words

COLUMNS = 120
WORDS = 30
"""Of a sentence in the README, in descriptions and in messages."""
WORDS_IN_DOCS = 40
"""Of a sentence elsewhere."""

_MARKER = re.compile(r"^\s*(?:(?:>|[-*+]|\d+[.)])\s+)*")
_WHOLE_LINK = re.compile(r"(?:\[\!\[[^\]]*\]\([^)]*\)\]|!?\[[^\]]*\])\([^)]*\)[.,;:]?")
_DEFINITION = re.compile(r"\[[^\]]+\]:\s")


def long_lines(document: Document) -> Iterator[Finding]:
    """Yield the lines that are too long and could be wrapped."""
    for number, line in enumerate(document.lines, start=1):
        shown = COMMENT.sub("", line).rstrip()
        if len(shown) <= COLUMNS or number in document.fixed_lines:
            continue
        content = _MARKER.sub("", shown)
        if " " not in content or _WHOLE_LINK.fullmatch(content) or _DEFINITION.match(content):
            continue
        message = f"{len(shown)} columns, at most {COLUMNS}: wrap the line"
        yield Finding(path=document.path, line=number, column=COLUMNS + 1, rule="line-length", message=message)


def long_sentences(document: Document, most: int) -> Iterator[Finding]:
    """Yield the sentences of more than ``most`` words."""
    for passage in document.passages:
        for offset, sentence in passage.sentences():
            count = words(sentence)
            if count > most:
                message = f"{count} words, at most {most}: make two sentences or a list of it"
                yield passage.finding(offset, "sentence-length", message)
