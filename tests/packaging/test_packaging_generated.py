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
    if path.suffix != ".svg"  # the last digits of a simulation differ between processors
]  # fmt: skip


@pytest.mark.parametrize("path", CASES)
def test_a_generated_file_is_current(path: Path) -> None:
    if path.read_text(encoding="utf-8") != FILES[path]():
        pytest.fail(f"{path.relative_to(REPOSITORY)} is not made from the present sources: run `make generate`")


def test_the_picture_of_a_job_shows_a_healthy_one_that_lost_a_node() -> None:
    picture = (REPOSITORY / "docs/pictures/top.svg").read_text(encoding="utf-8").replace("&#160;", " ")
    assert all(words in picture for words in ("41 %", "3 workers train", "1 disruption,", "WorkerDisrupted", "t4-spot"))
    assert not any(words in picture for words in ("Failed", "Degraded", "Restarting"))
