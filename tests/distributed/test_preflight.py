"""Checks between real ranks: the network of every pair, clocks, and one report of all ranks."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from support.ports import free_port


def test_ranks_report_together_and_a_failure_of_one_is_that_of_all(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    port = free_port()
    ranks = [
        subprocess.Popen(
            [sys.executable, "-m", "heterotrain.preflight", "--store", str(tmp_path / ("file" if rank else "folder"))],
            env=os.environ | {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "MASTER_PORT": str(port),
                              "MASTER_ADDR": "127.0.0.1", "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE, text=True,
        )
        for rank in range(2)
    ]  # fmt: skip
    first, second = (rank.communicate(timeout=300)[0] for rank in ranks)
    assert [rank.returncode for rank in ranks] == [1, 1]
    # gloo of PyTorch 2.10 prints a line of its own on each rank
    own = [line for line in second.splitlines() if not line.startswith("[Gloo]")]
    assert own == [], "rank 0 reports for all"
    assert "1 pairs: median" in first
    assert "the clocks of 2 ranks agree" in first
    assert "is a file: name a folder" in first
    assert "1 of " in first.splitlines()[-1]
