"""SIGINT and SIGTERM outside an operator: the step ends, the checkpoint is written, and the exit code tells."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from distributed.harness import Zygote
from distributed.own_ranks import OwnRank, OwnRanks
from distributed.stopped_scripts import GATE_STEP
from heterotrain.checkpoints.checkpoint import CheckpointFolder
from heterotrain.stop_signals import SAME_S

SCRIPT = "distributed.stopped_scripts:train"


@pytest.fixture
def start(zygote: Zygote, tmp_path: Path) -> Iterator[Callable[..., list[OwnRank]]]:
    """Yield a function that starts the script in the test's folder."""
    ranks = OwnRanks(zygote, tmp_path)
    yield lambda **arguments: ranks.start(SCRIPT, folder=str(tmp_path), **arguments)
    ranks.close()


def newest_step(folder: Path) -> int | None:
    """Return the step of the newest checkpoint, ``None`` without one."""
    newest = CheckpointFolder(folder / "checkpoints", max_to_keep=1).newest()
    return None if newest is None else newest.step


@pytest.mark.parametrize("world_size", [0, 2])
def test_interrupted_ranks_save_their_step_and_continue_from_it(
    start: Callable[..., list[OwnRank]], tmp_path: Path, world_size: int
) -> None:
    """Ctrl-C reaches all ranks, also those that wait for another one. The exit code is 130, the message says where."""
    ranks = start(world_size=world_size)
    ranks[0].until_exists(tmp_path / "reached-step")
    for rank in ranks:
        rank.signal(signal.SIGINT)
    ranks[0].until_said("SIGINT: the training ends after this step")
    (tmp_path / "open-step").touch()
    assert [rank.ended() for rank in ranks] == [130] * len(ranks), [rank.log() for rank in ranks]
    assert newest_step(tmp_path) == GATE_STEP + 1
    logs = "".join(rank.log() for rank in ranks)
    assert f"its checkpoint is in {tmp_path / 'checkpoints'}" in logs  # says the rank that has written it
    assert "Traceback" not in logs
    (again,) = start(gates=False)
    assert again.ended() == 0
    assert f"begins with step {GATE_STEP + 1}" in again.log()


def test_a_second_interrupt_ends_the_process_at_once(start: Callable[..., list[OwnRank]], tmp_path: Path) -> None:
    """Nothing is saved, though the step would never have ended."""
    (rank,) = start()
    rank.until_exists(tmp_path / "reached-step")
    rank.signal(signal.SIGINT)
    rank.until_said("once more ends it at once")
    time.sleep(SAME_S)
    rank.signal(signal.SIGINT)
    assert rank.ended() == -signal.SIGINT
    assert newest_step(tmp_path) is None


def test_a_script_may_catch_the_interrupt(start: Callable[..., list[OwnRank]], tmp_path: Path) -> None:
    """It does so after the checkpoint."""
    (rank,) = start(catches=True)
    rank.until_exists(tmp_path / "reached-step")
    rank.signal(signal.SIGINT)
    rank.until_said("SIGINT: the training ends after this step")
    (tmp_path / "open-step").touch()
    assert rank.ended() == 0
    assert (tmp_path / "caught").exists()
    assert newest_step(tmp_path) == GATE_STEP + 1


@pytest.mark.parametrize("fails", [0, 1])
def test_an_error_of_one_rank_leaves_a_checkpoint(
    start: Callable[..., list[OwnRank]], tmp_path: Path, fails: int
) -> None:
    """The lowest rank writes it, whoever has failed."""
    ranks = start(world_size=2, gates=False, fails=fails)
    assert [rank.ended() for rank in ranks] == [1, 1], ranks[0].log()
    assert newest_step(tmp_path) == GATE_STEP
    assert f"after {GATE_STEP} steps: its checkpoint is in" in ranks[0].log()


def test_signals_to_the_process_group_leave_loader_processes_alone(
    start: Callable[..., list[OwnRank]], tmp_path: Path
) -> None:
    """While their server starts and while they start; the rank saves its first step, then all of them end.

    Processes that the script forks from the same server can still be terminated.
    """
    (rank,) = start(workers=2)
    rank.until(lambda: server_of(rank.pid), "a server for loader processes")
    os.killpg(rank.pid, signal.SIGTERM)
    for worker in range(2):
        rank.until_exists(tmp_path / f"reached-loader-{worker}")
        os.killpg(rank.pid, signal.SIGTERM)
        (tmp_path / f"open-loader-{worker}").touch()
    assert rank.ended() == 128 + signal.SIGTERM, rank.log()
    assert newest_step(tmp_path) == 1
    rank.until(lambda: not members_of(rank.pid), "loaders and their server end")


def server_of(group: int) -> bool:
    """Return whether a process of the group serves forks."""
    return any(b"forkserver" in Path(f"/proc/{pid}/cmdline").read_bytes() for pid in members_of(group))


def members_of(group: int) -> list[int]:
    """Return the living processes of a group, without its first one."""
    found = []
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit() or int(folder.name) == group:
            continue
        try:
            state, _, own = (folder / "stat").read_text().rpartition(")")[2].split()[:3]
        except OSError:
            continue
        if int(own) == group and state != "Z":
            found.append(int(folder.name))
    return found
