"""A good checkpoint is never lost, whatever fails during writing, on the disk or in the store."""

from __future__ import annotations

import errno
import json
import os
import resource
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import fsspec
import pytest
import torch
from heterotrain.checkpoints import storage
from heterotrain.checkpoints.checkpoint import CheckpointFolder
from heterotrain.checkpoints.manifest import Label, Manifest, new_mark
from heterotrain.checkpoints.part import cut, packed
from heterotrain.checkpoints.storage import Storage
from heterotrain.checkpoints.writer import CheckpointWriter, MissingParts, WriteRequest, WriteResult
from heterotrain.errors import UsageError
from heterotrain.state.tensors import Flat, flatten
from pyftpdlib.authorizers import DummyAuthorizer
from pyftpdlib.handlers import FTPHandler
from pyftpdlib.servers import FTPServer
from support.checkpoints import write
from support.ports import free_port
from support.s3_server import HAS_S3, s3_bucket


@pytest.fixture(params=["file", "memory", "ftp", *(["s3"] if HAS_S3 else [])])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """A folder of the local file system, one of a store without renaming, and one of each kind of real server."""
    if request.param == "s3":
        with s3_bucket() as bucket:
            yield f"s3://{bucket}/checkpoints"
        return
    if request.param == "file":
        yield f"file://{tmp_path}/checkpoints"
        return
    if request.param == "ftp":
        with served(tmp_path) as address:
            yield f"ftp://{address}/checkpoints"
        return
    fsspec.filesystem("memory").store.clear()
    yield "memory://bucket/checkpoints"
    fsspec.filesystem("memory").store.clear()


