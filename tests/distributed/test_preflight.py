"""Checks between real ranks: the network of every pair, clocks, and one report of all ranks."""

from __future__ import annotations

from pathlib import Path

from support.ports import free_port
from support.zygote import Zygote


def test_ranks_report_together_and_a_failure_of_one_is_that_of_all(zygote: Zygote, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    port = free_port()
    ranks = [
        zygote.launch(
            tmp_path, "-m", "heterotrain.preflight", "--store", str(tmp_path / ("file" if rank else "folder")),
            RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", MASTER_PORT=str(port), MASTER_ADDR="127.0.0.1",
        )
        for rank in range(2)
    ]  # fmt: skip
    ended = [rank.ended() for rank in ranks]
    assert [each.code for each in ended] == [1, 1], ended[0].text
    first, second = (each.stdout for each in ended)
    # gloo of PyTorch 2.10 prints a line of its own on each rank
    own = [line for line in second.splitlines() if not line.startswith("[Gloo]")]
    assert own == [], "rank 0 reports for all"
    assert "1 pairs: median" in first
    assert "the clocks of 2 ranks agree" in first
    assert "is a file: name a folder" in first
    assert "1 of " in first.splitlines()[-1]
