"""Workers whose gradients travel in two levels, without GPUs."""

from __future__ import annotations

from functools import partial
from typing import Any

from distributed import scripts
from heterotrain.exchange.islands.topology import IslandTopology
from heterotrain.membership import devices, elastic


def train(*, out: str, gpu: str, **arguments: Any) -> None:
    """Train as ``scripts.train`` on a CPU that passes for this GPU (none if empty), with gloo in the place of NCCL."""
    elastic.device_ids = lambda _device: (gpu,) if gpu else ()
    devices.IslandTopology = partial(IslandTopology, inner="gloo")  # type: ignore[assignment,misc]  # a deliberate stand-in
    scripts.train(out=out, **arguments)
