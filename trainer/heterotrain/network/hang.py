"""Logs where a job hangs: after a long wait for other ranks, one log entry names them and their activity.

Heartbeats detect a lost peer and a slow rank is not an error, so nothing is aborted here. But a rank whose own code is
stuck (a deadlock in a data loader, a debugger, a branch that only one rank takes) stops all others indefinitely, and
the rank that looks stuck is never the one that is. So the waiting rank asks its peers for their activity. A peer
answers from another thread than the training thread, with the stack of the training thread.
"""

from __future__ import annotations

import logging
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from heterotrain.clock import Clock
from heterotrain.network.group import Group

_log = logging.getLogger(__name__)

LIMIT_FACTOR = 10.0
"""A wait is logged after this many times the peers' time-out: 30 s by default, far longer than any wait for a loss."""
FRAMES = 16
"""Number of innermost stack frames that are reported."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Activity:
    """The activity of one rank at one moment.

    Attributes:
        rank: rank in the process group.
        name: worker and local rank, for log messages.
        answers: whether the rank answered.
        steps: committed steps.
        waits_for: the collective in which it waits; empty when it runs code of its own.
        waits_s: seconds of that wait so far.
        stack: stack of its training thread, outermost frame first; empty when it waits.
    """

    rank: int
    name: str
    answers: bool = True
    steps: int = 0
    waits_for: str = ""
    waits_s: float = 0.0
    stack: tuple[str, ...] = ()

    @property
    def label(self) -> str:
        """Return the rank's name in log messages."""
        return f"rank {self.rank} ({self.name})"


def explain(own: Activity, peers: Sequence[Activity]) -> str:
    """Return the ranks waited for, the activity of every peer and this rank's stack; the first line is a summary.

    The ranks waited for are those that do not wait themselves or do not answer. When all wait, they are those that wait
    for something else.
    """
    elsewhere = [p for p in peers if not p.answers or not p.waits_for]
    others = elsewhere or [p for p in peers if (p.steps, p.waits_for) != (own.steps, own.waits_for)]
    awaited = ", ".join(peer.label for peer in others) or (
        "no rank in particular, because all ranks wait for the same"
        if peers
        else "unknown, because ranks without an operator cannot ask each other"
    )
    lines = [f"step {own.steps} has waited {own.waits_s:.0f} s for {own.waits_for}; waited for: {awaited}"]
    for peer in peers:
        if not peer.answers:
            lines.append(f"{peer.label} does not answer")
        elif peer.waits_for:
            lines.append(f"{peer.label} has waited {peer.waits_s:.0f} s for {peer.waits_for} of step {peer.steps}")
        else:
            lines += [f"{peer.label} runs code of its own, at step {peer.steps}:", *peer.stack]
    return "\n".join([*lines, f"{own.label} waits here:", *own.stack])


def stack_of(thread_id: int | None) -> tuple[str, ...]:
    """Return the innermost frames of a thread of this process, outermost first; empty when the thread has ended."""
    frame = sys._current_frames().get(thread_id) if thread_id is not None else None  # noqa: SLF001  # its only name
    if frame is None:
        return ()
    return tuple(entry.rstrip() for entry in traceback.format_stack(frame)[-FRAMES:])


class HangWatch:
    """Logs when the training thread waits too long in a collective, and again each time the wait has doubled."""

    def __init__(
        self,
        *,
        limit_s: float,
        group: Callable[[], Group | None],
        steps: Callable[[], int],
        ask: Callable[[], Sequence[Activity]],
        name: str,
        clock: Clock = time.monotonic,
    ) -> None:
        """Start watching the calling thread.

        Args:
            limit_s: seconds of waiting before the first log entry.
            group: returns the group in which the training thread may currently wait.
            steps: returns the committed steps.
            ask: returns the activity of all peers; an empty list where peers cannot be asked.
            name: this rank, for log messages.
            clock: that of the group's ``waiting``.
        """
        self._clock = clock
        self._limit_s = limit_s
        self._group = group
        self._steps = steps
        self._ask = ask
        self._name = name
        self._thread_id = threading.get_ident()
        self._stop = threading.Event()
        threading.Thread(target=self._watch, name="heterotrain-hangs", daemon=True).start()

    def close(self) -> None:
        """Stop watching."""
        self._stop.set()

    def activity(self) -> Activity:
        """Return the current activity of this rank; safe from any thread."""
        group = self._group()
        waiting = group.waiting if group is not None else None
        now_s = self._clock()
        return Activity(
            rank=group.rank if group is not None else 0,
            name=self._name,
            steps=self._steps(),
            waits_for=waiting.what if waiting else "",
            waits_s=now_s - waiting.since_s if waiting else 0.0,
            stack=stack_of(self._thread_id),
        )

    def _watch(self) -> None:
        logged, logged_s = None, 0.0
        while not self._stop.wait(self._limit_s / 10):
            group = self._group()
            waiting = group.waiting if group is not None else None
            if logged is not None and waiting is not logged:
                _log.warning("the wait for %s is over after at least %.0f s", logged.what, logged_s)
                logged = None
            if waiting is None:
                continue
            waited_s = self._clock() - waiting.since_s
            if waited_s < (2 * logged_s if logged is waiting else self._limit_s):
                continue
            peers = self._ask()
            own = self.activity()
            if own.waits_for and group is not None and group.waiting is waiting:  # it may be over by now
                _log.warning("%s", explain(own, peers))
                logged, logged_s = waiting, waited_s


def to_reply(activity: Activity) -> dict[str, object]:
    """Return this rank's activity as a reply to a peer; the stack is included only when this rank does not wait."""
    return {
        "steps": activity.steps,
        "waits_for": activity.waits_for,
        "waits_s": activity.waits_s,
        "stack": [] if activity.waits_for else list(activity.stack),
    }


def from_reply(rank: int, name: str, reply: Mapping[str, object] | None) -> Activity:
    """Return the activity in a peer's reply; a missing (``None``) or malformed reply counts as no answer."""
    try:
        if reply is None:
            return Activity(rank=rank, name=name, answers=False)
        stack = reply["stack"]
        return Activity(
            rank=rank, name=name, steps=int(str(reply["steps"])), waits_for=str(reply["waits_for"]),
            waits_s=float(str(reply["waits_s"])), stack=tuple(map(str, stack)) if isinstance(stack, list) else (),
        )  # fmt: skip
    except (KeyError, ValueError):
        return Activity(rank=rank, name=name, answers=False)
