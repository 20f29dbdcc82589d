"""The lineage of the final weights, read from all ranks' logs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from heterotrain.data.sample_log import SampleLog
from support.lineage import lineage


def a_line(step: int, rank: int, *, formation: int = 0, generation: int = 1, **fields: Any) -> dict[str, Any]:
    """Return a rank's line about a step of four samples that are shared by two ranks."""
    batch = [4 * step, 4 * step + 1, 4 * step + 2, 4 * step + 3]
    ids = batch[:3] if rank == 0 else batch[3:]
    plain = {"epoch": step // 2, "step": step, "generation": generation, "formation": formation, "rank": rank}
    return plain | {"shares": [3, 1], "ids": ids, "batch_ids": batch} | fields


def test_epochs_in_order_from_any_rank(tmp_path: Path) -> None:
    """A rank that is killed right after a commit writes no line; the other rank's line is enough."""
    one, other = SampleLog(str(tmp_path), name="a"), SampleLog(str(tmp_path), name="b")
    for step in (0, 1, 2):
        one.write(a_line(step, 0))
    other.write(a_line(0, 1))
    (tmp_path / "b.jsonl").open("a").write('{"epoch": 0, "st')
    assert lineage(tmp_path) == {0: list(range(8)), 1: [8, 9, 10, 11]}


def test_the_newest_formation_wins(tmp_path: Path) -> None:
    """A step that one rank committed and the others repeated counts once, as repeated."""
    log = SampleLog(str(tmp_path), name="a")
    log.write(a_line(0, 0, batch_ids=[9, 8, 7, 6], ids=[9, 8, 7]))
    log.write(a_line(0, 0, formation=1))
    assert lineage(tmp_path) == {0: [0, 1, 2, 3]}


def test_a_contradiction_is_an_error(tmp_path: Path) -> None:
    """Ranks that trained the wrong samples are detected."""
    log = SampleLog(str(tmp_path), name="a")
    log.write(a_line(0, 0))
    log.write(a_line(0, 1, ids=[2]))
    with pytest.raises(ValueError, match="disagree on the samples of step 0"):
        lineage(tmp_path)
