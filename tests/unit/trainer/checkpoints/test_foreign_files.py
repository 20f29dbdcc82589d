"""What others write into a folder of checkpoints: no name leads out of it, no link is followed, no code runs."""

from __future__ import annotations

import hashlib
import json
import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from heterotrain.checkpoints.checkpoint import RECORD, CheckpointFolder
from heterotrain.checkpoints.manifest import Label, Manifest, decode_manifest, decode_part
from heterotrain.checkpoints.storage import DamagedFileError, Storage, StoredFile
from heterotrain.errors import UsageError
from heterotrain.state.tensors import flatten
from hypothesis import given, settings
from hypothesis import strategies as st
from support.checkpoints import write
from support.repeat import times


def written(folder: CheckpointFolder, step: int, value: float = 0.0) -> Manifest:
    """Write a checkpoint with one tensor."""
    state = flatten({"step": step, "x": torch.full((50,), value)})
    return write(folder, state, step=step)


def forged(path: Path, **changes: Any) -> None:
    """Change fields of a manifest."""
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def stated(path: Path, name: str | None = None) -> dict[str, Any]:
    """Return an honest entry of a file for a manifest."""
    content = path.read_bytes()
    return {"name": name or path.name, "size_bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}


@pytest.fixture
def folder(tmp_path: Path) -> CheckpointFolder:
    """A folder with a good checkpoint of step 1, and one of step 2 to be forged."""
    found = CheckpointFolder(tmp_path / "own", max_to_keep=9)
    written(found, 1)
    return found


def continues_from(folder: CheckpointFolder) -> int:
    """Return the step from which a job continues."""
    found = folder.load_newest()
    assert found is not None
    return found[0].step


@pytest.mark.parametrize("place", ["../other/{}", "/{folder}/../other/{}", "sub/{}", "..", ""])
def test_a_manifest_names_no_file_elsewhere(folder: CheckpointFolder, tmp_path: Path, place: str) -> None:
    """Not even one with the right checksum: it is another job's."""
    other = CheckpointFolder(tmp_path / "other", max_to_keep=9)
    theirs = tmp_path / "other" / written(other, 2, 9.0).parts[0].name
    mine = written(folder, 2)
    name = place.format(theirs.name, folder=tmp_path / "own")
    forged(tmp_path / "own" / f"{mine.stem}.json", parts=[stated(theirs, name)])
    assert continues_from(folder) == 1


def test_a_manifest_names_no_file_of_another_checkpoint(folder: CheckpointFolder, tmp_path: Path) -> None:
    mine, third = written(folder, 2), written(folder, 3)
    forged(tmp_path / "own" / f"{third.stem}.json", parts=[stated(tmp_path / "own" / mine.parts[0].name)])
    assert continues_from(folder) == 2


@pytest.mark.parametrize(
    "changes",
    [
        {"generation": 999_999_999}, {"step": 7}, {"generation": "1"}, {"step": True}, {"hooks": [-5, 0]},
        {"hooks": [0]}, {"parts": {}}, {"parts": [3]}, {"skeleton": None}, {"written_unix_s": "now"},
        {"written_unix_s": float("inf")}, {"tensors": [{"name": "x"}]}, {"tensors": 5}, {"format": [3]},
    ],
    ids=str,
)  # fmt: skip
def test_a_manifest_with_other_values_is_skipped(
    folder: CheckpointFolder, tmp_path: Path, changes: dict[str, Any]
) -> None:
    forged(tmp_path / "own" / f"{written(folder, 2).stem}.json", **changes)
    assert continues_from(folder) == 1


@pytest.mark.parametrize(
    "changes",
    [
        {"part": -1}, {"part": 1}, {"at": -8}, {"at": 2**60}, {"start": -1}, {"stop": 51}, {"start": 40, "stop": 30},
        {"name": 5}, {"name": None},
    ],
    ids=str,
)  # fmt: skip
def test_a_tensor_outside_of_its_part_is_refused(
    folder: CheckpointFolder, tmp_path: Path, changes: dict[str, Any]
) -> None:
    path = tmp_path / "own" / f"{written(folder, 2).stem}.json"
    tensors = json.loads(path.read_text())["tensors"]
    forged(path, tensors=[tensors[0] | changes])
    assert continues_from(folder) == 1


@pytest.mark.parametrize("at", [0, 4])
def test_ranges_that_overlap_do_not_stand_for_those_that_are_absent(
    folder: CheckpointFolder, tmp_path: Path, at: int
) -> None:
    """As many elements as the tensor has, but not all of them."""
    path = tmp_path / "own" / f"{written(folder, 2).stem}.json"
    whole = json.loads(path.read_text())["tensors"][0]
    half = whole["stop"] // 2
    second = {"start": 1, "stop": whole["stop"] - half + 1, "at": whole["at"] + at}
    forged(path, tensors=[whole | {"stop": half}, whole | second])
    assert continues_from(folder) == 1


def test_a_skeleton_that_would_run_code_runs_none(folder: CheckpointFolder, tmp_path: Path) -> None:
    """Its checksum is right, because whoever writes it writes the manifest."""

    class Bomb:
        def __reduce__(self) -> tuple[Any, ...]:
            return (os.mkdir, (str(tmp_path / "ran"),))

    mine = written(folder, 2)
    path = tmp_path / "own" / mine.skeleton.name
    for content in (pickle.dumps({"x": Bomb()}), None):
        if content is None:
            torch.save({"x": Bomb()}, path)
        else:
            path.write_bytes(content)
        forged(tmp_path / "own" / f"{mine.stem}.json", skeleton=stated(path))
        assert continues_from(folder) == 1
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("kind", ["part", "skeleton", "manifest"])
def test_links_are_refused(folder: CheckpointFolder, tmp_path: Path, kind: str) -> None:
    """Also those to a file with the right content."""
    mine = written(folder, 2)
    name = {"part": mine.parts[0].name, "skeleton": mine.skeleton.name, "manifest": f"{mine.stem}.json"}[kind]
    (tmp_path / "own" / name).rename(tmp_path / name)
    (tmp_path / "own" / name).symlink_to(tmp_path / name)
    assert continues_from(folder) == 1
    with pytest.raises(DamagedFileError, match="symbolic link"):
        folder.storage.get(name, most_bytes=1 << 20)


def test_a_named_pipe_is_refused_and_not_waited_for(folder: CheckpointFolder, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "own" / f"{Label(generation=9, step=9, mark=9).stem}.json")
    assert continues_from(folder) == 1


def test_a_link_in_the_way_of_a_write_is_replaced(folder: CheckpointFolder, tmp_path: Path) -> None:
    """Its target keeps its content, both for the final name and for that of the incomplete file."""
    victim = tmp_path / "victim"
    victim.write_text("precious")
    label = Label(generation=2, step=5, mark=6)
    for name in (RECORD, f".{RECORD}", f".{label.manifest}", label.skeleton, f".{label.part(0, 0, ending='json')}"):
        (tmp_path / "own" / name).symlink_to(victim)
    state = flatten({"step": 5})
    part = folder.write_part(label, [], torch.empty(0, dtype=torch.uint8), index=0, count=1)
    folder.complete(label, state.skeleton, [part], now_s=0.0, record=b"{}")
    assert victim.read_text() == "precious"
    assert (tmp_path / "own" / RECORD).read_bytes() == b"{}"
    assert not (tmp_path / "own" / RECORD).is_symlink()
    assert continues_from(folder) == 5


def test_a_link_in_place_of_a_jobs_folder_is_refused(tmp_path: Path) -> None:
    """Where jobs share a volume, a stranger may have made it; a user's own folder may be a link."""
    (tmp_path / "elsewhere").mkdir()
    link = tmp_path / "own"
    link.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UsageError, match="is a symbolic link"):
        Storage(str(link), shared=True)
    written(CheckpointFolder(link, max_to_keep=1), 1)
    link.unlink()
    folder = CheckpointFolder(link, max_to_keep=1, shared=True)
    link.symlink_to(tmp_path / "elsewhere")  # made after the start
    with pytest.raises(OSError, match="own"):
        folder.storage.put("x", [b"x"])
    assert not (tmp_path / "elsewhere" / "x").exists()