@contextmanager
def served(folder: Path) -> Iterator[str]:
    """Serve a folder by FTP; yield user, password and address as in a URI."""
    people = DummyAuthorizer()
    people.add_user("user", "word", str(folder), perm="elradfmwMT")
    handler = type("Handler", (FTPHandler,), {"authorizer": people})
    server = FTPServer(("127.0.0.1", 0), handler)
    stop = threading.Event()

    def serve() -> None:
        while not stop.is_set():
            server.serve_forever(timeout=0.05, blocking=False)

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield f"user:word@127.0.0.1:{server.address[1]}"
    finally:
        stop.set()
        thread.join()
        server.close_all()


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Retries need no pauses here."""
    monkeypatch.setattr(storage, "PAUSES_S", (0.0,))


def state_of(step: int) -> Flat:
    """Return a state that contains its step."""
    return flatten({"step": step, "x": torch.full((50,), step), "y": [torch.arange(7.0), torch.tensor(step)]})


def written(folder: CheckpointFolder, step: int, *, generation: int = 1, now_s: float = 0.0) -> Manifest:
    """Write a checkpoint that contains its step."""
    return write(folder, state_of(step), generation=generation, step=step, now_s=now_s)


def loaded_step(folder: CheckpointFolder) -> int | None:
    """Return the step from which a cold start would continue."""
    found = folder.load_newest()
    if found is None:
        return None
    manifest, state = found
    assert state["step"] == manifest.step
    torch.testing.assert_close(state["x"], torch.full((50,), manifest.step))
    torch.testing.assert_close(state["y"], [torch.arange(7.0), torch.tensor(manifest.step)])
    return manifest.step


def test_the_newest_few_are_kept(place: str) -> None:
    """Older ones are removed, data and manifest; no other files are left behind."""
    folder = CheckpointFolder(place, max_to_keep=2)
    for step in (1, 2, 3, 4):
        written(folder, step)
    assert [manifest.step for manifest in folder.manifests()] == [4, 3]
    assert len(folder.storage.names()) == 6
    assert loaded_step(folder) == 4


def test_files_of_dead_writers_are_removed_with_age(tmp_path: Path) -> None:
    """Incomplete files older than the kept checkpoints are removed; those of a possibly live writer stay."""
    folder = CheckpointFolder(tmp_path, max_to_keep=1)
    old = ".checkpoint-g000000001-s000000000001-00000000000a-p0of1.safetensors"
    new = "checkpoint-g000000001-s000000000009-00000000000b-p0of1.safetensors"
    for name in (old, new, "somebody-elses.safetensors"):
        (tmp_path / name).touch()
    written(folder, 2)
    assert not (tmp_path / old).exists()
    assert (tmp_path / new).exists()
    assert (tmp_path / "somebody-elses.safetensors").exists()


def test_a_later_generation_outranks_a_higher_step(place: str) -> None:
    """A late checkpoint of a writer that was given up is not restored and does not displace newer ones."""
    folder, given_up = CheckpointFolder(place, max_to_keep=1), CheckpointFolder(place, max_to_keep=1)
    written(folder, 5, generation=2)
    written(given_up, 9, generation=1)
    assert loaded_step(folder) == 5


@pytest.mark.parametrize("count", [1, 2, 5])
def test_a_state_in_parts_is_read_by_any_rank(place: str, count: int) -> None:
    """Parts are written in any order by several writers; the checkpoint exists only with the last one."""
    folder, flat = CheckpointFolder(place, max_to_keep=2), state_of(7)
    label = Label(generation=1, step=7, mark=123)
    parts = [cut(flat, index, count) for index in range(count)]
    data = [([(held.entry, own) for held, own in part], packed(part, None)) for part in parts]
    for index in reversed(range(count)):
        assert loaded_step(folder) is None
        folder.write_part(label, *data[index], index=index, count=count)
        if count > 1:
            assert (folder.parts_there(label, count) is None) == (index > 0)
    stored = folder.parts_there(label, count) if count > 1 else [folder.write_part(label, *data[0], index=0, count=1)]
    assert stored is not None
    folder.complete(label, flat.skeleton, stored, now_s=0.0)
    assert loaded_step(folder) == 7


@pytest.mark.parametrize("damage", ["flip", "cut", "longer", "no data", "no manifest", "manifest cut", "other format"])
def test_a_damaged_checkpoint_is_skipped(place: str, damage: str) -> None:
    """The previous one is good and is restored."""
    folder = CheckpointFolder(place, max_to_keep=3)
    written(folder, 1)
    manifest = written(folder, 2)
    files, _, root = fsspec.get_fs_token_paths(place)
    data = f"{root[0] if isinstance(root, list) else root}/{manifest.parts[0].name}"
    card = data.replace("-p0of1.safetensors", ".json")
    content = files.cat_file(data)
    if damage == "flip":
        half = len(content) // 2
        files.pipe_file(data, content[:half] + bytes([content[half] ^ 255]) + content[half + 1 :])
    elif damage == "cut":
        files.pipe_file(data, content[:-1])
    elif damage == "longer":
        files.pipe_file(data, content + b"x")
    elif damage == "no data":
        files.rm_file(data)
    elif damage == "no manifest":
        files.rm_file(card)
    elif damage == "manifest cut":
        files.pipe_file(card, files.cat_file(card)[:20])
    else:
        files.pipe_file(card, json.dumps(json.loads(files.cat_file(card)) | {"format": 99}).encode())
    assert loaded_step(folder) == 1


def test_a_job_does_not_start_over_where_checkpoints_exist(place: str) -> None:
    """When all are damaged, the user decides; nothing is removed."""
    folder = CheckpointFolder(place, max_to_keep=3)
    manifest = written(folder, 1)
    folder.storage.remove([manifest.parts[0].name])
    before = sorted(folder.storage.names())
    with pytest.raises(UsageError, match="none of the 1 checkpoints"):
        folder.load_newest()
    assert sorted(folder.storage.names()) == before


def test_no_checkpoint_at_all(tmp_path: Path) -> None:
    """An empty or missing folder is a cold start."""
    assert CheckpointFolder(tmp_path / "absent", max_to_keep=1).load_newest() is None
    assert CheckpointFolder(tmp_path / "absent", max_to_keep=1).newest_order() == (-1, -1)


@pytest.mark.parametrize("uri", ["s3://bucket/x", "nosuch://x"])
def test_an_unknown_protocol_is_reported(uri: str) -> None:
    """The message names the missing package, or the known protocols."""
    with pytest.raises(UsageError, match=r"training image"):
        Storage(uri)


def test_a_store_that_refuses_the_first_connection_is_one_sentence() -> None:
    """Without the password that the URI holds."""
    with pytest.raises(UsageError, match=r"'ftp://.*' cannot be reached \(.*refused.*\): correct the") as caught:
        Storage(f"ftp://user:geheim@127.0.0.1:{free_port()}/folder")
    assert "geheim" not in str(caught.value)


def test_two_writers_of_one_step_do_not_disturb_each_other(place: str) -> None:
    """Each has files of its own; a reader gets one complete checkpoint."""
    folders = [CheckpointFolder(place, max_to_keep=1) for _ in range(2)]
    threads = [threading.Thread(target=written, args=(folder, 4)) for folder in folders]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert loaded_step(folders[0]) == 4


# -- in the background -----------------------------------------------------------------------------------------------


def a_writer(folder: CheckpointFolder) -> tuple[CheckpointWriter, list[WriteResult]]:
    """Return a writer and the list of its attempts' results."""
    done: list[WriteResult] = []
    return CheckpointWriter(folder, on_done=done.append), done


