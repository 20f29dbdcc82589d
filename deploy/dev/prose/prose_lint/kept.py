"""Files without a finding, kept in ``.prose_cache`` of the repository, so that only changed files are read again.

A file counts as unchanged while its own text, its name, the glossary, the rules and the versions of the packages are.
"""

from __future__ import annotations

import hashlib
import sys
from importlib.metadata import version
from pathlib import Path

from prose_lint.check import GLOSSARY

FOLDER = ".prose_cache"
PACKAGES = ("markdown-it-py", "proselint", "pyyaml")


class Kept:
    """The digests of files without a finding; rules and packages are part of each."""

    def __init__(self, root: Path) -> None:
        """Read what the last run kept."""
        self._root = root
        self._file = root / FOLDER / "clean"
        rules = sorted(path for path in Path(__file__).parent.iterdir() if path.suffix in {".py", ".toml"})
        self._rules = hashlib.sha256(sys.version.encode())
        for part in (
            *(f"{name} {version(name)}".encode() for name in PACKAGES),
            *(path.read_bytes() for path in rules),
        ):
            self._rules.update(hashlib.sha256(part).digest())
        self._rules.update((root / GLOSSARY).read_bytes())
        self._before = set(self._file.read_text().split()) if self._file.exists() else set()
        self._now: set[str] = set()

    def is_clean(self, path: Path) -> bool:
        """Return whether a file had no finding and nothing has changed since."""
        return self._digest(path) in self._before

    def note_clean(self, path: Path) -> None:
        """Note a file without a finding."""
        self._now.add(self._digest(path))

    def save(self, *, complete: bool) -> None:
        """Write what is noted; a run over some of the files forgets no others."""
        self._file.parent.mkdir(exist_ok=True)
        draft = self._file.with_suffix(".new")
        draft.write_text("\n".join(sorted(self._now if complete else self._now | self._before)))
        draft.replace(self._file)

    def _digest(self, path: Path) -> str:
        found = self._rules.copy()
        found.update(f"\0{path}\0".encode() + (self._root / path).read_bytes())
        return found.hexdigest()
