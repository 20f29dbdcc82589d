"""The machine and the software of a measurement: without them, its figures mean little."""

from __future__ import annotations

import os
import subprocess
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any

_NVIDIA_SMI = ("nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader")


def record() -> dict[str, Any]:
    """Return versions, processors, memory, GPUs with their driver, and the commit of the folder's repository."""
    versions: dict[str, str] = import_module("heterotrain.checkpoints.record").versions()
    return {
        "versions": versions,
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)),  # that this process may use
        "memoryGib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "load": list(os.getloadavg()),
        "gpus": lines_of(*_NVIDIA_SMI),
        "commit": "".join(lines_of("git", "rev-parse", "HEAD")) or None,
        "changed": bool(lines_of("git", "status", "--porcelain", "--untracked-files=no")),
    }


def gpus() -> int:
    """Return the number of GPUs that PyTorch can use."""
    return int(import_module("torch").cuda.device_count())


def device_name() -> str:
    """Return a name for this machine's device, for a profile."""
    torch = import_module("torch")
    name = str(torch.cuda.get_device_name(0)) if torch.cuda.is_available() else "cpu"
    return "-".join("".join(c if c.isalnum() else " " for c in name.lower()).split()) or "device"


def _processor() -> str:
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return "unknown"


def lines_of(*command: str) -> list[str]:
    """Return the lines that a program prints; none where it is missing or fails."""
    with suppress(OSError, subprocess.SubprocessError):
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=10)
        return [line.strip() for line in done.stdout.splitlines() if line.strip()]
    return []
