"""Which files are read, how, and by which rules."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from prose_lint import crd, exceptions, habits, markdown, standard
from prose_lint.glossary import Vocabulary, terms, without_replaced
from prose_lint.limits import WORDS, WORDS_IN_DOCS, long_lines, long_sentences
from prose_lint.passages import Document, Finding

GLOSSARY = Path("docs/glossary.md")
README = Path("README.md")
CHANGELOG = Path("CHANGELOG.md")
MARKDOWN = ("*.md", "docs/**/*.md")
CRDS = ("crds/*.yaml",)


def files(root: Path) -> Iterator[Path]:
    """Yield the files that are checked, relative to the repository's root, in a fixed order."""
    for pattern in (*MARKDOWN, *CRDS):
        yield from sorted(path.relative_to(root) for path in root.glob(pattern))


class Linter:
    """The rules of one repository."""

    def __init__(self, root: Path) -> None:
        """Read the glossary and the habits.

        Args:
            root: of the repository.

        Raises:
            ValueError: the glossary cannot be read.
            OSError: there is no glossary.
        """
        self._root = root
        self._vocabulary = Vocabulary(terms((root / GLOSSARY).read_text(encoding="utf-8")))
        self._habits = habits.habits()

    def findings(self, path: Path) -> list[Finding]:
        """Return the findings of one file, in its order."""
        text = (self._root / path).read_text(encoding="utf-8")
        if path.suffix == ".md":
            document = markdown.read(path, text)
            found = exceptions.apply(document, [*long_lines(document), *self._prose(document)])
        else:
            found = self._prose(crd.read(path, text))
        return sorted(found, key=lambda each: (each.line, each.column, each.rule))

    def _prose(self, document: Document) -> Iterator[Finding]:
        if document.path == GLOSSARY:
            document = without_replaced(document)
        short = document.path == README or document.path.suffix != ".md"
        yield from long_sentences(document, WORDS if short else WORDS_IN_DOCS)
        yield from self._vocabulary.findings(document, quotes_allowed=document.path == CHANGELOG)
        own = list(habits.findings(document, self._habits))
        yield from own
        # Where both object to the same word, the habit says what to write instead.
        places = {(finding.line, finding.column) for finding in own}
        yield from (each for each in standard.findings(document) if (each.line, each.column) not in places)