def whole(step: int) -> WriteRequest:
    """Return the request for a state that one rank writes."""
    return WriteRequest(label=Label(generation=1, step=step, mark=new_mark()))


def test_the_writer_copies_before_it_returns(place: str) -> None:
    """Later changes by training or by a later copy are not in the checkpoint."""
    folder = CheckpointFolder(place, max_to_keep=2)
    writer, done = a_writer(folder)
    weights = torch.zeros(1000)
    for step in (3, 4):
        writer.start({"step": step, "x": weights}, whole(step=step))
        weights.fill_(float(step))
    assert writer.wait()
    found = folder.load_newest()
    assert found is not None
    assert found[1]["x"].unique().tolist() == [3.0]
    assert [written.step for written in done] == [3, 4]
    assert all(written.manifest and written.size_bytes == 4000 for written in done)


def test_prepared_memory_is_used(place: str) -> None:
    """The copy uses prepared memory; for another length, new memory is allocated."""
    writer, done = a_writer(CheckpointFolder(place, max_to_keep=2))
    writer.prepare(4000, pin=False)
    assert writer.wait()
    assert writer._buffer is not None
    taken = writer._buffer.data_ptr()
    writer.start({"x": torch.zeros(1000)}, whole(step=1))
    assert writer.wait()
    assert writer._buffer.data_ptr() == taken
    writer.start({"x": torch.zeros(1001)}, whole(step=2))
    assert writer.wait()
    assert [written.size_bytes for written in done] == [4000, 4004]


@pytest.mark.parametrize("fault", ["full disk", "no folder", "broken manifest"])
def test_a_failed_write_is_reported_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    """Training continues, the callback gets the failure, and the checkpoint of the same step before it stays."""
    place, calls = tmp_path / "checkpoints", []
    folder = CheckpointFolder(place, max_to_keep=2)
    written(folder, 1)
    before, synced, limits = sorted(place.iterdir()), os.fsync, resource.getrlimit(resource.RLIMIT_FSIZE)

    def fails_at_the_manifest(descriptor: int) -> None:
        calls.append(descriptor)
        if len(calls) == 5:  # data and its folder, skeleton and its folder, manifest
            raise OSError(errno.EIO, "Input/output error")
        synced(descriptor)

    if fault == "full disk":  # the kernel refuses further data
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, limits[1]))
    elif fault == "no folder":
        place.rename(tmp_path / "elsewhere")
        place.touch()
    else:
        monkeypatch.setattr(os, "fsync", fails_at_the_manifest)
    writer, done = a_writer(folder)
    try:
        writer.start({"step": 1, "x": torch.zeros(50)}, whole(step=1))
        writer.wait()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    monkeypatch.undo()
    assert done[0].manifest is None
    assert {"full disk": "too large", "no folder": "File exists", "broken manifest": "Input/output"}[fault] in (
        done[0].failure
    )
    if fault == "no folder":
        place.unlink()
        (tmp_path / "elsewhere").rename(place)
    assert sorted(place.iterdir()) == before
    assert loaded_step(folder) == 1


def test_a_store_that_hangs_does_not_stop_training(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Training waits only for the copy; the duration of the rest is visible meanwhile."""
    release = threading.Event()
    put = Storage.put

    def hangs(self: Storage, name: str, chunks: list[memoryview], **options: str) -> storage.StoredFile:
        release.wait()
        return put(self, name, chunks, **options)

    monkeypatch.setattr(Storage, "put", hangs)
    folder = CheckpointFolder(place, max_to_keep=1)
    writer, done = a_writer(folder)
    writer.start({"step": 1}, whole(step=1))
    assert writer.running_s is not None
    assert not writer.wait(0.0)
    assert not done
    release.set()
    assert writer.wait()
    assert done[0].manifest is not None


@pytest.mark.parametrize("lost", [True, False])
def test_parts_that_never_come(place: str, lost: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """There is no checkpoint then, no file is left behind, and the reason is reported."""
    monkeypatch.setattr("heterotrain.checkpoints.writer.PATIENCE_S", 3600.0 if lost else 0.0)
    folder = CheckpointFolder(place, max_to_keep=1)
    writer, done = a_writer(folder)
    written(folder, 1)
    before = sorted(folder.storage.names())
    request = WriteRequest(label=Label(generation=1, step=2, mark=5), index=1, count=2)
    writer.start({"step": 2, "x": torch.ones(9)}, request)
    if lost:
        writer.stop_waiting_for_parts()
    assert writer.wait()
    assert done[0].missing is (MissingParts.LOST if lost else MissingParts.UNSEEN)
    assert sorted(folder.storage.names()) == before
    assert loaded_step(folder) == 1
