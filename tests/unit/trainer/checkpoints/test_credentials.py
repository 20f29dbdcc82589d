"""Credentials in files that others renew: connections are made again when a file changes, and only then."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from heterotrain import ShardCache, credential_files
from heterotrain.checkpoints.storage import Storage


@pytest.fixture
def secret(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the mounted file, which is a link into a folder that is replaced as a whole, as the kubelet does it."""
    for name in credential_files.FILES:
        monkeypatch.setenv(name, str(tmp_path / "missing"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    (tmp_path / "credentials").symlink_to("..data/credentials")
    renew(tmp_path, 1)
    return tmp_path


def renew(folder: Path, number: int) -> None:
    """Replace the file's folder."""
    (folder / f"..{number}").mkdir()
    (folder / f"..{number}" / "credentials").write_text(f"key {number}")
    (folder / "new").symlink_to(f"..{number}")
    (folder / "new").rename(folder / "..data")


def test_a_replaced_secret_is_another_version(secret: Path) -> None:
    before = credential_files.version()
    assert credential_files.version() == before
    renew(secret, 2)
    assert credential_files.version() != before
    assert credential_files.version({"HOME": "/nonexistent"}) is not None


def test_a_store_is_connected_again_when_the_secret_changes(secret: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    connections: list[str] = []
    connect = Storage._connect

    def counted(self: Storage) -> Any:
        connections.append((secret / "credentials").read_text())
        return connect(self)

    monkeypatch.setattr(Storage, "_connect", counted)
    storage = Storage("memory://credentials")
    for _ in range(2):
        storage.put("a", [b"1"])
    del connections[:-1]
    renew(secret, 2)
    for _ in range(2):
        storage.put("a", [b"2"])
    assert storage.get("a", most_bytes=9) == b"2"
    assert connections == ["key 1", "key 2"]


def test_shards_are_read_with_the_new_credentials(secret: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cleared: list[str] = []
    from fsspec.implementations.memory import MemoryFileSystem  # noqa: PLC0415  # its class is changed here

    monkeypatch.setattr(MemoryFileSystem, "clear_instance_cache", lambda: cleared.append("x"))
    MemoryFileSystem.store.clear()
    files = MemoryFileSystem()
    files.pipe("/shards/0.bin", b"one")
    cache = ShardCache(secret / "cache", max_bytes=100)
    for expected in ([], ["x"]):
        for _ in range(2):
            with cache.local("memory://shards/0.bin") as path:
                assert Path(path).read_bytes() == b"one"
        assert cleared == expected
        renew(secret, 2 + len(cleared)) if not cleared else None
