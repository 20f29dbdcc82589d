"""Reports whether all workers were made from the present template and pools."""

from __future__ import annotations

from heterotrain_operator.api.conditions import ConditionType, ConditionValue
from heterotrain_operator.api.text import listed
from heterotrain_operator.decide.status.context import JobContext

_MOST_NAMED = 3


def template_condition(context: JobContext) -> ConditionValue:
    """Return the condition TemplateApplied, with the command that brings the workers up to date."""
    kind, sources, renewal = ConditionType.TEMPLATE_APPLIED, context.sources, context.renewal
    if sources is None:
        return kind.unknown("NoNewWorkers")
    older, workers = renewal.older, len(context.alive)
    command = f"`heterotrain restart {context.job.key.name}`"
    if renewal.remove or renewal.hold:
        message = f"workers are renewed; {workers - len(older)} of {workers} have the present template"
        return kind.false("Restarting", message)
    if renewal.problem:
        return kind.false("RestartBlocked", renewal.problem)
    if sources.changed:
        message = (
            f"{listed(sources.changed, most=_MOST_NAMED)} changed, which all workers must have in common: new workers "
            f"get what the {workers} others have, until {command} renews all together from their last checkpoint"
        )
        return kind.false("OlderCommonParts", message)
    if older:
        message = (
            f"{len(older)} of {workers} workers have an older template ({listed(older, most=_MOST_NAMED)}): {command} "
            "renews them one by one"
        )
        return kind.false("OlderTemplate", message)
    return kind.true("Applied")
