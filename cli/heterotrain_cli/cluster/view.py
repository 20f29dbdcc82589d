"""Views of jobs for the commands: plain values made from the objects of the API server."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from heterotrain_operator.api.conditions import ConditionType
from heterotrain_operator.api.status import Condition, HeteroTrainJobStatus, read_status

from heterotrain_cli.cluster.values import UNKNOWN, parsed, seconds_since


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSummary:
    """A job as read at one time.

    Attributes:
        name, namespace: of the object.
        body: the object itself.
        status: its status; fields that this version cannot read are left out.
        now: time of the reading.
    """

    name: str
    namespace: str
    body: Mapping[str, Any]
    status: HeteroTrainJobStatus
    now: datetime

    @property
    def has_ended(self) -> bool:
        """Whether the job has succeeded or failed."""
        return self.status.state in ("Succeeded", "Failed")

    @property
    def age_s(self) -> float | None:
        """Seconds since the job was created."""
        return seconds_since(self.body["metadata"].get("creationTimestamp"), self.now)

    @property
    def runtime_s(self) -> float | None:
        """Seconds from the start to the end, or until now; ``None`` before the start."""
        end = parsed(self.status.completion_time) or self.now
        return seconds_since(self.status.start_time, end)

    def condition(self, kind: ConditionType) -> Condition | None:
        """Return a condition; ``None`` where the operator has not set it."""
        return next((each for each in self.status.conditions if each.type == kind.value), None)


def trained(view: JobSummary) -> tuple[str, str]:
    """Return what counts until the end, epochs or steps, and how many of them are done."""
    training = view.body["spec"].get("training") or {}
    if (steps := training.get("steps")) is not None:
        return "step", f"{UNKNOWN if view.status.step is None else f'{view.status.step:,}'} of {steps:,}"
    return "epoch", f"{UNKNOWN if view.status.epoch is None else view.status.epoch} of {training.get('epochs', 1)}"


def view_of(body: Mapping[str, Any], now: datetime | None = None) -> JobSummary:
    """Return the view of a job's object; ``now`` is the present by default."""
    metadata = body["metadata"]
    return JobSummary(
        name=str(metadata["name"]), namespace=str(metadata["namespace"]), body=body, status=read_status(body),
        now=now or datetime.now(UTC),
    )  # fmt: skip


def cost(view: JobSummary) -> float | None:
    """Return what an hour of the job costs at present; ``None`` without prices."""
    try:
        return None if view.status.price_per_hour is None else float(view.status.price_per_hour)
    except ValueError:
        return None


def cost_until_end(view: JobSummary) -> float | None:
    """Return what the rest of the job costs at its present price and speed; ``None`` where that is unknown."""
    per_hour, left_s = cost(view), view.status.estimated_remaining_seconds
    return None if per_hour is None or left_s is None or view.has_ended else per_hour * left_s / 3600
