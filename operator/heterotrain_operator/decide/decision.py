"""The decision of a pass over one job, as values: the shell carries it out in this order."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from heterotrain_planner.layout.problem import Problem

from heterotrain_operator.api.status import HeteroTrainJobStatus
from heterotrain_operator.cluster_state.views import PodView
from heterotrain_operator.decide.faults import Fault
from heterotrain_operator.decide.plugins.interface import PodEdit
from heterotrain_operator.decide.status.events import JobEvent


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """What to do, in the order of the fields.

    Attributes:
        active: whether the job trains or may begin to.
        apply: objects to apply (disruption budget, those of plugins), if the job has any.
        plan: ConfigMap to write: a replacement for its ``resourceVersion`` or, without one, only if there is none yet.
        plan_version: version that the pods in ``touch`` have to name.
        touch: pods whose annotation gets ``plan_version``, so that the kubelet refreshes their mounted plan at once.
        create: pods to create.
        status: status to write; ``None`` leaves it as it is.
        remove: pods to delete, only after the status is written, because their ends are counted there.
        edits: changes of pods that plugins need.
        release: objects to delete, if the job has them, because an inactive job must not hold them.
        delete_job: whether the job's time to live is over.
        events: Kubernetes events to publish, besides the one about the pods that could be created.
        again_s: seconds after which to decide again although nothing changes; ``None`` for never.
        reason: why, in one sentence; empty when there is nothing to explain.
        questions: for the layout planner, whose answers are needed.
        faults: parts of the pass that met an unexpected error; the rest of the decision does not depend on them.
    """

    active: bool = False
    apply: tuple[dict[str, Any], ...] = ()
    plan: dict[str, Any] | None = None
    plan_version: str = ""
    touch: tuple[PodView, ...] = ()
    create: tuple[dict[str, Any], ...] = ()
    status: HeteroTrainJobStatus | None = None
    remove: tuple[PodView, ...] = ()
    edits: tuple[PodEdit, ...] = ()
    release: tuple[dict[str, Any], ...] = ()
    delete_job: bool = False
    events: tuple[JobEvent, ...] = ()
    again_s: float | None = None
    reason: str = ""
    questions: tuple[Problem, ...] = ()
    faults: tuple[Fault, ...] = ()
