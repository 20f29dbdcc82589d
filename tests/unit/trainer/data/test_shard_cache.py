"""Remote shards are copied once for a machine, and their copies stay within the bound."""

from __future__ import annotations

import fcntl
import http.server
import json
import os
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import fsspec
import pytest
from heterotrain import ShardCache, Shards
from heterotrain.errors import UsageError
from support.zygote import Zygote

SIZE = 1000
READER = """
import json, random, sys
from heterotrain import ShardCache
cache, uris = ShardCache(sys.argv[1], max_bytes=int(sys.argv[2])), json.loads(sys.argv[3])
chosen = random.Random(int(sys.argv[4]))
for _ in range(40):
    number = chosen.randrange(len(uris))
    with cache.local(uris[number]) as path:
        assert open(path, "rb").read() == bytes([number]) * 1000
"""


@pytest.fixture
def store() -> Iterator[Any]:
    """Give a store with twelve shards of 1000 bytes, in this process."""
    files = fsspec.filesystem("memory")
    for number in range(12):
        files.pipe(f"/shards/{number}.bin", bytes([number]) * SIZE)
    yield files
    files.rm("/shards", recursive=True)


def uri(number: int) -> str:
    return f"memory://shards/{number}.bin"


def total(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.iterdir())


def on_disk(folder: Path) -> int:
    """Return the bytes of all copies, also of unfinished ones, while no process makes room."""
    found: dict[str, int] = {}
    if (folder / "lock").exists():
        with (folder / "lock").open("rb") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            for path in folder.iterdir():
                if path.suffix != ".reserved":
                    with suppress(FileNotFoundError):
                        found[path.name.removesuffix(".data")] = path.stat().st_size
    return sum(found.values())


def read(cache: ShardCache, number: int) -> bytes:
    with cache.local(uri(number)) as path:
        return Path(path).read_bytes()


