"""``spec.podGroup``: the job's pods as one group, for schedulers that place the members of a group together."""

from __future__ import annotations

from heterotrain_core.contract.choices import Choice
from pydantic import Field

from heterotrain_operator.api.schema import Model, SpecRule


class GroupScheduler(Choice):
    """A scheduler with groups of pods."""

    VOLCANO = "Volcano"
    KAI = "KAI"
    COSCHEDULING = "Coscheduling"


class PodGroup(
    Model,
    rules=(
        SpecRule(
            cel="self.scheduler != 'KAI' || has(self.queue)",
            holds=lambda self: self.scheduler is not GroupScheduler.KAI or self.queue is not None,
            message="the KAI scheduler places pods of queues only: give podGroup.queue",
        ),
        SpecRule(
            cel="self.scheduler != 'Coscheduling' || !has(self.queue)",
            holds=lambda self: self.scheduler is not GroupScheduler.COSCHEDULING or self.queue is None,
            message="the coscheduling plugin has no queues: remove podGroup.queue",
        ),
    ),
):
    """A group of the job's pods."""

    scheduler: GroupScheduler = Field(
        description="Volcano, KAI, or Coscheduling (the plugin of scheduler-plugins). Its PodGroups have to be "
        "installed. Workers get its schedulerName, unless the template has another one.",
    )
    queue: str | None = Field(
        default=None,
        min_length=1,
        max_length=63,
        pattern=r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$",
        description="Queue of the group, in Volcano and KAI. Example: research.",
    )
