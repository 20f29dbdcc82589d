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

from heterotrain.checkpoints import part as parts_of_state
from heterotrain.checkpoints.checkpoint import CheckpointFolder
from heterotrain.checkpoints.manifest import Label, Manifest, WrittenPart
from heterotrain.state.memory import host_memory
from heterotrain.state.ranges import Holding, TensorRange
from heterotrain.state.tensors import Entry, flatten

_log = logging.getLogger(__name__)

PATIENCE_S = 60.0
"""Limit of the wait for other ranks' parts, in addition to ten times the duration of the own part."""
POLL_S = (0.05, 1.0)
"""Pauses between checks for the other ranks' parts: the first and the longest one."""


def writer_among(plan: Plan, plan_ranks: tuple[int, ...]) -> int | None:
    """Return the plan rank that writes checkpoints: on-demand first, since it is the least likely to vanish."""
    return min(plan_ranks, key=lambda rank: (not plan.ranks[rank].on_demand, rank), default=None)


class MissingParts(Enum):
    """Why parts of other ranks are missing."""

    NOTHING = "are there"
    LOST = "were lost with a rank"
    UNSEEN = "did not appear"


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteResult:
    """The result of an attempt.

    Attributes:
        step: committed steps in the state.
        hooks: steps and epochs whose hooks have run.
        manifest: manifest of the whole checkpoint, on the rank that completed it.
        size_bytes: bytes written by this rank.
        put_s: seconds that writing them took.
        total_s: seconds from the end of the copy to the end of the attempt, including waits for other ranks.
        failure: why there is no checkpoint; empty on success.
        missing: whether other ranks' parts were missing, and why.
    """

    step: int
    hooks: tuple[int, int]
    manifest: Manifest | None
    size_bytes: int
    put_s: float
    total_s: float
    failure: str = ""
    missing: MissingParts = MissingParts.NOTHING


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteRequest:
    """A request to write part ``index`` of ``count`` of a state.

    ``completes`` marks the rank that completes the checkpoint; ``record`` is the content of its record file; ``hooks``
    are the steps and epochs whose hooks have run. ``holdings`` say what each rank holds (``None``: everything); there
    are none where all ranks hold everything.
    """

    label: Label
    index: int = 0
    count: int = 1
    completes: bool = True
    hooks: tuple[int, int] = (-1, -1)
    record: bytes | None = None
    holdings: tuple[Holding | None, ...] = ()


class CheckpointWriter:
    """Writes checkpoints or parts of them, one attempt at a time."""

    def __init__(self, folder: CheckpointFolder, *, on_done: Callable[[WriteResult], None]) -> None:
        """``on_done`` is called in the writing thread with the result of each attempt."""
        self._folder = folder
        self._on_done = on_done
        self._thread: threading.Thread | None = None
        self._began_s = 0.0
        self._stop_waiting = threading.Event()
        self._buffer: torch.Tensor | None = None

    @property
    def running_s(self) -> float | None:
        """Seconds for which a checkpoint has been in progress, ``None`` when none is."""
        return time.monotonic() - self._began_s if self._thread is not None and self._thread.is_alive() else None

    @property
    def idle_s(self) -> float:
        """Seconds since the store last finished something for the checkpoint in progress, or since it began."""
        return time.monotonic() - max(self._began_s, self._folder.storage.active_s)

    def prepare(self, length_bytes: int, *, pin: bool) -> None:
        """Allocate memory for copies of this length in the background, so that the first copy need not wait for it."""
        if self._buffer is not None or self.running_s is not None:
            return

        def take() -> None:
            self._buffer = host_memory(length_bytes, pin=pin)

        self._began_s = time.monotonic()
        self._thread = threading.Thread(target=take, name="heterotrain-checkpoint-memory", daemon=True)
        self._thread.start()

    def start(self, state: dict[str, Any], request: WriteRequest) -> float:
        """Copy this rank's part of the state and write it in the background; return the seconds that copying took.

        Waits first for a part that is still being written: two would compete for the same disk.
        """
        self.wait()
        began_s = time.perf_counter()
        live = flatten(state)
        if request.holdings:
            chosen = parts_of_state.own(live, request.index, request.holdings, state["shapes"])
        else:
            chosen = parts_of_state.cut(live, request.index, request.count)
        self._buffer = parts_of_state.packed(chosen, self._buffer)
        pause_s = time.perf_counter() - began_s
        self._began_s = time.monotonic()
        self._stop_waiting.clear()
        self._thread = threading.Thread(
            target=self._write,
            args=(request, live.skeleton, [(held.entry, own) for held, own in chosen], self._buffer),
            name="heterotrain-checkpoint",
            daemon=True,
        )
        self._thread.start()
        return pause_s

    def wait(self, within_s: float | None = None) -> bool:
        """Wait until nothing is being written, at most ``within_s`` seconds; return whether nothing is."""
        if self._thread is not None:
            self._thread.join(within_s)
        return self.running_s is None

    def stop_waiting_for_parts(self) -> None:
        """Stop waiting for parts of other ranks, because one of them is lost."""
        self._stop_waiting.set()

    def _write(
        self, request: WriteRequest, skeleton: bytes, ranges: list[tuple[Entry, TensorRange]], data: torch.Tensor
    ) -> None:
        began_s = time.perf_counter()
        put_s, manifest, failure, missing = 0.0, None, "", MissingParts.NOTHING
        try:
            part = self._folder.write_part(
                request.label, ranges, data, index=request.index, count=request.count,
                skeleton=skeleton if request.holdings else b"",
            )  # fmt: skip
            put_s = time.perf_counter() - began_s
            if request.completes:
                parts = [part] if request.count == 1 else self._await_parts(request, patience_s=PATIENCE_S + 10 * put_s)
                if parts is None:
                    missing = MissingParts.LOST if self._stop_waiting.is_set() else MissingParts.UNSEEN
                    failure = f"the parts of other ranks {missing.value}"
                else:
                    manifest = self._folder.complete(
                        request.label, skeleton, parts, now_s=time.time(), record=request.record, hooks=request.hooks
                    )
        except Exception as error:  # noqa: BLE001  # any error of a store's library: training continues
            failure = str(error) or type(error).__name__
        if failure:
            _log.error("checkpoint of step %d failed: %s", request.label.step, failure)
            self._folder.discard(request.label)
        self._on_done(
            WriteResult(
                step=request.label.step, hooks=request.hooks, manifest=manifest, size_bytes=data.numel(), put_s=put_s,
                total_s=time.perf_counter() - began_s, failure=failure, missing=missing,
            )
        )  # fmt: skip

    def _await_parts(self, request: WriteRequest, *, patience_s: float) -> list[WrittenPart] | None:
        deadline_s, pause_s = time.monotonic() + patience_s, POLL_S[0]
        while True:
            last = self._stop_waiting.is_set() or time.monotonic() > deadline_s
            try:
                parts = self._folder.parts_there(request.label, request.count)
            except Exception as error:  # noqa: BLE001  # any error of a store's library
                _log.warning("cannot look for the parts of other ranks: %s", error)
                parts = None
            if parts is not None or last:
                return parts
            self._stop_waiting.wait(pause_s)
            pause_s = min(2 * pause_s, POLL_S[1])
