"""Wheels as the release builds them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path


def built(source: Path, folder: Path) -> Path:
    """Build the wheel of a source folder, and return it."""
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    subprocess.run(build, cwd=source, check=True, capture_output=True)
    (wheel,) = folder.glob("*.whl")
    return wheel
