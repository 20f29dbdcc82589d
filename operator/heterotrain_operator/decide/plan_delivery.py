"""Which kubelets deliver a new plan at once: those of all workers, or of a few that pass it on."""

from __future__ import annotations

from collections.abc import Sequence

from heterotrain_core.contract.plan import Plan

from heterotrain_operator.cluster_state.views import PodView
from heterotrain_operator.decide.objects.objects import version_text
from heterotrain_operator.decide.workers.state import Worker, WorkerState

MESSENGERS = 2
"""Members whose kubelets deliver a revision at once: one of them may be about to end."""


def pods_to_touch(workers: Sequence[Worker], plan: Plan | None) -> tuple[PodView, ...]:
    """Return running pods whose kubelets have to deliver the plan.

    A new generation goes to all of them, and so does a plan with members that leave: it has to arrive before they end.
    Other revisions go to ``MESSENGERS`` members: they pass the plan on in their next step's vote.
    """
    version = version_text(plan) if plan else ""
    running = [w for w in workers if w.placed or w.state is WorkerState.LEAVING]
    outdated = [w for w in running if w.pod.plan_version != version]
    if plan is None or plan.drain or not plan.members:
        return tuple(w.pod for w in outdated)
    named = {rank.worker_uid for rank in plan.ranks}
    in_step = {
        w.pod.uid: w
        for w in running
        if w.state is WorkerState.READY and w.pod.uid in named and _generation(w.pod) == plan.generation
    }
    told = sum(w.pod.plan_version == version for w in in_step.values())
    others = [w for w in outdated if w.pod.uid not in in_step]
    messengers = [w for w in outdated if w.pod.uid in in_step][: max(0, MESSENGERS - told)]
    return tuple(w.pod for w in (*messengers, *others))


def _generation(pod: PodView) -> int | None:
    """Return the generation of the plan that a pod's kubelet was told to deliver; ``None`` for an unreadable one."""
    text = pod.plan_version.partition(".")[0]
    return int(text) if text.isascii() and text.isdecimal() else None
