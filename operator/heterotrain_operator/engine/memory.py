"""What the operator keeps in memory about one job between two passes."""

from __future__ import annotations

from dataclasses import dataclass, field

from heterotrain_operator.decide.lifecycle import Acceptance


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
        plan_due_s: a refused plan may be written again from this time on.
        status_written_s: time of the last status update.
        logged_reason: reason of the last decision that was logged.
        planned_for: generation of the spec and sequence number of the telemetry behind the last shares.
        planning_due_s: new telemetry may lead to new shares from this time on.
    """

    uid: str
    acceptance: Acceptance = field(default_factory=lambda: Acceptance(known=False))
    accepted_generation: int = 0
    dry_run_due_s: float = 0.0
    dry_run_pause_s: float = 0.0
    applied: dict[str, str] = field(default_factory=dict)
    refusals: dict[str, str] = field(default_factory=dict)
    plan_due_s: float = float("-inf")
    status_written_s: float = float("-inf")
    logged_reason: str = ""
    planned_for: tuple[int, int] = (0, 0)
    planning_due_s: float = float("-inf")

    @property
    def pod_refusal(self) -> str:
        """The answer when a pod was refused; empty when the last creation succeeded."""
        return self.refusals.get("pods", "")

    @property
    def other_refusal(self) -> str:
        """The answer when anything but a pod was refused; empty when all of it succeeded."""
        return next((message for step, message in self.refusals.items() if step != "pods"), "")
