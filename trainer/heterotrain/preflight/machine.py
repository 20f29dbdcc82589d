"""Checks of one machine: GPU, driver, kernels, memory, shared memory, store and names."""

from __future__ import annotations

import contextlib
import os
import platform
import secrets
import shutil
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

import torch
from heterotrain_core.uris import redacted
from heterotrain_core.version import __version__

from heterotrain.checkpoints.storage import Storage, StoredFile
from heterotrain.errors import UsageError
from heterotrain.membership.devices import missing_kernels
from heterotrain.preflight.result import Check, Verdict

SHM: Final = Path("/dev/shm")  # noqa: S108  # the file system itself is checked
LEAST_SHM_BYTES: Final = 1 << 30
"""Loader processes and NCCL pass data through it; container engines give 64 MB."""
PROBE_BYTES: Final = 4 << 20
LEAST_FREE_PART: Final = 0.9
"""Of a GPU's memory: other programs hold the rest."""
_RIGHT = 1e-2
"""Largest relative error of a product of matrices in any format that a GPU uses by default."""
_SIZE = 512
_VISIBLE = "CUDA_VISIBLE_DEVICES"
_UNUSED: Final = {
    "neuron[0-9]*": "a Neuron device",
    "hl[0-9]*": "a Gaudi",
    "accel[0-9]*": "a TPU or another accelerator",
    "accel/accel[0-9]*": "a Gaudi or another accelerator",
    "davinci[0-9]*": "an Ascend",
    "kfd": "a GPU of AMD, but no PyTorch for ROCm",
}
"""Device files that device plugins put into a container, and what they are of."""
_MOST_NAMED = 4


def versions() -> Check:
    """Return the versions that take part."""
    text = f"heterotrain {__version__}, Python {platform.python_version()}, PyTorch {torch.__version__}"
    return Check(name="versions", verdict=Verdict.OK, message=text)


def driver(devices: Path = Path("/dev")) -> Check:
    """Return whether PyTorch reaches the GPUs that the machine has."""
    present = sorted(path.name for path in devices.glob("nvidia[0-9]*"))
    slices = os.environ.get("NVIDIA_VISIBLE_DEVICES", "").count("MIG-")
    if slices > 1:
        text = f"{slices} MIG slices are visible, but CUDA shows each process only one: request one for each worker"
        return Check(name="driver", verdict=Verdict.FAILED, message=text)
    if torch.cuda.is_available():
        text = f"CUDA {torch.version.cuda}, {torch.cuda.device_count()} GPUs: {torch.cuda.get_device_name(0)}"
        return Check(name="driver", verdict=Verdict.OK, message=text)
    if unused := _unused_accelerator(devices):
        text = f"there is {unused}, which this library does not use; training uses the CPU"
        return Check(name="driver", verdict=Verdict.FAILED, message=text)
    if not present:
        return Check(name="driver", verdict=Verdict.SKIPPED, message="there is no GPU; training uses the CPU")
    visible = os.environ.get(_VISIBLE)
    if visible is not None and visible.strip() in {"", "-1"}:
        text = f"{', '.join(present)} is hidden by {_VISIBLE}={visible}; training uses the CPU"
        return Check(name="driver", verdict=Verdict.SKIPPED, message=text)
    if torch.version.cuda is None:
        why = "this PyTorch is built without CUDA: use an image with CUDA"
    else:
        why = f"PyTorch for CUDA {torch.version.cuda} cannot use it: update the driver (docs/install.md)"
    return Check(name="driver", verdict=Verdict.FAILED, message=f"there is {', '.join(present)}, but {why}")


def _unused_accelerator(devices: Path) -> str:
    """Return an accelerator that PyTorch or the machine has and that nothing here uses; empty without one."""
    with contextlib.suppress(AttributeError, RuntimeError):  # PyTorch below 2.6 has no such module
        found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
        if found is not None and found.type != "cuda":
            return f"an accelerator of type {found.type}"
    for pattern, what in _UNUSED.items():
        if present := sorted(str(path.relative_to(devices)) for path in devices.glob(pattern)):
            return f"{what} ({', '.join(present[:_MOST_NAMED])})"
    return ""


def kernels(device: torch.device) -> Check:
    """Return whether this PyTorch has kernels for the device."""
    if device.type != "cuda":
        return Check(name="kernels", verdict=Verdict.SKIPPED, message="the CPU needs none")
    capability = torch.cuda.get_device_capability(device)
    problem = missing_kernels(torch.cuda.get_arch_list(), capability)
    if problem:
        return Check(name="kernels", verdict=Verdict.FAILED, message=problem)
    text = f"there are kernels for compute capability {capability[0]}.{capability[1]}"
    return Check(name="kernels", verdict=Verdict.OK, message=text)


def computing(device: torch.device) -> Check:
    """Return whether a product of matrices is right, and how long it takes."""
    draw = torch.Generator().manual_seed(0)
    left, right = (torch.randn(_SIZE, _SIZE, generator=draw) for _ in range(2))
    try:
        there = [each.to(device) for each in (left, right)]
        (there[0] @ there[1]).cpu()
        began_s = time.perf_counter()
        product = (there[0] @ there[1]).cpu()
        took_s = time.perf_counter() - began_s
    except RuntimeError as error:
        return Check(name="computing", verdict=Verdict.FAILED, message=f"the device fails: {_first(error)}")
    truth = left.double() @ right.double()
    error_ratio = float((product.double() - truth).norm() / truth.norm())
    if not error_ratio < _RIGHT:
        text = f"a product of matrices is wrong by {error_ratio:.0%}: do not use this device"
        return Check(name="computing", verdict=Verdict.FAILED, message=text)
    text = f"a product of {_SIZE} x {_SIZE} matrices is right and takes {1e3 * took_s:.1f} ms"
    return Check(name="computing", verdict=Verdict.OK, message=text)


