"""Storage of checkpoints: a folder of a local file system, or of any store that fsspec supports.

A file is complete or does not exist. A local file is written under another name, forced to disk and then renamed. An
object store shows an object when its upload ends. Where a store shows incomplete files, none is read, because the
manifest that names it is written afterwards.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, TypeVar

from fsspec.core import url_to_fs
from fsspec.implementations.local import LocalFileSystem

from heterotrain.errors import UsageError

_log = logging.getLogger(__name__)
_T = TypeVar("_T")

PAUSES_S = (0.5, 2.0)
CHUNK_BYTES = 16 * 1024 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredFile:
    """Name, size and checksum of a written file."""

    name: str
    size_bytes: int
    sha256: str


class DamagedFileError(ValueError):
    """A file differs from the one that was written."""


def with_retries(question: Callable[[], _T]) -> _T:
    """Return the answer of a store; retry after a pause unless the error is about the file itself."""
    for pause_s in PAUSES_S:
        try:
            return question()
        except (DamagedFileError, FileNotFoundError):
            raise
        except Exception as error:  # noqa: BLE001  # any error of a store's library
            _log.warning("the checkpoint store failed and is tried again in %g s: %s", pause_s, error)
            time.sleep(pause_s)
    return question()


class Storage:
    """A folder at a URI; it is created with its first file."""

    def __init__(self, uri: str) -> None:
        """``uri`` is a path or ``protocol://…``.

        Raises:
            UsageError: the protocol is not supported here, or a file has that name.
        """
        self.uri = uri
        self._thread = threading.local()
        try:
            files, root = self._connect()
        except ImportError as error:
            raise UsageError(
                f"checkpoint URI {uri!r}: {str(error).rstrip('.')}; add that Python package to the training image"
            ) from error
        except ValueError as error:
            raise UsageError(
                f"checkpoint URI {uri!r} cannot be used ({error}): give file:///path, s3://, gs:// or another "
                "protocol of fsspec whose Python package is in the training image"
            ) from error
        self._root = str(root).rstrip("/")
        self._local = isinstance(files, LocalFileSystem)
        if self._local and Path(self._root).exists() and not Path(self._root).is_dir():
            raise UsageError(f"checkpoint URI {uri!r} is a file: name a folder, which may not exist yet")

    def put(self, name: str, chunks: Iterable[bytes | memoryview]) -> StoredFile:
        """Write a file.

        Raises:
            OSError: it could not be written and does not exist. A store's library may raise others.
        """
        return self._put_local(name, chunks) if self._local else self._put_remote(name, chunks)

    def names(self) -> list[str]:
        """Return the names of all files; an empty list when the folder does not exist.

        Raises:
            OSError: the store cannot be read. A store's library may raise others.
        """
        self._fs.invalidate_cache()
        try:
            found: Sequence[str] = self._fs.ls(self._root, detail=False)
        except FileNotFoundError:
            return []
        return [path.rstrip("/").rsplit("/", 1)[-1] for path in found]

    def get(self, name: str) -> bytes:
        """Return a small file.

        Raises:
            OSError: it cannot be read. A store's library may raise others.
        """
        return bytes(self._fs.cat_file(self._path(name)))

    def get_into(self, stored: StoredFile, buffers: Iterable[memoryview]) -> None:
        """Read a file into memory, one buffer after the other.

        Raises:
            DamagedFileError: the file differs from the one that was written.
            OSError: it cannot be read. A store's library may raise others.
        """
        digest = hashlib.sha256()
        with self._fs.open(self._path(stored.name), "rb") as file:
            for buffer in buffers:
                for begin in range(0, len(buffer), CHUNK_BYTES):
                    chunk = buffer[begin : begin + CHUNK_BYTES]
                    _fill(file, chunk, stored.name)
                    digest.update(chunk)
            if file.read(1):
                raise DamagedFileError(f"{stored.name} is longer than its manifest states")
        if digest.hexdigest() != stored.sha256:
            raise DamagedFileError(f"{stored.name} does not match its checksum")

    def remove(self, names: Iterable[str]) -> None:
        """Delete files, as far as possible: a missing file or a failed deletion does not stop the others."""
        for name in names:
            with contextlib.suppress(Exception):  # any error of a store's library
                self._fs.rm_file(self._path(name))

    def _put_local(self, name: str, chunks: Iterable[bytes | memoryview]) -> StoredFile:
        folder = Path(self._root)
        folder.mkdir(parents=True, exist_ok=True)
        scratch = folder / f".{name}"
        try:
            with scratch.open("wb") as file:
                stored = _write(file, name, chunks)
                file.flush()
                os.fsync(file.fileno())
            scratch.replace(folder / name)
        finally:
            scratch.unlink(missing_ok=True)
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        return stored

    def _put_remote(self, name: str, chunks: Iterable[bytes | memoryview]) -> StoredFile:
        with contextlib.suppress(Exception):  # a store without real folders may forbid creating one
            self._fs.makedirs(self._root, exist_ok=True)
        try:
            with self._fs.open(self._path(name), "wb", block_size=CHUNK_BYTES) as file:
                stored = _write(file, name, chunks)
            self._fs.invalidate_cache()
            size_bytes = self._fs.size(self._path(name))
        except BaseException:
            self.remove([name])
            raise
        if size_bytes != stored.size_bytes:
            self.remove([name])
            raise OSError(f"{name} has {size_bytes} bytes in {self.uri} instead of {stored.size_bytes}")
        return stored

    def _connect(self) -> tuple[Any, Any]:
        filesystem, path = url_to_fs(self.uri, use_listings_cache=False, skip_instance_cache=True)
        return filesystem, path

    @property
    def _fs(self) -> Any:
        """This thread's connection: not every protocol permits use by two threads at once."""
        if not hasattr(self._thread, "files"):
            self._thread.files = self._connect()[0]
        return self._thread.files

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}"


def _write(file: IO[bytes], name: str, chunks: Iterable[bytes | memoryview]) -> StoredFile:
    digest, size_bytes = hashlib.sha256(), 0
    for whole in chunks:
        view = memoryview(whole)
        for begin in range(0, len(view), CHUNK_BYTES):
            chunk = view[begin : begin + CHUNK_BYTES]
            file.write(chunk)
            digest.update(chunk)
            size_bytes += len(chunk)
    return StoredFile(name=name, size_bytes=size_bytes, sha256=digest.hexdigest())


def _fill(file: Any, buffer: memoryview, name: str) -> None:
    position = 0
    while position < len(buffer):
        count = file.readinto(buffer[position:])
        if not count:
            raise DamagedFileError(f"{name} is shorter than its manifest states")
        position += count
