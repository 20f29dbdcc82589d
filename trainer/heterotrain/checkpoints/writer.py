"""Writes checkpoints in a thread; training waits only while the state is copied to host memory."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from heterotrain_core.contract.plan import Plan

from heterotrain.checkpoints.checkpoint import CheckpointFolder, Label, Manifest, new_mark
from heterotrain.checkpoints.storage import StoredFile
from heterotrain.state.parts import cut, host_memory, pack, sizes_bytes
from heterotrain.state.tensors import flatten

_log = logging.getLogger(__name__)

PATIENCE_S = 60.0
"""For the other ranks' parts, beyond ten times what the own part took."""
POLL_S = (0.05, 1.0)
"""Between looks for the other ranks' parts: first and longest."""


def writer_among(plan: Plan, plan_ranks: tuple[int, ...]) -> int | None:
    """Return the plan rank that writes checkpoints: on-demand first, since it is the least likely to vanish."""
    return min(plan_ranks, key=lambda rank: (not plan.members[rank].on_demand, rank), default=None)


class MissingParts(Enum):
    """Why parts of other ranks are not there."""

    NOTHING = "are there"
    LOST = "were lost with a rank"
    UNSEEN = "did not appear"


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteResult:
    """How an attempt ended.

    Attributes:
        step: committed steps in the state.
        manifest: of the whole checkpoint, on the rank that made it complete.
        size_bytes: what this rank wrote.
        put_s: how long that took.
        total_s: from the end of the copy to the end of the attempt, waiting for other ranks included.
        failure: why there is no checkpoint; empty when all is well.
        missing: whether it failed for want of other ranks' parts, and why they were not there.
    """

    step: int
    manifest: Manifest | None
    size_bytes: int
    put_s: float
    total_s: float
    failure: str = ""
    missing: MissingParts = MissingParts.NOTHING


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteRequest:
    """What to write: part ``index`` of ``count`` of a state, and whether this rank makes the checkpoint complete."""

    label: Label
    index: int = 0
    count: int = 1
    completes: bool = True
    record: bytes | None = None


class CheckpointWriter:
    """One attempt at a time."""

    def __init__(self, folder: CheckpointFolder, *, on_done: Callable[[WriteResult], None]) -> None:
        """``on_done`` is called in the writing thread."""
        self._folder = folder
        self._on_done = on_done
        self._thread: threading.Thread | None = None
        self._began_s = 0.0
        self._alone = threading.Event()
        self._buffer: torch.Tensor | None = None

    @property
    def running_s(self) -> float | None:
        """For how long a checkpoint has been on its way, ``None`` when none is."""
        return time.monotonic() - self._began_s if self._thread is not None and self._thread.is_alive() else None

    def prepare(self, length_bytes: int, *, pin: bool) -> None:
        """Take memory for copies of this length in the background: the first copy would wait for it otherwise."""
        if self._buffer is not None or self.running_s is not None:
            return

        def take() -> None:
            self._buffer = host_memory(length_bytes, pin=pin)

        self._began_s = time.monotonic()
        self._thread = threading.Thread(target=take, name="heterotrain-checkpoint-memory", daemon=True)
        self._thread.start()

    def start(self, state: dict[str, Any], *, generation: int, step: int, record: bytes | None = None) -> float:
        """Copy the whole state and write it in the background; return the seconds that copying took.

        A checkpoint that is still being written is waited for first: two would compete for the same disk.

        Args:
            state: nested, with tensors on any device.
            generation: of the formation that got there.
            step: committed steps.
            record: a file beside the checkpoint; ``None`` for none.
        """
        label = Label(generation=generation, step=step, mark=new_mark())
        return self.start_part(state, WriteRequest(label=label, record=record))

    def start_part(self, state: dict[str, Any], request: WriteRequest) -> float:
        """Copy this rank's part of the state and write it in the background; return the seconds that copying took."""
        self.wait()
        began_s = time.perf_counter()
        live = flatten(state)
        byte_ranges = cut(sizes_bytes(live.tensors), request.count)[request.index]
        self._buffer = pack(live.tensors, byte_ranges, self._buffer)
        pause_s = time.perf_counter() - began_s
        self._began_s = time.monotonic()
        self._alone.clear()
        self._thread = threading.Thread(
            target=self._write, args=(request, live.skeleton, self._buffer), name="heterotrain-checkpoint", daemon=True
        )
        self._thread.start()
        return pause_s

    def wait(self, within_s: float | None = None) -> bool:
        """Return when nothing is being written, or after ``within_s`` seconds; whether nothing is."""
        if self._thread is not None:
            self._thread.join(within_s)
        return self.running_s is None

    def stop_waiting_for_parts(self) -> None:
        """Do not wait any longer for parts of other ranks: one of them is lost."""
        self._alone.set()

    def _write(self, request: WriteRequest, skeleton: bytes, data: torch.Tensor) -> None:
        began_s = time.perf_counter()
        put_s, manifest, failure, missing = 0.0, None, "", MissingParts.NOTHING
        try:
            part = self._folder.write_part(request.label, data, index=request.index, count=request.count)
            put_s = time.perf_counter() - began_s
            if request.completes:
                parts = [part] if request.count == 1 else self._await_parts(request, patience_s=PATIENCE_S + 10 * put_s)
                if parts is None:
                    missing = MissingParts.LOST if self._alone.is_set() else MissingParts.UNSEEN
                    failure = f"the parts of other ranks {missing.value}"
                else:
                    manifest = self._folder.complete(
                        request.label, skeleton, parts, now_s=time.time(), record=request.record
                    )
        except Exception as error:  # noqa: BLE001  # whatever a store's library raises: training goes on
            failure = str(error) or type(error).__name__
        if failure:
            _log.error("checkpoint of step %d failed: %s", request.label.step, failure)
            self._folder.discard(request.label)
        self._on_done(
            WriteResult(
                step=request.label.step, manifest=manifest, size_bytes=data.numel(), put_s=put_s,
                total_s=time.perf_counter() - began_s, failure=failure, missing=missing,
            )
        )  # fmt: skip

    def _await_parts(self, request: WriteRequest, *, patience_s: float) -> list[StoredFile] | None:
        deadline_s, pause_s = time.monotonic() + patience_s, POLL_S[0]
        while True:
            last = self._alone.is_set() or time.monotonic() > deadline_s
            try:
                parts = self._folder.parts_there(request.label, request.count)
            except Exception as error:  # noqa: BLE001  # whatever a store's library raises
                _log.warning("cannot look for the parts of other ranks: %s", error)
                parts = None
            if parts is not None or last:
                return parts
            self._alone.wait(pause_s)
            pause_s = min(2 * pause_s, POLL_S[1])
