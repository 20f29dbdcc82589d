"""Storage of checkpoints: a folder of a local file system, or of any store that fsspec supports.

A file is complete or does not exist. A local file is written under another name, forced to disk and then renamed. An
object store shows an object when its upload ends. Where a store shows incomplete files, none is read, because the
manifest that names it is written afterwards.

Others may be able to write to the folder. So names are those of files in it, and in a local folder only regular files
are opened: symbolic links would lead elsewhere, and a named pipe would never end.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import logging
import os
import stat
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, TypeVar

from fsspec.core import url_to_fs
from fsspec.implementations.local import LocalFileSystem
from heterotrain_core.uris import redacted

from heterotrain import credential_files
from heterotrain.errors import UsageError

_log = logging.getLogger(__name__)
_T = TypeVar("_T")

PAUSES_S = (0.5, 2.0)
CHUNK_BYTES = 16 * 1024 * 1024
SYNC_BYTES = 512 * 1024 * 1024
"""A local file is forced to disk after each so many bytes, so that a slow disk shows progress."""
_FLAGS = os.O_NOFOLLOW | os.O_CLOEXEC


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


def call_with_timeout(timeout_s: float, call: Callable[[], _T]) -> _T:
    """Return the answer of a store that may never answer.

    Raises:
        TimeoutError: there was none in time. Its thread is left behind.
    """
    answers: list[_T] = []
    errors: list[Exception] = []

    def ask() -> None:
        try:
            answers.append(call())
        except Exception as error:  # noqa: BLE001  # any error of a store's library, raised below
            errors.append(error)

    thread = threading.Thread(target=ask, name="heterotrain-store", daemon=True)
    thread.start()
    thread.join(timeout_s)
    if errors:
        raise errors[0]
    if not answers:
        raise TimeoutError(f"the checkpoint store did not answer for {timeout_s:.0f} s")
    return answers[0]


class Storage:
    """A folder at a URI; it is created with its first file.

    Attributes:
        shown: the URI for messages, without credentials.
        active_s: when the store last finished something, a part of a file for example, by the monotonic clock.
    """

    def __init__(self, uri: str, *, shared: bool = False) -> None:
        """``uri`` is a path or ``protocol://…``.

        ``shared``: whether others may write to the folder above, so that this one must not be a symbolic link.

        Raises:
            UsageError: the protocol is not supported here, or a file or a forbidden link has that name.
        """
        self._uri = uri
        self.shown = redacted(uri)
        self.active_s = time.monotonic()
        self._thread = threading.local()
        try:
            files, root = self._connect()
        except ImportError as error:
            raise UsageError(
                f"checkpoint URI {self.shown!r}: {redacted(str(error)).rstrip('.')}; add that Python package to the "
                "training image"
            ) from error
        except ValueError as error:
            raise UsageError(
                f"checkpoint URI {self.shown!r} cannot be used ({redacted(str(error))}): give file:///path, s3://, "
                "gs:// or another protocol of fsspec whose Python package is in the training image"
            ) from error
        except OSError as error:  # some connect at once
            raise UsageError(
                f"the store of checkpoint URI {self.shown!r} cannot be reached ({redacted(str(error))}): correct the "
                "address, or look at the store and the network"
            ) from error
        self._root = str(root).rstrip("/")
        self._local = isinstance(files, LocalFileSystem)
        self._folder_flags = os.O_DIRECTORY | os.O_CLOEXEC | (os.O_NOFOLLOW if shared else 0)
        if not self._local:
            return
        if shared and Path(self._root).is_symlink():
            raise UsageError(
                f"checkpoint folder {self.shown!r} is a symbolic link, which another user of the volume may have made: "
                "remove it, or put the folder that it leads to in its place"
            )
        if Path(self._root).exists() and not Path(self._root).is_dir():
            raise UsageError(f"checkpoint URI {self.shown!r} is a file: name a folder, which may not exist yet")

    def check_writable(self) -> None:
        """Make a local folder and check that files can be written there; a remote store shows it with its first file.

        Raises:
            UsageError: they cannot.
        """
        if not self._local:
            return
        try:
            Path(self._root).mkdir(parents=True, exist_ok=True)
            with self._folder() as folder:
                scratch = f".probe-{os.getpid()}"
                os.close(os.open(scratch, os.O_WRONLY | os.O_CREAT | _FLAGS, 0o666, dir_fd=folder))
                os.unlink(scratch, dir_fd=folder)
        except OSError as error:
            raise UsageError(
                f"checkpoints cannot be written to {self.shown!r} ({error.strerror or error}): name a folder that this "
                "user may write to, or leave out checkpoint_uri"
            ) from error

    def put(self, name: str, chunks: Iterable[bytes | memoryview], *, scratch: str = "") -> StoredFile:
        """Write a file.

        Args:
            name: of the file.
            chunks: its content.
            scratch: name of the file while it is incomplete, where the store can rename; a name that no other writer
                uses at the same time. Default: the name with a dot in front.

        Raises:
            OSError: it could not be written and does not exist. A store's library may raise others.
        """
        _check(name)
        stored = self._put_local(name, chunks, scratch or f".{name}") if self._local else self._put_remote(name, chunks)
        self._note_activity()
        return stored

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

    def get(self, name: str, *, most_bytes: int) -> bytes:
        """Return a small file.

        Raises:
            DamagedFileError: it is longer than ``most_bytes``, or not a regular file.
            OSError: it cannot be read. A store's library may raise others.
        """
        found: list[bytes] = []
        with self._opened(name) as file:
            while chunk := file.read(CHUNK_BYTES):
                self._note_activity()
                found.append(chunk)
                most_bytes -= len(chunk)
                if most_bytes < 0:
                    raise DamagedFileError(f"{name} is too long")
        return b"".join(found)

    def get_checked(self, stored: StoredFile) -> bytes:
        """Return a small file.

        Raises:
            DamagedFileError: the file differs from the one that was written.
            OSError: it cannot be read. A store's library may raise others.
        """
        content = self.get(stored.name, most_bytes=stored.size_bytes)
        if hashlib.sha256(content).hexdigest() != stored.sha256:
            raise DamagedFileError(f"{stored.name} does not match its checksum")
        return content

    def get_into(self, stored: StoredFile, buffers: Iterable[memoryview]) -> None:
        """Read a file into memory, one buffer after the other.

        Raises:
            DamagedFileError: the file differs from the one that was written.
            OSError: it cannot be read. A store's library may raise others.
        """
        digest = hashlib.sha256()
        with self._opened(stored.name) as file:
            for buffer in buffers:
                for begin in range(0, len(buffer), CHUNK_BYTES):
                    chunk = buffer[begin : begin + CHUNK_BYTES]
                    _fill(file, chunk, stored.name)
                    self._note_activity()
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

    def _put_local(self, name: str, chunks: Iterable[bytes | memoryview], scratch: str) -> StoredFile:
        Path(self._root).mkdir(parents=True, exist_ok=True)
        with self._folder() as folder:
            try:
                with contextlib.suppress(FileNotFoundError):  # left by a writer of that name that was killed
                    os.unlink(scratch, dir_fd=folder)
                created = os.open(scratch, os.O_WRONLY | os.O_CREAT | os.O_EXCL | _FLAGS, 0o666, dir_fd=folder)
                with os.fdopen(created, "wb") as file:
                    stored = self._write(file, name, chunks)
                    file.flush()
                    os.fsync(file.fileno())
                os.replace(scratch, name, src_dir_fd=folder, dst_dir_fd=folder)
            finally:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(scratch, dir_fd=folder)
            os.fsync(folder)
        return stored

    def _put_remote(self, name: str, chunks: Iterable[bytes | memoryview]) -> StoredFile:
        with contextlib.suppress(Exception):  # a store without real folders may forbid creating one
            self._fs.makedirs(self._root, exist_ok=True)
        try:
            with self._fs.open(self._path(name), "wb", block_size=CHUNK_BYTES) as file:
                stored = self._write(file, name, chunks)
            self._fs.invalidate_cache()
            size_bytes = self._fs.size(self._path(name))
        except BaseException:
            self.remove([name])
            raise
        if size_bytes != stored.size_bytes:
            self.remove([name])
            raise OSError(f"{name} has {size_bytes} bytes in {self.shown} instead of {stored.size_bytes}")
        return stored

    def _connect(self) -> tuple[Any, Any]:
        filesystem, path = url_to_fs(self._uri, use_listings_cache=False, skip_instance_cache=True)
        return filesystem, path

    @property
    def _fs(self) -> Any:
        """This thread's connection: not every protocol permits use by two threads at once.

        It is made again when a file with credentials has changed, because clients read such a file once.
        """
        version = () if self._local else credential_files.version()
        if getattr(self._thread, "credentials", None) != version:
            self._thread.files, self._thread.credentials = self._connect()[0], version
        return self._thread.files

    def _path(self, name: str) -> str:
        return f"{self._root}/{_check(name)}"

    @contextlib.contextmanager
    def _folder(self) -> Iterator[int]:
        descriptor = os.open(self._root, self._folder_flags)
        try:
            yield descriptor
        finally:
            os.close(descriptor)

    @contextlib.contextmanager
    def _opened(self, name: str) -> Iterator[Any]:
        _check(name)
        if not self._local:
            with self._fs.open(self._path(name), "rb") as file:
                yield file
            return
        with self._folder() as folder:
            try:
                descriptor = os.open(name, os.O_RDONLY | os.O_NONBLOCK | _FLAGS, dir_fd=folder)
            except OSError as error:
                if error.errno == errno.ELOOP:
                    raise DamagedFileError(f"{name} is a symbolic link, and none is followed") from error
                raise
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            os.close(descriptor)
            raise DamagedFileError(f"{name} is not a regular file")
        with os.fdopen(descriptor, "rb") as file:
            yield file

    def _note_activity(self) -> None:
        self.active_s = time.monotonic()

    def _write(self, file: IO[bytes], name: str, chunks: Iterable[bytes | memoryview]) -> StoredFile:
        digest, size_bytes, synced_bytes = hashlib.sha256(), 0, 0
        for whole in chunks:
            view = memoryview(whole)
            for begin in range(0, len(view), CHUNK_BYTES):
                chunk = view[begin : begin + CHUNK_BYTES]
                file.write(chunk)
                digest.update(chunk)
                size_bytes += len(chunk)
                if self._local and size_bytes - synced_bytes >= SYNC_BYTES:
                    os.fsync(file.fileno())
                    synced_bytes = size_bytes
                self._note_activity()
        return StoredFile(name=name, size_bytes=size_bytes, sha256=digest.hexdigest())


def _check(name: str) -> str:
    """Return the name of a file in the folder.

    Raises:
        DamagedFileError: it leads elsewhere.
    """
    if not name or name in (".", "..") or set(name) & set("/\\\0"):
        raise DamagedFileError(f"{name[:100]!r} is not the name of a file in this folder")
    return name


def _fill(file: Any, buffer: memoryview, name: str) -> None:
    position = 0
    while position < len(buffer):
        count = file.readinto(buffer[position:])
        if not count:
            raise DamagedFileError(f"{name} is shorter than its manifest states")
        position += count
