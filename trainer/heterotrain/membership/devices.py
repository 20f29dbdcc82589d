"""The device of a rank, and which backend carries the gradients given the devices of all ranks."""

from __future__ import annotations

import contextlib
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from heterotrain_core.contract.choices import Backend

from heterotrain.errors import UsageError
from heterotrain.exchange.islands.topology import IslandTopology
from heterotrain.identity import Identity
from heterotrain.network.sums import FlatTopology, Topology

DeviceIds = tuple[str, ...]
"""Identifiers of one accelerator; devices that share an identifier are the same one. Empty for a CPU."""

OLDEST = (7, 0)
"""Compute capability of the oldest GPUs (Volta) that a locked PyTorch has kernels for (docs/install.md)."""
_ARCHITECTURE = re.compile(r"^(sm|compute)_(\d+)(\d)([af]?)$")
WITHOUT_NCCL = "no NCCL"
"""In place of a library's name and version, where PyTorch has none."""
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def take_device(identity: Identity) -> torch.device:
    """Return the accelerator of this local rank, made CUDA's current device, or the CPU.

    Raises:
        UsageError: this PyTorch has no kernels for the accelerator.
    """
    if not torch.cuda.is_available():
        return torch.device("cpu")
    device = torch.device("cuda", identity.local_rank % torch.cuda.device_count())
    if problem := missing_kernels(torch.cuda.get_arch_list(), torch.cuda.get_device_capability(device)):
        build = f"PyTorch {torch.__version__}"
        raise UsageError(f"{build} has no kernels for {torch.cuda.get_device_name(device)}: {problem}")
    torch.cuda.set_device(device)
    return device


def missing_kernels(architectures: Sequence[str], capability: tuple[int, int]) -> str:
    """Return why a build of PyTorch cannot run on a device, and the image to use; empty when it can.

    Compiled kernels (``sm_80``) run on devices of the same major version with at least their minor version. Those in
    the intermediate language PTX (``compute_90``) run on every newer device (CUDA C++ Programming Guide, "Binary
    Compatibility" and "PTX Compatibility"). Variants such as ``sm_90a`` run on exactly their own device.

    Args:
        architectures: what the build holds, by ``torch.cuda.get_arch_list()``. An empty list, and names of another
            vendor, tell nothing.
        capability: the device's compute capability, major and minor.
    """
    compiled: list[tuple[int, int]] = []
    for kind, major, minor, variant in (found for each in architectures for found in _ARCHITECTURE.findall(each)):
        version = (int(major), int(minor))
        compiled.append(version)
        runs = version == capability if variant == "a" else version[0] == capability[0] and version <= capability
        if runs or (kind == "compute" and not variant and version <= capability):
            return ""
    if not compiled:
        return ""
    names = ", ".join(f"{major}.{minor}" for major, minor in sorted(set(compiled)))
    if capability < OLDEST:
        remedy = f"GPUs below {OLDEST[0]}.{OLDEST[1]} are not supported, so leave their nodes out of the pools"
    elif capability < min(compiled):
        remedy = "use an image with PyTorch for CUDA 12, built with REQUIREMENTS=requirements/examples-cu12.txt"
    else:
        remedy = "use an image with a newer PyTorch"
    needed = f"{capability[0]}.{capability[1]}"
    return f"it needs compute capability {needed}, but this build has {names}; {remedy} (docs/install.md)"


def device_ids(device: torch.device) -> DeviceIds:
    """Return the identifiers of a device: its UUID, and its host's boot ID with its bus address.

    Neither is sufficient alone: the parts of a divided card (MIG) have UUIDs of their own but are one card to NCCL, and
    a sandbox may give each pod a boot ID of its own. The UUID is followed by ``@`` and the library that connects the
    device with others, because pools may have images of their own.
    """
    if device.type != "cuda":
        return ()
    found = torch.cuda.get_device_properties(device)
    ids = [f"{found.uuid}@{_own_library()}"]
    bus: Any = found  # torch's stubs lack the bus address
    with contextlib.suppress(OSError):
        place = (bus.pci_domain_id, bus.pci_bus_id, bus.pci_device_id)
        ids.append(f"{_BOOT_ID.read_text('ascii').strip()}/{':'.join(f'{number:x}' for number in place)}")
    return tuple(ids)


