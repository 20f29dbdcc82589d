"""On which device a rank computes, and what the devices of all ranks mean for the way of the gradients."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from heterotrain.errors import UsageError
from heterotrain.identity import Identity

DeviceIds = tuple[str, ...]
"""What tells one accelerator of a job from all others; devices with a mark in common are one. None for a plain processor."""

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def take_device(identity: Identity) -> torch.device:
    """Return the accelerator of this local rank, which is CUDA's current one from now on, or the CPU."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    device = torch.device("cuda", identity.local_rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def device_ids(device: torch.device) -> DeviceIds:
    """Return the marks of a device: its own number, and its host's with its place on the bus.

    Either alone misses something: the parts of a divided card (MIG) have numbers of their own but are one card to NCCL, and
    a sandbox may give each pod a host's number of its own.
    """
    if device.type != "cuda":
        return ()
    found = torch.cuda.get_device_properties(device)
    ids = [f"{found.uuid}"]
    with contextlib.suppress(OSError):
        place = (found.pci_domain_id, found.pci_bus_id, found.pci_device_id)  # type: ignore[attr-defined]  # not in torch's stubs
        ids.append(f"{_BOOT_ID.read_text('ascii').strip()}/{':'.join(f'{number:x}' for number in place)}")
    return tuple(ids)


@dataclass(frozen=True, slots=True, kw_only=True)
class BackendChoice:
    """How gradients travel.

    Attributes:
        backend: ``nccl`` or ``gloo``.
        reason: why GPUs that are there do not use NCCL; empty where there is nothing to explain.
    """

    backend: str
    reason: str = ""


def choose_backend(setting: str, devices_W: Sequence[DeviceIds], names_W: Sequence[str]) -> BackendChoice:  # noqa: N803 - W ranks
    """Return the backend for gradients: as set, or NCCL where every rank has a GPU for itself, else gloo.

    Args:
        setting: ``auto``, ``nccl`` or ``gloo``.
        devices_W: by rank.
        names_W: by rank, for people.

    Raises:
        UsageError: NCCL is asked for, and these devices cannot use it.
    """
    if setting == "gloo":
        return BackendChoice(backend="gloo")
    obstacle = _without_gpu(devices_W, names_W) or _shared(devices_W, names_W)
    if not obstacle:
        return BackendChoice(backend="nccl")
    if setting == "nccl":
        raise UsageError(
            f"the backend is set to nccl, but {obstacle}: set it to auto or gloo, or give each rank a GPU of its own"
        )
    return BackendChoice(backend="gloo", reason=obstacle if any(devices_W) else "")


def _without_gpu(devices_W: Sequence[DeviceIds], names_W: Sequence[str]) -> str:  # noqa: N803 - W ranks
    lacking = [rank for rank, ids in enumerate(devices_W) if not ids]
    if not lacking:
        return ""
    first = f"rank {lacking[0]} ({names_W[lacking[0]]})"
    return f"{first} and {len(lacking) - 1} more have no GPU" if lacking[1:] else f"{first} has no GPU"


def _shared(devices_W: Sequence[DeviceIds], names_W: Sequence[str]) -> str:  # noqa: N803 - W ranks
    owner: dict[str, int] = {}
    for rank, ids in enumerate(devices_W):
        for mark in ids:
            first = owner.setdefault(mark, rank)
            if first != rank:
                return (
                    f"ranks {first} ({names_W[first]}) and {rank} ({names_W[rank]}) share one GPU, which NCCL refuses"
                )
    return ""
