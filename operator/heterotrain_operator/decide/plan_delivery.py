"""Chooses the kubelets that deliver a plan at once: those of a few members, and of the workers that no member tells."""

from __future__ import annotations

from collections.abc import Sequence

from heterotrain_core.contract.choices import Runtime
from heterotrain_core.contract.plan import Plan

from heterotrain_operator.cluster_state.views import PodView
from heterotrain_operator.decide.objects.objects import version_text
from heterotrain_operator.decide.workers.state import Worker, WorkerState

MESSENGERS = 2
"""Members whose kubelets deliver a plan at once, on two nodes where there are: one of them may be about to end."""


def pods_to_touch(workers: Sequence[Worker], plan: Plan | None, runtime: Runtime) -> tuple[PodView, ...]:
    """Return running pods whose kubelets have to deliver the plan.

    ``MESSENGERS`` ready members are enough: a rank sends a newer plan to every rank that the plan names, and the vote
    of the next step passes it on as well. Each other worker gets the plan from its own kubelet: those that leave, that
    the plan does not name, or that are not ready; all of them while there are no members; and launchers of scripts for
    torchrun, which have no connections for it.
    """
    version = version_text(plan) if plan else ""
    running = [w for w in workers if w.placed or w.state is WorkerState.LEAVING]
    outdated = [w for w in running if w.pod.plan_version != version]
    if plan is None or not plan.members or runtime is Runtime.TORCHRUN:
        return tuple(w.pod for w in outdated)
    named = {rank.worker_uid for rank in plan.ranks}
    members = {w.pod.uid: w for w in running if w.state is WorkerState.READY and w.pod.uid in named}
    told = [w for w in members.values() if w.pod.plan_version == version]
    messengers = _on_several_nodes([w for w in outdated if w.pod.uid in members], told)[
        : max(0, MESSENGERS - len(told))
    ]
    return tuple(w.pod for w in (*messengers, *(w for w in outdated if w.pod.uid not in members)))


def _on_several_nodes(workers: Sequence[Worker], told: Sequence[Worker]) -> list[Worker]:
    """Return the workers in an order in which the first ones are on nodes of their own."""
    nodes = {w.pod.node for w in told}
    first: list[Worker] = []
    later: list[Worker] = []
    for worker in workers:
        (later if worker.pod.node in nodes else first).append(worker)
        nodes.add(worker.pod.node)
    return [*first, *later]
