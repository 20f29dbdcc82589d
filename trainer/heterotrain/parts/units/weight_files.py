"""Weights in files, of which a rank reads only the tensors that it holds.

Three forms are known: a safetensors file, an index of several (``*.safetensors.index.json``, as Hugging Face writes
it), and a file of ``torch.save`` with a ``state_dict``, which is mapped into memory. A safetensors file is the length
of its header, the header as JSON with the place of each tensor, and their bytes, so each can be read alone.
"""

from __future__ import annotations

import itertools
import json
import math
import pickle
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from fsspec.core import url_to_fs
from heterotrain_core.uris import redacted

from heterotrain.errors import UsageError

MOST_HEADER_BYTES = 10**18
"""The limit of the format."""
INDEX = ".safetensors.index.json"
NAMES_IN_FOLDER = ("model.safetensors.index.json", "model.safetensors")
PICKLED = (".pt", ".pth", ".bin")
MOST_SHOWN = 3
UNREADABLE = (
    OSError, ValueError, KeyError, TypeError, AttributeError, ImportError, RuntimeError, pickle.UnpicklingError
)  # fmt: skip
"""What stores, ``json`` and ``torch.load`` raise for files that are missing or are something else."""
DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8,
    "U64": torch.uint64, "U32": torch.uint32, "U16": torch.uint16, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip
