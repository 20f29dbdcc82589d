"""Files that are made from others are those that ``make generate`` writes."""

from __future__ import annotations

from pathlib import Path

import pytest
from lab import chart_files
from lab.cluster import REPOSITORY
from lab.generated import FILES

CASES = [
    pytest.param(path, id=str(path.relative_to(REPOSITORY)),
                 marks=[pytest.mark.needs_program("helm")] if path == chart_files.MANIFEST else [])
    for path in FILES
]  # fmt: skip


@pytest.mark.parametrize("path", CASES)
def test_a_generated_file_is_current(path: Path) -> None:
    if path.read_text(encoding="utf-8") != FILES[path]():
        pytest.fail(f"{path.relative_to(REPOSITORY)} is not made from the present sources: run `make generate`")
