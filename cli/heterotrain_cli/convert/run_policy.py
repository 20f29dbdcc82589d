"""The policies that Kubeflow's kinds of jobs share: lifetime, retries, queue and group."""

from __future__ import annotations

from typing import Final

from heterotrain_cli.convert.draft import Draft
from heterotrain_cli.convert.rest import Rest

SHARED: Final = ("ttlSecondsAfterFinished", "activeDeadlineSeconds", "backoffLimit")
FIXED: Final = "the number of workers is fixed: lower elasticPolicy.minReplicas to let the job go on with fewer"
_SCHEDULERS: Final = {
    "volcano": "Volcano", "scheduler-plugins-scheduler": "Coscheduling", "kai-scheduler": "KAI",
}  # fmt: skip


def take_lifetime(policy: Rest, draft: Draft) -> None:
    """Take over how long the job may run and is kept, and whether it is suspended."""
    for name in SHARED:
        if name in policy:
            draft.spec[name] = policy.take(name)
    if policy.take("suspend"):
        draft.spec["suspend"] = True


def take_run_policy(policy: Rest, draft: Draft) -> None:
    """Take over a ``runPolicy``. The pools have to be there: groups and priorities are those of their pods."""
    take_lifetime(policy, draft)
    clean = policy.take("cleanPodPolicy")
    if clean in ("None", "Running", "All"):
        draft.spec["cleanPodPolicy"] = clean
    policy.take_one_of("managedBy", "kubeflow.org/training-operator", "kubeflow.org/mpi-operator")
    if "schedulingPolicy" not in policy:
        return
    scheduling = policy.part("schedulingPolicy")
    if (priority := scheduling.take("priorityClass")) is not None:
        for pool in draft.pools:
            pool.pod.spec.setdefault("priorityClassName", priority)
    scheduling.take_one_of("minAvailable", draft.least, draft.most)
    chosen = {str(pool.pod.spec.get("schedulerName") or "volcano") for pool in draft.pools}
    scheduler = _SCHEDULERS.get(next(iter(chosen))) if len(chosen) == 1 else None
    if scheduler is None or (scheduler == "KAI" and "queue" not in scheduling):
        return
    draft.spec["podGroup"] = {"scheduler": scheduler}
    if scheduler != "Coscheduling" and (queue := scheduling.take("queue")) is not None:
        draft.spec["podGroup"]["queue"] = queue
