"""The device of a rank, and which backend carries the gradients given the devices of all ranks."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from heterotrain_core.contract.choices import Backend

from heterotrain.errors import UsageError
from heterotrain.identity import Identity

DeviceIds = tuple[str, ...]
"""Identifiers of one accelerator; devices that share an identifier are the same one. Empty for a CPU."""

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def take_device(identity: Identity) -> torch.device:
    """Return the accelerator of this local rank, made CUDA's current device, or the CPU."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    device = torch.device("cuda", identity.local_rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def device_ids(device: torch.device) -> DeviceIds:
    """Return the identifiers of a device: its UUID, and its host's boot ID with its bus address.

    Neither is sufficient alone: the parts of a divided card (MIG) have UUIDs of their own but are one card to NCCL, and
    a sandbox may give each pod a boot ID of its own.
    """
    if device.type != "cuda":
        return ()
    found = torch.cuda.get_device_properties(device)
    ids = [f"{found.uuid}"]
    bus: Any = found  # torch's stubs lack the bus address
    with contextlib.suppress(OSError):
        place = (bus.pci_domain_id, bus.pci_bus_id, bus.pci_device_id)
        ids.append(f"{_BOOT_ID.read_text('ascii').strip()}/{':'.join(f'{number:x}' for number in place)}")
    return tuple(ids)


@dataclass(frozen=True, slots=True, kw_only=True)
class BackendChoice:
    """The backend that carries gradients.

    Attributes:
        backend: torch's name for it, ``nccl`` or ``gloo``.
        reason: why existing GPUs do not use NCCL; empty where there is nothing to explain.
    """

    backend: str
    reason: str = ""


def choose_backend(
    setting: Backend,
    devices_W: Sequence[DeviceIds],  # noqa: N803  # W ranks
    names_W: Sequence[str],  # noqa: N803  # W ranks
) -> BackendChoice:
    """Return the backend for gradients: as set, or NCCL where every rank has a GPU for itself, else gloo.

    Args:
        setting: the configured backend.
        devices_W: by rank.
        names_W: by rank, for people.

    Raises:
        UsageError: NCCL is asked for, and these devices cannot use it.
    """
    if setting is Backend.GLOO:
        return BackendChoice(backend="gloo")
    obstacle = _without_gpu(devices_W, names_W) or _shared(devices_W, names_W)
    if not obstacle:
        return BackendChoice(backend="nccl")
    if setting is Backend.NCCL:
        raise UsageError(
            f"the backend is set to NCCL, but {obstacle}: set it to Auto or Gloo, or give each rank a GPU of its own"
        )
    return BackendChoice(backend="gloo", reason=obstacle if any(devices_W) else "")


def _without_gpu(devices_W: Sequence[DeviceIds], names_W: Sequence[str]) -> str:  # noqa: N803  # W ranks
    lacking = [rank for rank, ids in enumerate(devices_W) if not ids]
    if not lacking:
        return ""
    first = f"rank {lacking[0]} ({names_W[lacking[0]]})"
    return f"{first} and {len(lacking) - 1} more have no GPU" if lacking[1:] else f"{first} has no GPU"


def _shared(devices_W: Sequence[DeviceIds], names_W: Sequence[str]) -> str:  # noqa: N803  # W ranks
    owner: dict[str, int] = {}
    for rank, ids in enumerate(devices_W):
        for mark in ids:
            first = owner.setdefault(mark, rank)
            if first != rank:
                return (
                    f"ranks {first} ({names_W[first]}) and {rank} ({names_W[rank]}) share one GPU, which NCCL refuses"
                )
    return ""
