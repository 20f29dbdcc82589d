"""Copies of remote shards on the local disk, within a bound, shared by all processes of a machine.

The total size counts copies that are still being made at their full size, so processes that copy at the same time stay
within the bound together. A copy is locked while it is made and while it is opened. What was not opened for the longest
time makes room; the lock of a process that has ended is free.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from fsspec import AbstractFileSystem, get_filesystem_class
from fsspec.core import url_to_fs
from fsspec.implementations.local import LocalFileSystem
from fsspec.utils import get_protocol
from heterotrain_core.uris import redacted

from heterotrain import credential_files
from heterotrain.errors import UsageError

PAUSE_S = 0.05
"""Pause before another attempt to make room, while all copies are being made or opened."""
_RESERVED, _DATA = ".reserved", ".data"
"""Ends of the names of two files of a copy in the making: an empty one of full size, and the data so far."""


class ShardCache:
    """A folder with copies of remote shards, for ``Shards(cache=…)``."""

    def __init__(self, folder: str | os.PathLike[str], *, max_bytes: int) -> None:
        """Describe the folder; it is made with the first copy.

        Args:
            folder: for this cache only; best on a disk of the machine that outlives the pod.
            max_bytes: bound on the copies' total size. A copy that has been opened may be deleted while it is read: its
                space is free only when it is closed.

        Raises:
            UsageError: ``max_bytes`` is below 1.
        """
        if isinstance(max_bytes, bool) or not isinstance(max_bytes, int) or max_bytes < 1:
            raise UsageError(f"ShardCache: max_bytes must be a whole number of at least 1, not {max_bytes!r}")
        self._folder = Path(folder)
        self._max_bytes = max_bytes
        self._credentials: credential_files.Version | None = None

    @contextmanager
    def local(self, uri: str) -> Iterator[str]:
        """Give a local path of a shard inside the ``with`` block, and copy the shard first where there is no copy.

        A shard of the local file system is not copied. One that has changed is copied again.

        Args:
            uri: any URI that fsspec supports, or a path.

        Raises:
            UsageError: its protocol is not supported here, or the shard is larger than the whole cache.
            OSError: it cannot be read, or the disk is full.
        """
        if self._credentials != (version := credential_files.version()):
            if self._credentials is not None:
                # Clients read a file with credentials once, and fsspec keeps them.
                get_filesystem_class(get_protocol(uri)).clear_instance_cache()
            self._credentials = version
        try:
            files, path = url_to_fs(uri)
        except (ImportError, ValueError) as error:
            why = redacted(str(error)).rstrip(".")
            raise UsageError(
                f"shard {redacted(uri)!r} cannot be read ({why}): give a path, or a URI whose fsspec package "
                "is in the training image"
            ) from error
        if isinstance(files, LocalFileSystem):
            yield path
            return
        self._folder.mkdir(parents=True, exist_ok=True)
        info = files.info(path)
        size_bytes = int(info["size"])
        if size_bytes > self._max_bytes:
            raise UsageError(
                f"shard {redacted(uri)!r} has {size_bytes} bytes and ShardCache(max_bytes={self._max_bytes}) is "
                "smaller: raise max_bytes, or make smaller shards"
            )
        # The properties tell a changed shard: its size, and its ETag or date, where the store has them.
        name = hashlib.sha256(f"{uri} {sorted(info.items(), key=str)}".encode()).hexdigest()[:40] + Path(path).suffix
        copy = self._folder / name
        while True:
            with self._opened(copy) as is_there:
                if is_there:
                    os.utime(copy)
                    yield str(copy)
                    return
            self._copy(files, path, copy, size_bytes)

    @contextmanager
    def _opened(self, copy: Path) -> Iterator[bool]:
        """Keep a copy from being deleted inside the ``with`` block; give whether it is there."""
        try:
            file = copy.open("rb")
        except FileNotFoundError:
            yield False
            return
        with file:
            fcntl.flock(file, fcntl.LOCK_SH)
            yield _is_same(file, copy)  # else it was deleted meanwhile

    def _copy(self, files: AbstractFileSystem, path: str, copy: Path, size_bytes: int) -> None:
        """Copy a shard, or wait for another process that does."""
        reserved, data = (copy.with_name(copy.name + end) for end in (_RESERVED, _DATA))
        with reserved.open("ab") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            if copy.exists() or not _is_same(file, reserved):
                return
            try:
                while not self._reserve(file, reserved, size_bytes):
                    time.sleep(PAUSE_S)
                files.get_file(path, os.fspath(data))
                _check_size(data, path, size_bytes)
                with self._locked():  # whoever adds up sizes sees the copy or what was reserved for it
                    data.rename(copy)
                    reserved.unlink()
            finally:
                data.unlink(missing_ok=True)
                reserved.unlink(missing_ok=True)

    def _reserve(self, file: IO[bytes], reserved: Path, size_bytes: int) -> bool:
        """Make room for a copy and let the bound count it; return whether there is room."""
        with self._locked():
            found = []
            for entry in self._folder.iterdir():
                if entry.name not in ("lock", reserved.name) and entry.suffix != _DATA:
                    with suppress(FileNotFoundError):
                        found.append((entry.stat(), entry))
            total = sum(status.st_size for status, _ in found)
            for status, entry in sorted(found, key=lambda item: item[0].st_mtime_ns):
                if total + size_bytes <= self._max_bytes:
                    break
                if _delete(entry):
                    total -= status.st_size
            if total + size_bytes > self._max_bytes:
                return False
            os.truncate(file.fileno(), size_bytes)  # takes no space on the disk yet
            return True

    @contextmanager
    def _locked(self) -> Iterator[None]:
        with (self._folder / "lock").open("ab") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield


def _delete(entry: Path) -> bool:
    """Delete a copy that no process makes or opens; return whether it is gone."""
    try:
        with entry.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if entry.suffix == _RESERVED:  # its process has been killed
                entry.with_suffix(_DATA).unlink(missing_ok=True)
            entry.unlink(missing_ok=True)
    except FileNotFoundError:
        return True
    except BlockingIOError:
        return False
    return True


def _check_size(file: Path, path: str, size_bytes: int) -> None:
    found = file.stat().st_size
    if found != size_bytes:
        raise OSError(f"{found} bytes of {path} arrived instead of {size_bytes}")


def _is_same(file: IO[bytes], path: Path) -> bool:
    """Return whether a path still names an open file."""
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False
