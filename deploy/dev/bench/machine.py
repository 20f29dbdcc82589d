"""The line about the machine in every measurement, and a free port."""

from __future__ import annotations

import os
import platform
import socket
from datetime import UTC, datetime
from pathlib import Path


def machine() -> str:
    """Return date, processor, cores, GPUs, versions and the load of the last minute as one line."""
    import torch  # noqa: PLC0415  # some callers never load it

    model = next(
        (
            line.partition(":")[2].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if "model name" in line
        ),
        platform.machine(),
    )
    at = datetime.now(UTC).strftime("%Y-%m-%d %H:%M")
    gpus = f"{torch.cuda.device_count()} x {torch.cuda.get_device_name(0)}, " if torch.cuda.is_available() else ""
    return (
        f"{at} UTC, {os.cpu_count()} cores ({model}), {gpus}{platform.system()} {platform.release()}, "
        f"PyTorch {torch.__version__}, load {os.getloadavg()[0]:.1f}"
    )


def free_port() -> int:
    """Return a free TCP port."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
