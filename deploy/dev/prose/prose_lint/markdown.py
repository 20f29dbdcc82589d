"""Markdown as passages: code, addresses and markup are blanked out, everything else keeps its place."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from markdown_it import MarkdownIt

from prose_lint.passages import FILLER, Document, Passage

_PARSER = MarkdownIt("commonmark").enable("table")
_FIXED = frozenset({"fence", "code_block", "html_block", "table_open"})
_PREFIX = re.compile(r"^(?:\s*(?:>|#{1,6}|[-*+]|\d+[.)])(?=\s))*\s*")
_CODE = re.compile(r"(?<!`)(`+)(?!`).+?(?<!`)\1(?!`)", re.DOTALL)
_TARGET = re.compile(r"(?<=\])\([^()\s]*(?:\([^()]*\)[^()\s]*)*(?:\s+\"[^\"]*\")?\)")
_ADDRESS = re.compile(r"<?\bhttps?://[^\s)>\]]+>?")
_HTML = re.compile(r"<!--.*?-->|</?[A-Za-z][^<>]*>", re.DOTALL)
_CELL = re.compile(r"(?:\\\||[^|])+")


def read(path: Path, text: str) -> Document:
    """Return the document of a Markdown text."""
    lines = text.split("\n")
    passages: list[Passage] = []
    fixed: set[int] = set()
    for token in _PARSER.parse(text):
        if token.map is None:
            continue
        first, end = token.map
        if token.type in _FIXED:
            fixed.update(range(first + 1, end + 1))
        if token.type == "tr_open":
            passages.extend(_cells(path, first + 1, lines[first]))
        elif token.type == "inline" and first + 1 not in fixed:
            block = "\n".join(lines[first:end])
            passages.append(Passage(path=path, line=first + 1, column=1, raw=block, text=_prose(block)))
    return Document(path=path, lines=tuple(lines), passages=tuple(passages), fixed_lines=frozenset(fixed))


def _cells(path: Path, line: int, row: str) -> Iterator[Passage]:
    masked = _prose(row)
    # Cells are found where code is blanked: a vertical bar in code does not end one.
    for cell in _CELL.finditer(masked):
        start, end = cell.span()
        if cell.group().strip():
            yield Passage(path=path, line=line, column=start + 1, raw=row[start:end], text=masked[start:end])


def _prose(block: str) -> str:
    masked = "\n".join(_PREFIX.sub(_spaces, line) for line in block.split("\n"))
    masked = _CODE.sub(_filler, masked)
    masked = _HTML.sub(_spaces, masked)
    return _ADDRESS.sub(_filler, _TARGET.sub(_filler, masked))


def _spaces(match: re.Match[str]) -> str:
    return " " * len(match.group())


def _filler(match: re.Match[str]) -> str:
    return FILLER * len(match.group())
