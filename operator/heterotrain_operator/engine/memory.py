"""The operator's memory of one job between two passes."""

from __future__ import annotations

from dataclasses import dataclass, field

from heterotrain_operator.cluster_state.saved import SavedCheckpoint
from heterotrain_operator.decide.lifecycle import Acceptance
from heterotrain_operator.engine.start_problems import StartProblems

FIRST_RETRY_S = 20.0
"""Seconds until a refused write is tried again: policies and quotas may change while the job stays the same."""
LONGEST_REFUSAL_S = 160.0
"""The pause doubles with each further refusal, up to this many seconds."""


MANY_CONFLICTS = 5
"""Passes in a row that end by a conflict, from which on it is no coincidence."""


@dataclass(frozen=True, slots=True)
class WriteRefusal:
    """The API server's answer to a write that it refused, and when it is tried again."""

    message: str
    pause_s: float
    due_s: float


@dataclass(slots=True)
class JobMemory:
    """Notes on one job; losing all of them does no harm. Times are on the monotonic clock.

    Attributes:
        uid: the job's uid, because a new job may take the name of a deleted one.
        acceptance: the API server's answer to dry runs of the job's pods.
        accepted_generation: generation of the spec that ``acceptance`` is about; 0 for none.
        dry_run_due_s: a refused template is tried again from this time on.
        dry_run_pause_s: the last pause between two dry runs.
        applied: by kind, a hash of the last applied object, so that an unchanged object is not applied again.
        refusals: by step, the API server's answer when it refused something in the last attempt.
        refused_generation: generation of the spec that ``refusals`` are about; another one is tried at once.
        taken_indices: worker indices whose names foreign pods have.
        saved: the newest checkpoint in the outcomes of pods that are gone; ``None`` for none.
        status_written_s: time of the last status update.
        numbers_slot_s: when new numbers may be written, by all jobs' turns; ``None`` when there are none.
        numbers_wait_s: seconds until that, after the last pass.
        numbers_version: resource version of the job with the last status update that brought numbers only.
        logged_reason: reason of the last decision that was logged.
        logged_fault: sentence of the last unexpected error that was logged; empty after a pass without one.
        start_problems: warnings about workers that do not start.
        conflicts: passes in a row that a conflict ended.
        relearns: whether an earlier leader had the pods accepted, so that what admission adds is not known yet.
    """

    uid: str
    acceptance: Acceptance = field(default_factory=lambda: Acceptance(known=False))
    accepted_generation: int = 0
    dry_run_due_s: float = 0.0
    dry_run_pause_s: float = 0.0
    applied: dict[str, str] = field(default_factory=dict)
    refusals: dict[str, WriteRefusal] = field(default_factory=dict)
    refused_generation: int = 0
    taken_indices: set[int] = field(default_factory=set)
    saved: SavedCheckpoint | None = None
    status_written_s: float = float("-inf")
    numbers_slot_s: float | None = None
    numbers_wait_s: float | None = None
    numbers_version: str = ""
    logged_reason: str = ""
    logged_fault: str = ""
    start_problems: StartProblems = field(default_factory=StartProblems)
    relearns: bool = False
    conflicts: int = 0

    def conflicted(self, message: str, now_s: float) -> bool:
        """Count a pass that ended by a conflict; return whether so many have in a row that the status has to say so."""
        self.conflicts += 1
        if self.conflicts >= MANY_CONFLICTS:
            self.refuse("conflicts", f"writes conflict again and again: {message}", now_s=now_s)
        return self.conflicts == MANY_CONFLICTS

    def may_try(self, step: str, *, now_s: float) -> bool:
        """Return whether a step may be tried: it was not refused, or its pause is over."""
        refusal = self.refusals.get(step)
        return refusal is None or now_s >= refusal.due_s

    def refuse(self, step: str, message: str, *, now_s: float) -> None:
        """Note that a step was refused; each further refusal doubles the pause."""
        before = self.refusals.get(step)
        pause_s = min(LONGEST_REFUSAL_S, 2 * before.pause_s) if before is not None else FIRST_RETRY_S
        self.refusals[step] = WriteRefusal(message, pause_s, now_s + pause_s)

    def retry_after_change(self, generation: int) -> None:
        """Let every refused step be tried at once when the spec has changed."""
        if generation != self.refused_generation:
            self.refusals.clear()
            self.refused_generation = generation

    def retry_due_s(self) -> float | None:
        """Return when the next refused step may be tried; ``None`` without one."""
        return min((refusal.due_s for refusal in self.refusals.values()), default=None)

    @property
    def pod_refusal(self) -> str:
        """The answer when a pod was refused; empty when the last creation succeeded."""
        return self.refusals["pods"].message if "pods" in self.refusals else ""

    @property
    def other_refusal(self) -> str:
        """The answer when anything but a pod was refused; empty when all of it succeeded."""
        return next((refusal.message for step, refusal in self.refusals.items() if step != "pods"), "")
