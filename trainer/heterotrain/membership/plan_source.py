"""Reads the mounted plan and keeps the newest one as text, so that it can be sent to peers byte for byte.

A mounted ConfigMap is a folder whose ``..data`` link is swapped. The identity of the file changes with it, so one
``stat`` shows whether there is anything new to read.
"""

from __future__ import annotations

import logging
import os
import threading
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from heterotrain_core.contract import keys
from heterotrain_core.contract.codec import Refused, decode_plan
from heterotrain_core.contract.plan import Plan

_log = logging.getLogger(__name__)

POLL_S = 0.05


@dataclass(frozen=True, kw_only=True)
class HeldPlan:
    """A plan that this rank holds, with the exact text from which it was decoded."""

    plan: Plan
    text: str

    @cached_property
    def identity(self) -> tuple[float, ...]:
        """Generation, revision, length of the text in bytes and its CRC-32, as each rank sends them in every step."""
        data = self.text.encode()
        return (float(self.plan.generation), float(self.plan.revision), float(len(data)), float(zlib.crc32(data)))


class PlanSource:
    """The newest plan that this process has received, from its mount or from a peer. Safe to use from any thread."""

    def __init__(self, directory: Path | str | None, *, job_uid: str) -> None:
        self._path = Path(directory) / keys.PLAN_KEY if directory else None
        self._job_uid = job_uid
        self.subscribe(lambda: None, lambda: None)
        self._lock = threading.Lock()
        self._held: HeldPlan | None = None
        self._last_stat: tuple[int, int, int] | None = None
        self._refusal = ""
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="heterotrain-plan", daemon=True)

    def subscribe(self, on_change: Callable[[], None], on_read: Callable[[], None]) -> None:
        """Call a function with each newer plan, and one after a newer plan was read from the mount.

        Few ranks' kubelets deliver a plan at once: the others get it from this one.
        """
        self._on_change, self._on_read = on_change, on_read

    def start(self) -> None:
        """Start watching the mount."""
        self.poll()
        if self._path is not None:
            self._thread.start()

    def close(self) -> None:
        """Stop watching."""
        self._stop.set()

    @property
    def newest(self) -> HeldPlan | None:
        """The newest plan, or ``None`` before the first one."""
        return self._held

    def offer(self, text: str) -> Plan | Refused:
        """Decode a plan from any source and keep it when it is newer than the current one."""
        with self._lock:
            held = self._held
            answer = decode_plan(text, job_uid=self._job_uid, newest=held.plan.version if held else (-1, -1))
            if isinstance(answer, Refused) or (held and answer.version == held.plan.version):
                return answer
            self._held = HeldPlan(plan=answer, text=text)
        _log.info("plan %d.%d: %s", answer.generation, answer.revision, answer.reason or "no reason given")
        self._on_change()
        return answer

    def poll(self) -> None:
        """Read the mounted file when it has changed since the last time."""
        if self._path is None:
            return
        try:
            found = os.stat(self._path)  # noqa: PTH116  # called twenty times a second: the cheapest call
            current = (found.st_ino, found.st_mtime_ns, found.st_size)
            if current == self._last_stat:
                return
            text = self._path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError):
            return  # the mount is being swapped or does not exist yet: the next poll reads it
        self._last_stat = current
        before = self._held
        answer = self.offer(text)
        if self._held is not before:
            self._on_read()
        if isinstance(answer, Refused) and answer.reason != self._refusal:
            self._refusal = answer.reason
            _log.warning("refused the mounted plan: %s", answer.reason)

    def _watch(self) -> None:
        while not self._stop.wait(POLL_S):
            self.poll()
