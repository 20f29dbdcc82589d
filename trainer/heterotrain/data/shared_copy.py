"""One copy of an object for all loader processes, in memory that they share.

torch sends each tensor by a file descriptor of its own, of which a process start takes 256 at most, and Python pickles
the object again for each process. Here it is pickled once. Arrays and tensors lie in one file without a name, which
every process maps: pages are shared until a process writes to one. Tensors that the script shares among processes stay
shared.
"""

from __future__ import annotations

import io
import mmap
import os
import pickle
import tempfile
from multiprocessing.reduction import DupFd
from typing import Any, Final

import torch

ALIGNMENT: Final = 64


class SharedCopy:
    """An object that a process start sends as one descriptor; the receiver loads it on first use."""

    def __init__(self, thing: Any) -> None:
        """Pickle the object.

        Raises:
            Exception: as of ``pickle.dumps``.
        """
        body, buffers = io.BytesIO(), []
        pickler = _Pickler(body, protocol=5, buffer_callback=lambda buffer: buffers.append(buffer.raw()))
        pickler.dump(thing)
        self._shared = pickler.shared
        self._spans: list[tuple[int, int]] = []
        self._file = os.fdopen(os.memfd_create("heterotrain"), "w+b") if hasattr(os, "memfd_create") else _unnamed()
        for part in (*buffers, memoryview(body.getbuffer())):
            self._file.seek(-self._file.tell() % ALIGNMENT, os.SEEK_CUR)
            self._spans.append((self._file.tell(), len(part)))
            self._file.write(part)
        self._file.truncate(max(1, self._file.tell()))
        self._file.flush()
        self._loaded: Any = None

    def close(self) -> None:
        """Close this process's descriptor, when all receivers have started."""
        self._file.close()

    def __getstate__(self) -> dict[str, Any]:
        return {"file": DupFd(self._file.fileno()), "spans": self._spans, "shared": self._shared}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._spans, self._shared, self._loaded = state["spans"], state["shared"], None
        descriptor = state["file"].detach()
        self._memory = mmap.mmap(descriptor, 0, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
        os.close(descriptor)

    def load(self) -> Any:
        """Return the object, in a process that has received it."""
        if self._loaded is None:
            view = memoryview(self._memory)
            *buffers, body = (view[start : start + size] for start, size in self._spans)
            self._loaded = _Unpickler(io.BytesIO(body), buffers=buffers, shared=self._shared).load()
        return self._loaded


def _unnamed() -> Any:
    return tempfile.TemporaryFile()


class _Memory:
    """The memory of one or several tensors."""

    def __init__(self, storage: torch.UntypedStorage) -> None:
        self.storage = storage

    def __reduce_ex__(self, _protocol: Any) -> Any:
        if not self.storage.nbytes():
            return torch.UntypedStorage, (0,)
        array: Any = torch.empty(0, dtype=torch.uint8).set_(self.storage).numpy()
        return _storage_of, (pickle.PickleBuffer(array),)


def _storage_of(buffer: Any) -> torch.UntypedStorage:
    found: torch.UntypedStorage = torch.frombuffer(buffer, dtype=torch.uint8).untyped_storage()
    return found


def _typed(storage: torch.UntypedStorage, dtype: torch.dtype) -> torch.TypedStorage:
    return torch.TypedStorage(wrap_storage=storage, dtype=dtype, _internal=True)


class _Pickler(pickle.Pickler):
    """Puts the memory of tensors out of band, once for all tensors that share it."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.shared: list[torch.UntypedStorage] = []
        self._known: dict[int, _Memory] = {}
        self._numbers: dict[int, int] = {}

    def reducer_override(self, thing: Any) -> Any:
        if not isinstance(thing, torch.TypedStorage):
            return NotImplemented
        storage = thing._untyped_storage  # noqa: SLF001  # torch has no other way
        if storage.device.type != "cpu":
            return NotImplemented
        memory = self._known.setdefault(storage.data_ptr() or id(storage), _Memory(storage))
        return _typed, (memory, thing.dtype)

    def persistent_id(self, thing: Any) -> int | None:
        if not isinstance(thing, _Memory) or not thing.storage.is_shared():
            return None
        if id(thing) not in self._numbers:
            self._numbers[id(thing)] = len(self.shared)
            self.shared.append(thing.storage)
        return self._numbers[id(thing)]


class _Unpickler(pickle.Unpickler):
    def __init__(self, *arguments: Any, shared: list[torch.UntypedStorage], buffers: list[memoryview]) -> None:
        super().__init__(*arguments, buffers=buffers)
        self._shared = shared

    def persistent_load(self, number: Any) -> torch.UntypedStorage:
        found: torch.UntypedStorage = self._shared[number]
        return found
