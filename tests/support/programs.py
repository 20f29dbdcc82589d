"""Programs that tests run: from the PATH, or from the local cluster's cache.

``@pytest.mark.needs_program("helm")`` skips a test where its program is missing. Continuous integration installs every
program, so a missing one fails the test there.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Final

CACHE: Final = Path(os.environ.get("HETEROTRAIN_CACHE") or Path.home() / ".cache/heterotrain") / "bin"


def program(name: str) -> str | None:
    """Return the path of a program, or None where there is none."""
    cached = CACHE / name
    return shutil.which(name) or (str(cached) if cached.exists() else None)


def missing(names: Iterable[str]) -> str:
    """Return a sentence about the programs that are missing, or an empty text."""
    absent = [name for name in names if program(name) is None]
    return f"{' and '.join(absent)} not found: run `make images` once" if absent else ""