def test_a_shard_is_copied_once(store: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Later, it is read from the disk."""
    cache, copies = ShardCache(tmp_path / "cache", max_bytes=5 * SIZE), []
    get = type(store).get_file
    monkeypatch.setattr(type(store), "get_file", lambda self, *names: (copies.append(names[0]), get(self, *names))[1])
    assert [read(cache, number)[0] for number in (1, 2, 1, 2)] == [1, 2, 1, 2]
    assert copies == ["/shards/1.bin", "/shards/2.bin"]


def test_the_shards_opened_least_recently_make_room(store: Any, tmp_path: Path) -> None:
    """The bound holds after each copy."""
    cache = ShardCache(tmp_path, max_bytes=3 * SIZE)
    for number in (0, 1, 2, 0, 3):
        assert read(cache, number) == bytes([number]) * SIZE
        assert total(tmp_path) <= 3 * SIZE
        for path in tmp_path.iterdir():  # the clock of a file system may be coarse
            os.utime(path, ns=(path.stat().st_atime_ns, path.stat().st_mtime_ns - 10**9))
    kept = {path.read_bytes()[0] for path in tmp_path.iterdir() if path.name != "lock"}
    assert kept == {0, 2, 3}


def test_a_changed_shard_is_copied_again(store: Any, tmp_path: Path) -> None:
    """Its old copy goes when room is needed."""
    cache = ShardCache(tmp_path, max_bytes=3 * SIZE)
    assert read(cache, 4)[:1] == b"\4"
    store.pipe("/shards/4.bin", b"new" * 10)
    assert read(cache, 4) == b"new" * 10


def test_a_copy_that_is_open_is_not_deleted(store: Any, tmp_path: Path) -> None:
    """Another process may be between its path and its content."""
    cache = ShardCache(tmp_path, max_bytes=2 * SIZE)
    with cache.local(uri(0)) as path:
        for number in range(1, 6):
            read(cache, number)
        assert Path(path).read_bytes() == bytes(SIZE)


def test_what_a_killed_process_left_makes_room(store: Any, tmp_path: Path) -> None:
    """Its unfinished copy counts, and is deleted before finished ones are missed."""
    for end in ("reserved", "data"):
        (tmp_path / f"abandoned.{end}").write_bytes(bytes(2 * SIZE))
    cache = ShardCache(tmp_path, max_bytes=2 * SIZE)
    assert read(cache, 1) == b"\1" * SIZE
    assert not list(tmp_path.glob("abandoned.*"))


def test_a_copy_that_fails_leaves_nothing(store: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither a shard cut short nor one with an error counts as a copy."""
    cache = ShardCache(tmp_path, max_bytes=2 * SIZE)

    def short(_self: Any, _path: str, local: str) -> None:
        Path(local).write_bytes(b"x" * 10)

    with monkeypatch.context() as patch:
        patch.setattr(type(store), "get_file", short)
        with pytest.raises(OSError, match=r"10 bytes of /shards/3\.bin arrived instead of 1000"):
            read(cache, 3)
    assert read(cache, 3) == b"\3" * SIZE


def test_bad_settings_get_a_sentence(store: Any, tmp_path: Path) -> None:
    """Bounds that cannot hold, protocols that nobody has, and shards without a name."""
    for wrong in (0, -1, 1.5, True):
        with pytest.raises(UsageError, match="max_bytes must be a whole number"):
            ShardCache(tmp_path, max_bytes=wrong)  # type: ignore[arg-type]  # what is tested
    with pytest.raises(UsageError, match=r"has 1000 bytes and .* is smaller"):
        read(ShardCache(tmp_path, max_bytes=SIZE - 1), 0)
    cache = ShardCache(tmp_path, max_bytes=SIZE)
    with pytest.raises(UsageError, match="'nowhere://x' cannot be read"), cache.local("nowhere://x"):
        pass
    with pytest.raises(UsageError, match="takes the shards' URIs"):
        Shards([0], [1], lambda _path: [0], cache=cache)


def test_local_shards_are_not_copied(tmp_path: Path) -> None:
    """They are read where they are."""
    shard = tmp_path / "shard.bin"
    shard.write_bytes(b"x")
    with ShardCache(tmp_path / "cache", max_bytes=1).local(f"file://{shard}") as path:
        assert path == str(shard)
    assert not (tmp_path / "cache").exists()


def test_shards_are_read_through_the_cache(store: Any, tmp_path: Path) -> None:
    """In any order, with one shard open at a time."""
    shards = Shards(
        [uri(number) for number in range(12)], [SIZE] * 12, lambda path: Path(path).read_bytes(), keep=1,
        cache=ShardCache(tmp_path, max_bytes=4 * SIZE),
    )  # fmt: skip
    for epoch in range(2):
        assert Counter(shards.read(epoch, 0, 12 * SIZE)) == Counter(dict.fromkeys(range(12), SIZE))


def test_processes_share_the_copies_and_the_bound(zygote: Zygote, tmp_path: Path) -> None:
    """Four processes read the shards of a web server at random, with room for a third of them."""
    (tmp_path / "shards").mkdir()
    for number in range(9):
        (tmp_path / "shards" / f"{number}.bin").write_bytes(bytes([number]) * SIZE)

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments, directory=str(tmp_path / "shards"))

        def log_message(self, *_arguments: Any) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Quiet) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        uris = json.dumps([f"http://127.0.0.1:{server.server_port}/{number}.bin" for number in range(9)])
        folder = tmp_path / "cache"
        script = tmp_path / "reader.py"
        script.write_text(READER)
        command = [str(script), str(folder), str(3 * SIZE), uris]
        readers = [zygote.launch(tmp_path, *command, str(seed)) for seed in range(4)]
        most = 0
        while any(reader.poll() is None for reader in readers):
            most = max(most, on_disk(folder))
        server.shutdown()
    assert [reader.ended().code for reader in readers] == [0] * 4
    assert total(folder) <= 3 * SIZE
    assert SIZE <= most <= 3 * SIZE
    assert not [path for path in folder.iterdir() if path.suffix in (".data", ".reserved")]
