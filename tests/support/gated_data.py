"""Data sets whose loading a test follows and holds up, in a module that loader processes can import."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from support.waiting import wait_until

LIMIT_S = 120.0


class Gated:
    """Samples that are noted when they are loaded; one of them waits until a file exists."""

    def __init__(self, folder: Path, gate: int) -> None:
        self.folder = folder
        self.gate = gate

    def __len__(self) -> int:
        return 96

    def __getitem__(self, index: int) -> torch.Tensor:
        (self.folder / f"begun-{index}").touch()
        if index == self.gate:
            wait_until((self.folder / "open").exists, "the gate opens", timeout_s=LIMIT_S)
        return torch.tensor(index)


class Opened(Gated):
    """A data set that a process has to prepare before it reads."""

    number = -1

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor(self.number + index)


def prepare(worker: int) -> None:
    """Prepare the data set of this process, as scripts do it with torch's loader."""
    info: Any = torch.utils.data.get_worker_info()
    assert isinstance(info.dataset, Opened)
    info.dataset.number = 1000 * (worker + 1)
