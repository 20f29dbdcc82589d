"""What every measurement says of the machine it was taken on, and what the benchmarks of the trainer share."""

from __future__ import annotations

import os
import platform
import socket
import subprocess
from datetime import UTC, datetime
from pathlib import Path


def machine() -> str:
    """Return date, processor, cores, versions and the load of the last minute as one line."""
    import torch  # noqa: PLC0415 - the drivers of some benchmarks do without

    model = next(
        (
            line.partition(":")[2].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if "model name" in line
        ),
        platform.machine(),
    )
    at = datetime.now(UTC).strftime("%Y-%m-%d %H:%M")
    return (
        f"{at} UTC, {os.cpu_count()} cores ({model}), {platform.system()} {platform.release()}, "
        f"PyTorch {torch.__version__}, load {os.getloadavg()[0]:.1f}"
    )


def free_port() -> int:
    """Return a port that nobody uses at the moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def run(*command: str) -> None:
    """Run a command that has to succeed.

    Raises:
        SystemExit: it did not; its own words are shown.
    """
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}: {done.stderr.strip()}")