@pytest.mark.parametrize("name", ["../x", "/etc/passwd", "a/b", "..", ".", "", "a\0b", "a\\b"])
def test_no_name_leads_out_of_a_store(tmp_path: Path, name: str) -> None:
    (tmp_path / "x").write_text("x")
    for uri in (str(tmp_path / "own"), "memory://own"):
        storage = Storage(uri)
        with pytest.raises(DamagedFileError):
            storage.put(name, [b"x"])
        with pytest.raises(DamagedFileError):
            storage.get(name, most_bytes=9)
        with pytest.raises(DamagedFileError):
            storage.get_into(StoredFile(name=name, size_bytes=1, sha256=""), [memoryview(bytearray(1))])


def test_sizes_in_a_manifest_reserve_no_memory(folder: CheckpointFolder, tmp_path: Path) -> None:
    mine = written(folder, 2)
    skeleton = stated(tmp_path / "own" / mine.skeleton.name) | {"size_bytes": 2**53}
    forged(tmp_path / "own" / f"{mine.stem}.json", skeleton=skeleton)
    assert continues_from(folder) == 2  # it is read as far as it goes, and its checksum is right


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
FIELDS = ["format", "generation", "step", "skeleton", "parts", "written_unix_s", "hooks", "tensors", "file"]


@settings(max_examples=times(gate=40, every=1000))
@given(st.dictionaries(st.sampled_from(FIELDS), JSON, max_size=10) | JSON | st.binary(max_size=40))
def test_no_text_of_a_manifest_or_a_part_raises_another_error(raw: Any) -> None:
    name = Label(generation=1, step=2, mark=3).manifest
    text = raw if isinstance(raw, bytes) else json.dumps(raw).encode()
    for decode in (decode_manifest, decode_part):
        with pytest.raises(ValueError, match=r".+"):
            decode(name, text)