"""Formats of a safetensors file that a model's tensors can take over."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredTensor:
    """A tensor in a file.

    Attributes:
        shape: of the whole tensor.
        read: returns it in the file's format, on the CPU.
    """

    shape: tuple[int, ...]
    read: Callable[[], torch.Tensor]


def open_weights(uri: str) -> dict[str, StoredTensor]:
    """Return the tensors of a file, or of several behind an index, by name; values are read later.

    Args:
        uri: path or URI of a safetensors file, an index, a folder with ``model.safetensors`` or an index of that name,
            or a file of ``torch.save`` on a local disk.

    Raises:
        UsageError: there is no such file, or it cannot be read.
    """
    shown = redacted(uri)
    try:
        files, path = url_to_fs(uri)
        if files.isdir(path):
            found = [f"{path}/{name}" for name in NAMES_IN_FOLDER if files.isfile(f"{path}/{name}")]
            if not found:
                raise UsageError(f"folder {shown} has no {' and no '.join(reversed(NAMES_IN_FOLDER))}")
            path = found[0]
        if path.endswith(PICKLED):
            return _pickled(files, path, shown)
        if not path.endswith(INDEX):
            return _tensors(files, path, shown)
        index = json.loads(files.cat_file(path))["weight_map"]
        folder = path.rpartition("/")[0]
        names: dict[str, StoredTensor] = {}
        for part in sorted(set(index.values())):
            if "/" in part:
                raise UsageError(f"the index of weights {shown} names {part!r}, which is not a file beside it")
            names |= _tensors(files, f"{folder}/{part}", shown)
    except UNREADABLE as error:
        raise UsageError(f"the weights {shown} cannot be read: {type(error).__name__}: {error}") from error
    lacking = sorted(set(index) - set(names))
    if lacking:
        raise UsageError(f"the index of weights {shown} names {_listed(lacking)}, and its files have no such tensor")
    return {name: names[name] for name in index}


def _tensors(files: Any, path: str, shown: str) -> dict[str, StoredTensor]:
    """Return the tensors of a safetensors file.

    Raises:
        UsageError: it is not such a file, or has been cut off.
    """
    size = int(files.size(path))
    length = int.from_bytes(files.cat_file(path, start=0, end=8), "little")
    if not 0 < length <= min(MOST_HEADER_BYTES, size - 8):
        raise UsageError(f"{path.rpartition('/')[2]} of the weights {shown} is not a safetensors file")
    header = json.loads(files.cat_file(path, start=8, end=8 + length))
    found = {}
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        dtype, shape = DTYPES.get(entry["dtype"]), tuple(int(extent) for extent in entry["shape"])
        start, stop = (8 + length + int(offset) for offset in entry["data_offsets"])
        if dtype is None:
            raise UsageError(f"tensor {name!r} of the weights {shown} has the format {entry['dtype']}: convert it")
        if min(shape, default=0) < 0 or stop - start != math.prod(shape) * dtype.itemsize or stop > size:
            raise UsageError(f"tensor {name!r} of the weights {shown} is damaged: the file has been cut off or changed")
        found[name] = StoredTensor(shape=shape, read=_Range(files, path, start, stop, dtype, shape).read)
    return found


@dataclass(frozen=True, slots=True)
class _Range:
    """The bytes of one tensor in a file."""

    files: Any
    path: str
    start: int
    stop: int
    dtype: torch.dtype
    shape: tuple[int, ...]

    def read(self) -> torch.Tensor:
        """Return the tensor."""
        if self.start == self.stop:
            return torch.empty(self.shape, dtype=self.dtype)
        data = bytearray(self.files.cat_file(self.path, start=self.start, end=self.stop))
        if len(data) != self.stop - self.start:
            raise UsageError(f"the weights {redacted(self.path)} were changed while they were read")
        return torch.frombuffer(data, dtype=self.dtype).view(self.shape)


def _pickled(files: Any, path: str, shown: str) -> dict[str, StoredTensor]:
    """Return the tensors of a ``state_dict``; only what is read later comes into memory. No code of it is run.

    Raises:
        UsageError: it is not on a local disk, or something else.
    """
    if "file" not in (files.protocol if isinstance(files.protocol, tuple) else (files.protocol,)):
        raise UsageError(f"the weights {shown} would have to be read whole: convert them to safetensors")
    state = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    if not isinstance(state, dict) or not all(isinstance(value, torch.Tensor) for value in state.values()):
        raise UsageError(f"{shown} is not a state_dict, by name a tensor: save model.state_dict()")
    return {name: StoredTensor(shape=tuple(value.shape), read=value.detach().clone) for name, value in state.items()}


class PretrainedWeights:
    """Weights in files for a model on the meta device.

    Attributes:
        names: of parameters and buffers whose values are in the files, as the model names them first.
    """

    def __init__(self, uri: str, model: torch.nn.Module) -> None:
        """Compare the names and shapes of files and model; no value is read.

        Args:
            uri: as in ``open_weights``.
            model: on the meta device.

        Raises:
            UsageError: they do not fit, or the files cannot be read.
        """
        stored = open_weights(uri)
        state = model.state_dict(keep_vars=True)
        first: dict[int, str] = {}
        for name, tensor in itertools.chain(model.named_parameters(), model.named_buffers()):
            first.setdefault(id(tensor), name)
        aliases: dict[str, list[str]] = {}
        for name, tensor in state.items():
            if id(tensor) in first:
                aliases.setdefault(first[id(tensor)], []).append(name)
        _check(redacted(uri), state, aliases, stored)
        self._stored = {name: next(stored[each] for each in names if each in stored) for name, names in aliases.items()}
        self.names = frozenset(self._stored)

    def read(self, name: str, *, dtype: torch.dtype) -> torch.Tensor:
        """Return a parameter or buffer on the CPU.

        Args:
            name: one of ``names``.
            dtype: of the model's tensor.
        """
        return self._stored[name].read().to(dtype)


def _check(
    uri: str,
    state: Mapping[str, torch.Tensor],
    aliases: Mapping[str, list[str]],
    stored: Mapping[str, StoredTensor],
) -> None:
    """Refuse files that do not fit the model, with all that is wrong in one sentence.

    Raises:
        UsageError: something is missing, unknown or of another shape.
    """
    missing = [name for name, names in aliases.items() if not stored.keys() & set(names)]
    unknown = sorted(set(stored) - set(state))
    wrong = [
        f"{name!r} has the shape {list(stored[name].shape)} in place of {list(state[name].shape)}"
        for names in aliases.values()
        for name in names
        if name in stored and stored[name].shape != tuple(state[name].shape)
    ]
    clauses = [
        *([f"they lack {_listed(missing)}"] if missing else []),
        *([f"the model has no {_listed(unknown)}"] if unknown else []),
        *([", ".join(wrong[:MOST_SHOWN]) + _more(wrong)] if wrong else []),
    ]
    if clauses:
        raise UsageError(f"the weights {uri} do not fit the model: {'; '.join(clauses)}")


def _listed(names: list[str]) -> str:
    return ", ".join(map(repr, names[:MOST_SHOWN])) + _more(names)


def _more(items: list[str]) -> str:
    rest = len(items) - MOST_SHOWN
    return f" and {rest} more" if rest > 0 else ""