def gpu_memory(device: torch.device) -> Check:
    """Return how much of the GPU's memory is free."""
    if device.type != "cuda":
        return Check(name="GPU memory", verdict=Verdict.SKIPPED, message="there is no GPU")
    free, total = torch.cuda.mem_get_info(device)
    text = f"{free / 2**30:.1f} of {total / 2**30:.1f} GiB are free"
    if free < LEAST_FREE_PART * total:
        text += ": another program uses this GPU; give each rank a GPU of its own"
        return Check(name="GPU memory", verdict=Verdict.WARNING, message=text)
    return Check(name="GPU memory", verdict=Verdict.OK, message=text)


def nccl(device: torch.device) -> Check:
    """Return whether gradients can travel by NCCL."""
    if device.type != "cuda":
        return Check(name="NCCL", verdict=Verdict.SKIPPED, message="without GPUs, gradients travel by Gloo")
    if not torch.distributed.is_nccl_available():
        text = "this PyTorch has no NCCL, so gradients travel by Gloo, slowly: use an image with CUDA"
        return Check(name="NCCL", verdict=Verdict.WARNING, message=text)
    version = ".".join(map(str, torch.cuda.nccl.version()))
    return Check(name="NCCL", verdict=Verdict.OK, message=f"NCCL {version}")


def shared_memory(folder: Path = SHM) -> Check:
    """Return the size of /dev/shm, and whether it can be written."""
    probe = folder / f"heterotrain-preflight-{secrets.token_hex(4)}"
    try:
        total = shutil.disk_usage(folder).total
        probe.write_bytes(b"probe")
        probe.unlink()
    except OSError as error:
        text = f"{folder} cannot be used ({error.strerror}): mount a memory-backed emptyDir there"
        return Check(name="shared memory", verdict=Verdict.FAILED, message=text)
    size = f"{folder} has {total / 2**20:.0f} MiB"
    if total < LEAST_SHM_BYTES:
        text = f"{size}: loader processes and NCCL may need more; the operator mounts more unless the template does"
        return Check(name="shared memory", verdict=Verdict.WARNING, message=text)
    return Check(name="shared memory", verdict=Verdict.OK, message=size)


def store(
    uri: str | None, *, who: str, connect: Callable[[str], Storage] = Storage, probe_bytes: int = PROBE_BYTES
) -> Check:
    """Return whether a file can be written to the checkpoint store, read again and removed, and how fast.

    Args:
        uri: folder of the checkpoints; ``None`` for none.
        who: makes the file's name unique.
        connect: opens the store.
        probe_bytes: size of the file.
    """
    if uri is None:
        return Check(name="store", verdict=Verdict.SKIPPED, message="no checkpoint URI is given (--store)")
    content, name = secrets.token_bytes(probe_bytes), f"preflight-{who}"
    try:
        storage = connect(uri)
        began_s = time.perf_counter()
        written: StoredFile = storage.put(name, [content])
        wrote_s, began_s = time.perf_counter() - began_s, time.perf_counter()
        found = bytearray(probe_bytes)
        try:
            storage.get_into(written, [memoryview(found)])
        finally:
            storage.remove([name])
        read_s = time.perf_counter() - began_s
    except UsageError as error:
        return Check(name="store", verdict=Verdict.FAILED, message=str(error))
    except Exception as error:  # noqa: BLE001  # any error of a store's library
        why = redacted(_first(error))
        text = f"{redacted(uri)} cannot be written and read ({why}): check its name, credentials, rights and network"
        return Check(name="store", verdict=Verdict.FAILED, message=text)
    mib = probe_bytes / 2**20
    speed = f"is written at {mib / wrote_s:.0f} MiB/s and read at {mib / read_s:.0f} MiB/s, with {mib:.3g} MiB"
    text = f"{redacted(uri)} {speed}"
    return Check(name="store", verdict=Verdict.OK, message=text)


def names(hosts: tuple[str, ...]) -> Check:
    """Return whether the given hosts have addresses, and how long the slowest answer takes."""
    slowest_s = 0.0
    for host in hosts:
        began_s = time.perf_counter()
        try:
            socket.getaddrinfo(host, None)
        except OSError as error:
            text = f"{host} has no address ({error.strerror}): check the cluster's DNS and NetworkPolicies"
            return Check(name="DNS", verdict=Verdict.FAILED, message=text)
        slowest_s = max(slowest_s, time.perf_counter() - began_s)
    text = f"{', '.join(hosts)} resolved; the slowest answer took {1e3 * slowest_s:.0f} ms"
    if slowest_s > 1:
        return Check(name="DNS", verdict=Verdict.WARNING, message=f"{text}: check the cluster's DNS")
    return Check(name="DNS", verdict=Verdict.OK, message=text)


def hosts_to_resolve() -> tuple[str, ...]:
    """Return the names that a rank on this machine has to resolve."""
    in_pod = ("kubernetes.default.svc",) if "KUBERNETES_SERVICE_HOST" in os.environ else ()
    leader = os.environ.get("MASTER_ADDR")
    return (*dict.fromkeys((socket.gethostname(), *((leader,) if leader else ()), *in_pod)),)


def _first(error: BaseException) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    return text[:200]
