"""Fingerprints of a training state: one number that shows whether the copies on two ranks are the same.

The state is cut into slices, and one check covers one slice. On devices of one kind, copies have the same bits, and the
fingerprint is a checksum of 52 bits, which float64 holds exactly. Every single changed word changes the checksum before
it is cut to 52 bits, and a swap of two different words nearly always does.

Devices of different kinds round differently. There the fingerprint is a random projection: values times random signs,
added up, in units of the tolerated difference. For copies that differ by the vector d, the projections differ by a
number of mean square |d|^2 (Achlioptas, "Database-friendly random projections", 2003). A check with the same signs
misses a difference of ten times the tolerance in one of twelve cases.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch

from heterotrain.state.groups import KERNELS
from heterotrain.state.memory import bounds, pack, sizes_bytes

SLICE_BYTES = 1 << 20
"""Smallest slice of a larger state. A moment of one small parameter alone may cancel out to rounding errors."""
MOST_SLICE_BYTES = 64 << 20
SLICES = 256
"""Slices that a state is cut into while they are between the two sizes above."""
ROUNDINGS = 2.0**14
"""Tolerated relative difference between kinds of devices, in roundings of the dtype: 0.2 % in fp32.

All ranks apply the same summed gradient, so rounding errors of single updates add up like a random walk, and nothing
amplifies them: after a million steps, about a thousand roundings.
"""
MOST_TOLERANCE = 0.25
"""Upper limit of that difference, for bf16 and fp16."""
WORD_BYTES = 8
CHECKSUM_BITS = 52
_BLOCK_WORDS = 1 << 17
_MASK = (1 << 64) - 1
_MIX = 0x9E3779B97F4A7C15
"""An odd number near 2^64 over the golden ratio (Knuth's multiplicative hash)."""


@dataclass(frozen=True, slots=True)
class Item:
    """One tensor of the state.

    Attributes:
        name: for messages, such as ``exp_avg of 2.weight``.
        role: values of one role are of comparable size: ``weights``, ``buffers``, or the optimizer's own name.
        tensor: the live tensor, or a flat part of it.
    """

    name: str
    role: str
    tensor: torch.Tensor


def items_of(
    model: torch.nn.Module,
    optimizers: Iterable[torch.optim.Optimizer],
    buffers: Iterable[tuple[str, torch.Tensor]] = (),
) -> list[Item]:
    """Return parameters, each followed by the optimizers' tensors for it, and then the buffers."""
    found = []
    states = [optimizer.state for optimizer in optimizers]
    for name, parameter in model.named_parameters():
        found.append(Item(name, "weights", parameter.detach()))
        for state in states:
            own = state.get(parameter) or {}
            found += [
                Item(f"{key} of {name}", str(key), own[key].detach())
                for key in sorted(own, key=str)
                if isinstance(own[key], torch.Tensor)
            ]
    return [*found, *(Item(name, "buffers", buffer.detach()) for name, buffer in buffers)]


def slices_of(items: Sequence[Item]) -> list[tuple[int, int]]:
    """Cut the state into slices of nearly equal length; return the first byte of each, and the byte after its last."""
    total = sum(sizes_bytes([item.tensor for item in items]))
    slice_bytes = min(MOST_SLICE_BYTES, max(SLICE_BYTES, total // SLICES))
    return bounds(total, max(1, total // slice_bytes))


def parts_in(items: Sequence[Item], start: int, stop: int) -> tuple[Item, ...]:
    """Return the parts of tensors between two bytes of the state. They begin and end between values."""
    found, begin = [], 0
    for item, size in zip(items, sizes_bytes([item.tensor for item in items]), strict=True):
        first, last = (min(size, max(0, at - begin)) // item.tensor.element_size() for at in (start, stop))
        if first < last:
            found.append(Item(item.name, item.role, item.tensor.reshape(-1)[first:last]))
        begin += size
    return tuple(found)


def checksum(part: Sequence[Item], into: torch.Tensor | None = None) -> tuple[int, torch.Tensor]:
    """Return the checksum of a slice, as an integer of 64 bits, and the host memory used for it.

    Args:
        part: the slice, on any device.
        into: memory of an earlier call, reused if it has the right length.
    """
    tensors = [item.tensor for item in part]
    packed = pack(tensors, sum(sizes_bytes(tensors)), into, pin=any(tensor.is_cuda for tensor in tensors))
    whole = packed[: packed.numel() // WORD_BYTES * WORD_BYTES].view(torch.int64)
    total = zlib.crc32(packed[whole.numel() * WORD_BYTES :].numpy().tobytes())
    for block in torch.split(whole, _BLOCK_WORDS):
        total = _mixed(total, int(torch.dot(block, _multipliers()[: block.numel()])))
    return total, packed


def projection(part: Sequence[Item]) -> float:
    """Return the random projection of a slice, in units of the tolerated difference; infinite if a value is not finite.

    Each role is divided by its own norm and tolerance, because moments are far smaller than weights.
    """
    by_role: dict[tuple[str, torch.dtype], list[torch.Tensor]] = {}
    for item in part:
        if item.tensor.is_floating_point():
            values = item.tensor.reshape(-1).to("cpu", torch.float64)
            by_role.setdefault((item.role, item.tensor.dtype), []).append(values)
    total = 0.0
    for (_, dtype), pieces in sorted(by_role.items(), key=lambda each: (each[0][0], str(each[0][1]))):
        values = torch.cat(pieces)
        norm = float(values.norm())
        if norm != 0.0:
            total += float(torch.dot(values, _signs(values.numel()))) / (norm * tolerance(dtype))
    return total if math.isfinite(total) else math.inf


def tolerance(dtype: torch.dtype) -> float:
    """Return the relative difference that is tolerated between devices of different kinds."""
    return min(MOST_TOLERANCE, ROUNDINGS * torch.finfo(dtype).eps)


def settings_checksum(optimizers: Iterable[torch.optim.Optimizer]) -> int:
    """Return a checksum of the optimizers' numbers, such as learning rates, for each group of parameters.

    Which kernels compute the update depends on the device.
    """
    text = [
        f"{key}={value!r}"
        for optimizer in optimizers
        for group in optimizer.param_groups
        for key in sorted(optimizer.defaults.keys() - KERNELS)
        if _is_plain(value := group.get(key))
    ]
    return zlib.crc32(";".join(text).encode())


def to_float(total: int, settings: int = 0) -> float:
    """Return a checksum of 64 bits, together with one of the settings, as 52 bits in a float64."""
    return float(_mixed(total, settings) >> (64 - CHECKSUM_BITS))


def combined(parts: Sequence[float]) -> float:
    """Return one checksum of the checksums of several slices."""
    total = 0
    for part in parts:
        total = _mixed(total, int(part))
    return to_float(total)


def named(part: Sequence[Item]) -> Iterator[tuple[str, float]]:
    """Yield the name and the checksum of each tensor of a slice, to tell which ones differ."""
    for item in part:
        yield item.name, to_float(checksum([item])[0])


def _mixed(total: int, value: int) -> int:
    """Add 64 bits to a checksum such that each of them changes the upper bits of the result."""
    total = ((total ^ (value & _MASK)) * _MIX) & _MASK
    return total ^ (total >> 29)


def _is_plain(value: object) -> bool:
    return isinstance(value, bool | int | float) or (isinstance(value, tuple) and all(map(_is_plain, value)))


_tables: dict[str, torch.Tensor] = {}


def _multipliers() -> torch.Tensor:
    """Return an odd random number for each word of a block, the same on every rank: odd numbers lose no change."""
    if "multipliers" not in _tables:
        generator = torch.Generator().manual_seed(1)
        _tables["multipliers"] = torch.randint(-(2**62), 2**62, (_BLOCK_WORDS,), generator=generator) | 1
    return _tables["multipliers"]


def _signs(length: int) -> torch.Tensor:
    """Return random signs, the same on every rank."""
    known = _tables.get("signs")
    if known is None or known.numel() < length:
        generator = torch.Generator().manual_seed(2)
        known = _tables["signs"] = torch.randint(0, 2, (length,), generator=generator, dtype=torch.float64) * 2 - 1
    return known[:length]
