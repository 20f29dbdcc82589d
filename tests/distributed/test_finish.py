"""``job.finish`` on one rank ends the training on all of them, after the same step, wherever it is called."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from distributed.harness import assert_same_weights
from distributed.own_ranks import OwnRanks

SCRIPT = "distributed.finish_scripts:train"


@pytest.mark.parametrize(
    "case",
    [
        {"where": "after", "ranks": [1], "at": 4},
        {"where": "after", "ranks": [0, 1, 2], "at": 4},
        {"where": "after", "ranks": [1], "at": 4, "kind": "norm"},
        {"where": "before", "ranks": [2], "at": 4},
        {"where": "epoch", "ranks": [0], "at": 6, "kind": "norm"},
        {"where": "steps", "ranks": [0], "at": 5, "kind": "sum"},
        {"where": "after", "ranks": [1], "at": 4, "kind": "passes"},
    ],
)
def test_one_rank_ends_the_training_of_all(own_ranks: OwnRanks, tmp_path: Path, case: dict[str, Any]) -> None:
    """All have committed the same steps, and have the weights and running statistics of one process after them."""
    (tmp_path / "alone").mkdir()
    (alone,) = own_ranks.start(SCRIPT, out=str(tmp_path / "alone"), **(case | {"ranks": [0]}))
    started = own_ranks.start(SCRIPT, world_size=3, out=str(tmp_path), **case)
    assert [rank.ended() for rank in (alone, *started)] == [0] * 4, "\n".join(rank.log() for rank in started)
    expected = dict(torch.load(tmp_path / "alone" / "weights-0.pt"))
    for rank in range(3):
        assert (tmp_path / f"steps-{rank}").read_text() == str(case["at"])
        assert_same_weights(dict(torch.load(tmp_path / f"weights-{rank}.pt")), expected)
    assert "is repeated" not in "".join(rank.log() for rank in started)
