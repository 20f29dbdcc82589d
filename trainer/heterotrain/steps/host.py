"""What a step needs of the job that it belongs to."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from heterotrain.network.control import Verdict
from heterotrain.steps.task import Task

if TYPE_CHECKING:
    from heterotrain.steps.step import Step


class Host(Protocol):
    """The job's side of a step; ``steps.loop`` is one."""

    def fetch(self, task: Task, offset: int, size: int) -> Any:
        """Return ``size`` samples of the task from its ``offset``-th on, as a batch on the device."""

    def vote(self, step: Step, *, ok: bool) -> Verdict:
        """Exchange the control vector and wait for the buckets."""

    def commit(self, step: Step, decision: Verdict) -> None:
        """Everything that follows a step that all ranks finished."""

    def is_broken(self) -> bool:
        """Return whether the formation is known to be broken."""
