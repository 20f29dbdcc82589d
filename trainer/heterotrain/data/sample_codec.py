"""Samples as bytes, for other ranks: numbers, text, bytes, tensors, arrays, and lists, tuples and dictionaries of them.

Reading them runs no code of the sender, unlike pickles. Values of other types, subclasses included, are refused,
because the receiver could not get the same object.
"""

from __future__ import annotations

import json
import struct
from typing import Any

import numpy as np
import torch

_HEAD = struct.Struct("<Q")
_ALIGNMENT = 16
_PLAIN: tuple[type, ...] = (type(None), bool, int, float, str)
_KINDS = "biufcmMSU"
"""Kinds of numpy's formats that consist of their bytes alone."""
_TAG: dict[Any, str] = {list: "list", tuple: "tuple"}
_MAKE: dict[str, type] = {"list": list, "tuple": tuple}


class NotEncodableError(ValueError):
    """A value has no form as bytes; the message names its type."""


def encode(values: list[Any]) -> bytes:
    """Return the values as bytes.

    Raises:
        NotEncodableError: one of them contains an object of another type.
    """
    encoder = _Encoder()
    try:
        skeleton = json.dumps([encoder.strip(value) for value in values]).encode()
    except RecursionError as error:
        raise NotEncodableError("values that contain each other too deeply") from error
    head = _HEAD.pack(len(skeleton)) + skeleton
    return b"".join([head, bytes(-len(head) % _ALIGNMENT), *encoder.chunks])


def decode(data: bytes) -> list[Any]:
    """Return the values; their tensors and arrays share one piece of memory, and may be changed.

    Raises:
        ValueError: these are not the bytes of ``encode``.
    """
    try:
        (size,) = _HEAD.unpack_from(data)
        end = _HEAD.size + size
        memory = bytearray(data[end + -end % _ALIGNMENT :])
        return [_filled(value, memory) for value in json.loads(data[_HEAD.size : end])]
    except (struct.error, TypeError, LookupError, AttributeError, RecursionError) as error:
        raise ValueError(f"encoded samples are damaged ({error})") from error


class _Encoder:
    """Collects the bytes of tensors, arrays and texts of bytes, and puts their place where they were."""

    def __init__(self) -> None:
        self.chunks: list[Any] = []
        self._offset = 0

    def strip(self, value: Any) -> Any:
        kind = type(value)
        if kind in _PLAIN:
            return value
        if kind is dict:
            return ["dict", *([self.strip(key), self.strip(item)] for key, item in value.items())]
        if kind in _TAG:
            return [_TAG[kind], *(self.strip(item) for item in value)]
        if kind is bytes:
            return ["bytes", self._place(value), len(value)]
        if kind is torch.Tensor:
            return self._tensor(value)
        if isinstance(value, np.generic) or kind is np.ndarray:
            if value.dtype.kind not in _KINDS:
                raise NotEncodableError(f"an array of {value.dtype}")
            place = self._place(np.ascontiguousarray(value).tobytes())
            return ["array" if kind is np.ndarray else "scalar", place, value.dtype.str, list(value.shape)]
        raise NotEncodableError(f"an object of type {kind.__module__}.{kind.__qualname__}")

    def _tensor(self, value: torch.Tensor) -> list[Any]:
        if value.layout is not torch.strided or value.device.type != "cpu" or value.requires_grad or value.is_quantized:
            raise NotEncodableError("a tensor that is sparse, quantized, on an accelerator or part of a graph")
        flat = value.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
        place = self._place(flat.view(torch.uint8).numpy().data if flat.numel() else b"")
        return ["tensor", place, str(value.dtype).removeprefix("torch."), list(value.shape)]

    def _place(self, chunk: Any) -> int:
        start, size = self._offset, len(chunk)
        self.chunks += [chunk, bytes(-size % _ALIGNMENT)]
        self._offset += size + -size % _ALIGNMENT
        return start


def _filled(value: Any, memory: bytearray) -> Any:
    if not isinstance(value, list):
        return value
    tag, *rest = value
    if tag in _MAKE:
        return _MAKE[tag](_filled(item, memory) for item in rest)
    if tag == "dict":
        return {_filled(key, memory): _filled(item, memory) for key, item in rest}
    place = int(rest[0])
    if tag == "bytes":
        return bytes(memory[place : place + rest[1]])
    shape = tuple(int(size) for size in rest[2])
    count = int(np.prod(shape, dtype=np.int64))
    if tag == "tensor":
        dtype = getattr(torch, rest[1])
        if not isinstance(dtype, torch.dtype):
            raise ValueError(f"{rest[1]} is not a format of tensors")
        return torch.frombuffer(memory, dtype=dtype, count=count, offset=place).view(shape) if count else (
            torch.empty(shape, dtype=dtype)
        )  # fmt: skip
    kind = np.dtype(rest[1])
    if kind.kind not in _KINDS or tag not in ("array", "scalar"):
        raise ValueError(f"{tag} of {kind} is not an encoded value")
    array = np.frombuffer(memory, dtype=kind, count=count, offset=place).reshape(shape) if count else (
        np.empty(shape, dtype=kind)
    )  # fmt: skip
    return array if tag == "array" else array[()]
