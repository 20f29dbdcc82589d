"""``spec.failurePolicy``: what the end of a worker means for the job, and for the node it ran on."""

from __future__ import annotations

from typing import Annotated

from heterotrain_core.contract.choices import Choice
from pydantic import Field

from heterotrain_operator.api.schema import Model, SpecRule

MAX_RULES = 20


class FailureAction(Choice):
    """What follows from the end of a worker that a rule matches."""

    FAIL = "Fail"
    """The job fails at once."""
    RESTART = "Restart"
    """It counts as a failure, and a worker takes its place."""
    IGNORE = "Ignore"
    """It counts as a disruption, and a worker takes its place."""
    AVOID_NODE = "AvoidNode"
    """It counts as a disruption, and the job gets no more workers on that node."""


class ExitCodeMatch(Choice):
    """Whether an exit code has to be among the values."""

    IN = "In"
    NOT_IN = "NotIn"


class ExitCodes(Model):
    """Exit codes of the training container, as in a Kubernetes Job's ``podFailurePolicy``."""

    operator: ExitCodeMatch = Field(default=ExitCodeMatch.IN, description="In or NotIn. Exit code 0 never matches.")
    values: tuple[Annotated[int, Field(ge=1, le=255)], ...] = Field(
        min_length=1, max_length=64, description="Exit codes. Example: [42]."
    )


class Status(Choice):
    """Status of a condition."""

    TRUE = "True"
    FALSE = "False"
    UNKNOWN = "Unknown"


class PodConditionPattern(Model):
    """A condition of the pod."""

    type: str = Field(min_length=1, max_length=316, description="Type of the condition. Example: DisruptionTarget.")
    status: Status = Field(default=Status.TRUE, description="Its status: True (default), False or Unknown.")


def _given(rule: FailureRule) -> int:
    return (rule.on_exit_codes is not None) + bool(rule.on_pod_conditions) + bool(rule.on_reasons)


class FailureRule(
    Model,
    rules=(
        SpecRule(
            cel="(has(self.onExitCodes) ? 1 : 0) + "
            "(has(self.onPodConditions) && size(self.onPodConditions) > 0 ? 1 : 0) + "
            "(has(self.onReasons) && size(self.onReasons) > 0 ? 1 : 0) == 1",
            holds=lambda self: _given(self) == 1,
            message="a rule of failurePolicy needs exactly one of onExitCodes, onPodConditions and onReasons",
        ),
    ),
):
    """A rule about workers that end. The first rule that matches decides."""

    action: FailureAction = Field(
        description="Fail: the job fails at once. Restart: a failure, counted against backoffLimit. Ignore: a "
        "disruption, not counted. AvoidNode: a disruption, and this job uses the node no more."
    )
    on_exit_codes: ExitCodes | None = Field(default=None, description="Exit codes of the training container.")
    on_pod_conditions: tuple[PodConditionPattern, ...] = Field(
        default=(), max_length=16, description="Conditions of the pod; one of them suffices."
    )
    on_reasons: tuple[Annotated[str, Field(min_length=1, max_length=64)], ...] = Field(
        default=(),
        max_length=32,
        description="Reasons, one of which suffices: of the container (OOMKilled, Error), of the pod (Evicted, "
        "NodeShutdown), or the trainer's own (OutOfDeviceMemory, NotFinite). Example: [OOMKilled].",
    )


class FailurePolicy(Model):
    """How the ends of workers count."""

    ordered_rules: tuple[FailureRule, ...] = Field(
        default=(),
        alias="rules",
        max_length=MAX_RULES,
        description="Rules about workers that end other than by success, in order; the first that matches decides.",
    )