def _own_library() -> str:
    """Return name and version of the library that torch calls NCCL: on GPUs of AMD, it is RCCL."""
    with contextlib.suppress(AttributeError, RuntimeError):
        version: Any = torch.cuda.nccl  # torch's stubs lack it
        numbers = ".".join(str(each) for each in version.version())
        return f"{'RCCL' if torch.version.hip else 'NCCL'} {numbers}"
    return WITHOUT_NCCL


@dataclass(frozen=True, slots=True, kw_only=True)
class BackendChoice:
    """What carries gradients.

    Attributes:
        topology: connects the ranks.
        reason: why not all GPUs use NCCL with each other; empty where there is nothing to explain.
    """

    topology: Topology
    reason: str = ""

    def __str__(self) -> str:
        """Return how gradients travel."""
        return f"gradients travel by {self.topology}: {self.reason}"


def choose_backend(
    setting: Backend,
    devices_W: Sequence[DeviceIds],  # noqa: N803  # W ranks
    names_W: Sequence[str],  # noqa: N803  # W ranks
) -> BackendChoice:
    """Return the backend for gradients: as set, or NCCL where every rank has a GPU for itself, else gloo.

    NCCL in different versions, and NCCL with AMD's RCCL, do not connect. Where some ranks could use NCCL with each
    other, they add up by it first, and gloo connects what is left (``exchange/islands``).

    Args:
        setting: the configured backend.
        devices_W: by rank.
        names_W: by rank, for people.

    Raises:
        UsageError: NCCL is asked for, and these devices cannot use it.
    """
    if setting is Backend.GLOO:
        return BackendChoice(topology=FlatTopology("gloo"))
    obstacle = _without_gpu(devices_W, names_W) or _shared(devices_W, names_W) or _mixed(devices_W, names_W)
    if not obstacle:
        return BackendChoice(topology=FlatTopology("nccl"))
    if setting is Backend.NCCL:
        raise UsageError(
            f"the backend is set to NCCL, but {obstacle}: set it to Auto or Gloo, or give each rank a GPU of its own"
        )
    islands = islands_of(devices_W)
    topology = IslandTopology(islands=islands) if islands else FlatTopology("gloo")
    return BackendChoice(topology=topology, reason=obstacle if any(devices_W) else "")


def islands_of(devices_W: Sequence[DeviceIds]) -> tuple[tuple[int, ...], ...]:  # noqa: N803  # W ranks
    """Return the sets of at least two ranks that NCCL connects, each ascending, by their lowest rank.

    Ranks that share a GPU are in none: an operation of NCCL occupies its GPU while it waits for other ranks.
    """
    ranks_of = Counter(mark for ids in devices_W for mark in ids)
    found: dict[str, list[int]] = {}
    for rank, ids in enumerate(devices_W):
        if ids and all(ranks_of[mark] == 1 for mark in ids) and _library(ids) != WITHOUT_NCCL:
            found.setdefault(_library(ids), []).append(rank)
    return tuple(tuple(ranks) for ranks in found.values() if len(ranks) > 1)


def _library(ids: DeviceIds) -> str:
    return ids[0].partition("@")[2]


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


def _mixed(devices_W: Sequence[DeviceIds], names_W: Sequence[str]) -> str:  # noqa: N803  # W ranks
    libraries = [_library(ids) for ids in devices_W]
    other = next((rank for rank, library in enumerate(libraries) if library != libraries[0]), None)
    if other is None:
        return ""
    first, second = f"rank 0 ({names_W[0]})", f"rank {other} ({names_W[other]})"
    return f"{first} has {libraries[0]} and {second} has {libraries[other]}, which do not connect"
