"""Workers whose pods were made from an older text of the spec: which are made again now, and which ones later.

A pod that has never run would wait for what was corrected meanwhile, so it is made again at once. A running worker is
left alone until a restart is asked for. Then workers are renewed one by one, so that the others train on, unless what
all ranks must have in common has changed, or too few would be left: then all leave together, with a last checkpoint.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from heterotrain_core.contract.choices import Runtime
from heterotrain_core.contract.plan import Plan

from heterotrain_operator.cluster_state.views import PodView, ValidJob
from heterotrain_operator.decide.objects.common_parts import PodSources, runs
from heterotrain_operator.decide.plan.plan import least_to_go_on
from heterotrain_operator.decide.workers.state import Worker, WorkerState

CORRECTED = "its template was corrected before it ran"
RENEWED = "a restart was asked for"


@dataclass(frozen=True, slots=True, kw_only=True)
class Renewal:
    """What to renew now.

    Attributes:
        remove: workers, each with the reason.
        hold: whether no worker is created before those have gone, because it would differ from them.
        problem: why a restart that was asked for does not begin, in one sentence; empty when nothing is in the way.
        older: names of the living workers that the spec describes otherwise by now.
    """

    remove: tuple[tuple[Worker, str], ...] = ()
    hold: bool = False
    problem: str = ""
    older: tuple[str, ...] = ()


NO_RENEWAL = Renewal()


def is_older(pod: PodView, digests: Mapping[str, str]) -> bool:
    """Return whether a pod was made from another text; that of a pod of an older operator is not known."""
    return bool(pod.template) and pod.template != digests.get(pod.pool, pod.template)


def corrected(job: ValidJob, workers: Sequence[Worker], sources: PodSources) -> tuple[Worker, ...]:
    """Return the workers that wait for a node or start, have a container that never ran, and are older."""
    digests = {name: source.digest for name, source in sources.by_pool.items()}
    return tuple(
        worker
        for worker in workers
        if worker.state in (WorkerState.WAITING, WorkerState.STARTING)
        and not worker.pod.all_started
        and (is_older(worker.pod, digests) or _asked(job, worker.pod))
    )


def decide_renewal(
    job: ValidJob, workers: Sequence[Worker], sources: PodSources, plan: Plan | None, *, creating: bool
) -> Renewal:
    """Return which running workers are renewed now.

    Args:
        job: the job.
        workers: all its workers, without those that are made again because they never ran.
        sources: what new pods are made from.
        plan: the plan in force.
        creating: whether workers are missing that can be created now: the next renewal waits for them.
    """
    older = tuple(w.pod.name for w in workers if w.alive and is_older(w.pod, sources.wanted))
    due = [w for w in workers if runs(w) and (_asked(job, w.pod) or _lacks_container(w, sources))]
    staying = [worker for worker in due if worker.alive]
    if not due:
        return Renewal(older=older)
    if not sources.changed and job.spec.runtime is not Runtime.TORCHRUN:
        # While workers come or go, the plan names too few for the question whether one more may leave.
        if not staying or creating or any(_comes_or_goes(worker, plan) for worker in workers):
            return Renewal(older=older)
        last = max(staying, key=lambda worker: worker.pod.index)
        if _goes_on(job, plan, last):
            return Renewal(remove=((last, RENEWED),), older=older)
    if not _continues(job):
        problem = "the restart does not begin: the job keeps no checkpoints and would begin again"
        return Renewal(problem=f"{problem}; suspend and resume it if it may", older=older)
    return Renewal(remove=tuple((worker, RENEWED) for worker in staying), hold=True, older=older)


def _asked(job: ValidJob, pod: PodView) -> bool:
    return bool(job.restart_request) and pod.restart != job.restart_request


def _lacks_container(worker: Worker, sources: PodSources) -> bool:
    """Return whether a worker trains without one of its containers, whose description was changed since."""
    digests = {name: source.digest for name, source in sources.by_pool.items()}
    return worker.state is WorkerState.READY and not worker.pod.all_started and is_older(worker.pod, digests)


def _goes_on(job: ValidJob, plan: Plan | None, without: Worker) -> bool:
    """Return whether the members that are left without a worker are enough to train."""
    if plan is None:
        return True
    ranks = [rank.rank for rank in plan.ranks if rank.worker_uid != without.pod.uid]
    return plan.replicas(ranks) >= least_to_go_on(job.spec)


def _continues(job: ValidJob) -> bool:
    """Return whether a job of which all workers leave goes on where it was."""
    spec = job.spec
    return spec.checkpoint is not None or spec.runtime is Runtime.TORCHRUN or job.status.training_since is None


def _comes_or_goes(worker: Worker, plan: Plan | None) -> bool:
    """Return whether the number of training workers is about to change."""
    if worker.state is WorkerState.WAITING:
        return not worker.pod.unschedulable
    if worker.state is WorkerState.READY and plan is not None:
        named = any(rank.worker_uid == worker.pod.uid for rank in plan.ranks)
        return not named and worker.pod.name not in plan.spares
    return worker.state in (WorkerState.STARTING, WorkerState.LEAVING)
