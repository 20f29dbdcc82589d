"""Nothing good is ever lost, whatever happens while writing or on the disk."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from heterotrain.checkpoint import CheckpointFolder, CheckpointWriter, Manifest
from heterotrain.state import flatten


def written(folder: CheckpointFolder, step: int, *, generation: int = 1) -> Manifest:
    """Write a checkpoint that knows its step."""
    return folder.write(
        flatten({"step": step, "x": torch.full((50,), step)}), generation=generation, step=step, now_s=0.0
    )


def loaded_step(folder: CheckpointFolder) -> int | None:
    """Return the step that a fresh start would continue from."""
    found = folder.load_newest()
    if found is None:
        return None
    manifest, state = found
    assert state["step"] == manifest.step
    torch.testing.assert_close(state["x"], torch.full((50,), manifest.step))
    return manifest.step


def test_the_newest_few_are_kept(tmp_path: Path) -> None:
    """Older ones go, data and manifest; nothing else is left behind."""
    folder = CheckpointFolder(tmp_path, keep=2)
    for step in (1, 2, 3, 4):
        written(folder, step)
    assert [manifest.step for manifest in folder.manifests()] == [4, 3]
    assert len(list(tmp_path.iterdir())) == 4
    assert loaded_step(folder) == 4


def test_what_dead_writers_left_goes_with_its_age(tmp_path: Path) -> None:
    """Half-written files older than what is kept are removed; those of a writer that may still live stay."""
    folder = CheckpointFolder(tmp_path, keep=1)
    old, new = ".checkpoint-g000000001-s000000000001-00000000", "checkpoint-g000000001-s000000000009-00000000.pt"
    (tmp_path / old).touch()
    (tmp_path / new).touch()
    (tmp_path / "somebody-elses.pt").touch()
    written(folder, 2)
    assert not (tmp_path / old).exists()
    assert (tmp_path / new).exists()
    assert (tmp_path / "somebody-elses.pt").exists()


def test_the_same_step_again_replaces_only_when_complete(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A second write of a step that fails half-way leaves the first one whole."""
    folder = CheckpointFolder(tmp_path, keep=2)
    written(folder, 1)
    calls = []

    def fails_the_second_time(descriptor: int) -> None:
        calls.append(descriptor)
        if len(calls) == 2:
            raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "fsync", fails_the_second_time)
    with pytest.raises(OSError, match="Input/output"):
        written(folder, 1)
    monkeypatch.undo()
    assert loaded_step(folder) == 1


def test_a_later_generation_outranks_a_higher_step(tmp_path: Path) -> None:
    """What a given-up writer wrote late is not what its successors continue from."""
    folder = CheckpointFolder(tmp_path, keep=3)
    written(folder, 5, generation=2)
    written(folder, 9, generation=1)
    assert loaded_step(folder) == 5


@pytest.mark.parametrize("damage", ["flip", "cut", "no data", "no manifest", "manifest cut", "other format"])
def test_a_damaged_checkpoint_is_passed_over(tmp_path: Path, damage: str) -> None:
    """The one before it is good and is taken."""
    folder = CheckpointFolder(tmp_path, keep=3)
    written(folder, 1)
    manifest = written(folder, 2)
    data, card = tmp_path / manifest.data, tmp_path / f"{manifest.data.rsplit('-', 1)[0]}.json"
    if damage == "flip":
        content = bytearray(data.read_bytes())
        content[len(content) // 2] ^= 255
        data.write_bytes(content)
    elif damage == "cut":
        data.write_bytes(data.read_bytes()[:-1])
    elif damage == "no data":
        data.unlink()
    elif damage == "no manifest":
        card.unlink()
    elif damage == "manifest cut":
        card.write_text(card.read_text()[:20])
    else:
        card.write_text(json.dumps(json.loads(card.read_text()) | {"format": 99}))
    assert loaded_step(folder) == 1


def test_no_checkpoint_at_all(tmp_path: Path) -> None:
    """An empty folder, or none, is a fresh start."""
    assert CheckpointFolder(tmp_path / "absent", keep=1).load_newest() is None


def test_a_full_disk_costs_nothing_that_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A failed write raises, leaves no scratch file, and the old checkpoint stays."""
    folder = CheckpointFolder(tmp_path, keep=1)
    written(folder, 1)
    before = sorted(tmp_path.iterdir())

    def full(_descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        written(folder, 2)
    monkeypatch.undo()
    assert sorted(tmp_path.iterdir()) == before
    assert loaded_step(folder) == 1


def test_the_writer_copies_before_it_returns(tmp_path: Path) -> None:
    """What training changes afterwards is not in the checkpoint."""
    folder, done = CheckpointFolder(tmp_path, keep=1), []
    writer = CheckpointWriter(folder, on_done=lambda manifest, seconds: done.append((manifest, seconds)))
    weights = torch.zeros(1000)
    writer.start({"step": 3, "x": weights}, generation=1, step=3)
    weights.fill_(1.0)
    writer.wait()
    found = folder.load_newest()
    assert found is not None
    assert float(found[1]["x"].sum()) == 0.0
    assert done[0][0].step == 3


def test_a_failed_write_is_told(tmp_path: Path) -> None:
    """Training goes on; whoever counts failures hears of it."""
    (tmp_path / "file").touch()
    done: list[Any] = []
    writer = CheckpointWriter(
        CheckpointFolder(tmp_path / "file" / "below", keep=1), on_done=lambda m, _s: done.append(m)
    )
    writer.start({"step": 1}, generation=1, step=1)
    writer.wait()
    assert done == [None]
