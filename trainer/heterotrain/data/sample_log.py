"""A log of committed samples: the proof that every sample entered the weights exactly once.

Each rank appends one JSON line for each committed step. A step may appear under several formations, when one rank
committed it and the others then repeated it without that rank. The weights that survive are those of the newest
formation.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


class SampleLog:
    """One rank's log file; each line is flushed immediately."""

    def __init__(self, folder: str, *, name: str) -> None:
        """Open ``folder/name.jsonl`` for appending.

        Raises:
            OSError: the folder cannot be made, or the file cannot be written.
        """
        path = Path(folder)
        path.mkdir(parents=True, exist_ok=True)
        self._file = (path / f"{name}.jsonl").open("a", encoding="utf-8")

    def write(self, line: dict[str, Any]) -> None:
        """Append one committed step."""
        self._file.write(json.dumps(line, separators=(",", ":")) + "\n")
        self._file.flush()
