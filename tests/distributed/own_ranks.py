"""Ranks without an operator, forked from the zygote: one alone, or several as torchrun starts them."""

from __future__ import annotations

import contextlib
import os
import queue
import signal
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from distributed.harness import LIMIT_S, START_S, Zygote
from support.ports import free_port
from support.waiting import wait_until


@dataclass(slots=True, kw_only=True)
class OwnRank:
    """One process that runs a script by itself."""

    output: Path
    pid: int
    inbox: queue.Queue[dict[str, Any]]
    code: int | None = None

    def log(self) -> str:
        """Return what it has printed."""
        return self.output.read_text() if self.output.exists() else ""

    def signal(self, number: signal.Signals) -> None:
        """Send it a signal if it still exists."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, number)

    def poll(self) -> int | None:
        """Return its exit code, ``None`` while it runs."""
        if self.code is None:
            with contextlib.suppress(queue.Empty):
                self.code = self.inbox.get_nowait()["code"]
        return self.code

    def until(self, condition: Callable[[], bool], what: str) -> None:
        """Wait for a condition; fail with the rank's output if it does not hold in time."""
        wait_until(condition, what, timeout_s=LIMIT_S, evidence=self.log)

    def until_exists(self, path: Path) -> None:
        """Wait until the script has made a file."""
        self.until(path.exists, f"{path.name} exists")

    def until_said(self, text: str) -> None:
        """Wait until the script has printed a text."""
        self.until(lambda: text in self.log(), f"it says {text!r}")

    def ended(self) -> int:
        """Return the exit code, once it has ended."""
        self.until(lambda: self.poll() is not None, "it ends")
        assert self.code is not None
        return self.code


class OwnRanks:
    """Starts such ranks, and kills those that are left over."""

    def __init__(self, zygote: Zygote, folder: Path) -> None:
        self._zygote = zygote
        self._folder = folder
        self._ranks: list[OwnRank] = []

    def start(self, script: str, *, world_size: int = 0, **arguments: Any) -> list[OwnRank]:
        """Start a function on each rank of a world; 0 for a process that is alone."""
        port = free_port() if world_size else 0
        return [self._start(script, rank, world_size, port, arguments) for rank in range(world_size or 1)]

    def _start(self, script: str, rank: int, world_size: int, port: int, arguments: dict[str, Any]) -> OwnRank:
        environ = {
            "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world_size),
            "LOCAL_WORLD_SIZE": str(world_size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
        }  # fmt: skip
        output = self._folder / f"output-{len(self._ranks)}"
        command = {
            "environ": environ if world_size else {}, "output": str(output), "script": script, "arguments": arguments,
        }  # fmt: skip
        inbox = self._zygote.start(str(output), command)
        rank_ = OwnRank(output=output, pid=inbox.get(timeout=START_S)["pid"], inbox=inbox)
        self._ranks.append(rank_)
        return rank_

    def close(self) -> None:
        """Kill what still runs."""
        for rank in self._ranks:
            if rank.poll() is None:
                rank.signal(signal.SIGKILL)
