"""Exceptions in the text itself: ``<!-- prose: allow RULE: reason -->``.

At the end of a line it covers that line; alone on a line it covers the paragraph below.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from prose_lint.passages import Document, Finding

COMMENT = re.compile(r"\s*<!--\s*prose:\s*allow\s+(?P<rule>[\w-]+)\s*(?::\s*(?P<reason>[^>]*?))?\s*-->")
RULE = "exception"


@dataclass(frozen=True, slots=True)
class _Exception:
    line: int
    rule: str
    reason: str
    covered: range


def apply(document: Document, findings: Iterable[Finding]) -> Iterator[Finding]:
    """Yield the findings that no exception covers, and the exceptions without a reason or a finding."""
    allowed = list(_exceptions(document))
    used: set[_Exception] = set()
    for finding in findings:
        covers = [each for each in allowed if each.rule == finding.rule and finding.line in each.covered]
        used.update(covers)
        if not covers:
            yield finding
    for each in allowed:
        if not each.reason:
            yield _about(
                document, each, f"say why {each.rule} is allowed here: <!-- prose: allow {each.rule}: reason -->"
            )
        elif each not in used:
            yield _about(document, each, f"{each.rule} finds nothing here: remove the exception")


def _exceptions(document: Document) -> Iterator[_Exception]:
    lines = document.lines
    for number, line in enumerate(lines, start=1):
        for match in COMMENT.finditer(line):
            end = number + 1
            if not COMMENT.sub("", line).strip():
                while end <= len(lines) and lines[end - 1].strip():
                    end += 1
            yield _Exception(number, match["rule"], (match["reason"] or "").strip(), range(number, end))


def _about(document: Document, exception: _Exception, message: str) -> Finding:
    return Finding(path=document.path, line=exception.line, column=1, rule=RULE, message=message)
