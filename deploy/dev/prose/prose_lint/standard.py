"""proselint's rules of good English, less those of typography and taste that do not suit technical texts."""

from __future__ import annotations

from collections.abc import Iterator

from proselint.checks import __register__
from proselint.config import DEFAULT, Config
from proselint.registry import CheckRegistry
from proselint.tools import LintFile

from prose_lint.passages import FILLER, Document, Finding, words

OFF = frozenset({"annotations", "hedging", "typography", "weasel_words"})
"""Code and terminals have straight quotes and a plain x; "very" and "might" are words like others."""
FEWEST_WORDS = 4
"""Shorter passages are cells with figures and names; each call takes a millisecond."""
_CONFIG = Config(max_errors=10_000, checks={name: on and name not in OFF for name, on in DEFAULT["checks"].items()})

CheckRegistry().register_many(__register__)


def findings(document: Document) -> Iterator[Finding]:
    """Yield what proselint finds in the prose of a document."""
    for passage in document.passages:
        if words(passage.text) < FEWEST_WORDS:
            continue
        for result in LintFile(str(document.path), passage.text).lint(_CONFIG):
            check = result.check_result
            # LintFile puts a line end before the text.
            start, end = (max(0, position - 1) for position in check.span)
            if FILLER in passage.text[start:end]:
                continue
            rule = check.check_path.split(".")[0].replace("_", "-")
            yield passage.finding(start, f"proselint-{rule}", " ".join(check.message.split()))
