"""The state of each worker: waiting, starting, ready, leaving, lost or ended, and who caused the end.

It follows from conditions, from the state of the node and from the worker's own outcome. Exit codes alone are
ambiguous: an evicted worker ends with 0, and 137 stands both for out of memory and for a node that shuts down.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from heterotrain_core.contract.outcome import Cause, Ending, Outcome, decode_outcome

from heterotrain_operator.api.failures import FailureAction
from heterotrain_operator.cluster_state.parse import EVICTED
from heterotrain_operator.cluster_state.views import Ended, NodeView, PodView
from heterotrain_operator.decide.workers.node_state import NodeState, assess_node
from heterotrain_operator.decide.workers.waiting import MAX_WORDS, why_starting, why_waiting

_SIGKILL_EXIT = 137
_SIGTERM_EXIT = 143
_MISSING = "not found"
"""In warnings about a Secret, a ConfigMap or a claim that a volume names."""
_LOST_TRACK = frozenset({"ContainerStatusUnknown", "Unknown"})
"""The kubelet's and containerd's reasons for a container that is missing after the node has restarted."""
_NO_OUTCOME = (
    "it ended with exit code 0 before every epoch was committed: call job.finish(reason) to end early on purpose, and "
    "start the script with heterotrain-run"
)
_DEVICE_MEMORY = (
    "the memory of its device does not suffice, even with the smallest micro-batches or outside of steps: use larger "
    "devices, a smaller model, or parallelism mode Sharded"
)
_PLAIN = "the script ended with exit code 0 and did not call heterotrain.init()"


class WorkerState(StrEnum):
    """A worker's state, as the decisions use it."""

    WAITING = "Waiting"
    """It has no node."""
    STARTING = "Starting"
    READY = "Ready"
    LEAVING = "Leaving"
    """It still runs, but its end is announced."""
    LOST = "Lost"
    """Its node is gone or unreachable; the pod may stay in the API for a long time."""
    FINISHED = "Finished"
    LEFT = "Left"
    """It was asked to end, and ended in order."""
    DISRUPTED = "Disrupted"
    """It ended through no fault of its own."""
    FAILED = "Failed"
    """It ended by its own fault."""


ALIVE = frozenset({WorkerState.WAITING, WorkerState.STARTING, WorkerState.READY})
ENDED = frozenset({WorkerState.FINISHED, WorkerState.LEFT, WorkerState.DISRUPTED, WorkerState.FAILED})


@dataclass(frozen=True, slots=True, kw_only=True)
class Worker:
    """A pod with its state and the reason in one sentence."""

    pod: PodView
    state: WorkerState
    reason: str = ""
    cause: Cause | None = None
    """What ended it, where that has a name."""
    action: FailureAction | None = None
    """What a rule of the job's ``failurePolicy`` makes of its end; ``None`` where none matches."""

    @property
    def alive(self) -> bool:
        """Whether it waits for a node, starts or is ready."""
        return self.state in ALIVE

    @property
    def placed(self) -> bool:
        """Whether it starts or is ready on a node."""
        return self.state in (WorkerState.STARTING, WorkerState.READY)

    @property
    def cannot_start(self) -> bool:
        """Whether the kubelet has said why its containers do not start, and it is not only slow.

        An image that is being pulled is no reason, and neither is a volume that is being attached.
        """
        problem = self.pod.waiting_reason or _MISSING in self.pod.start_problem
        return self.state is WorkerState.STARTING and bool(problem)

    @property
    def ended(self) -> bool:
        """Whether its training process has ended."""
        return self.state in ENDED


def worker_states(
    pods: Sequence[PodView], nodes: Mapping[str, NodeView], *, trained: bool = False
) -> tuple[Worker, ...]:
    """Return a job's pods with their states.

    Args:
        pods: the job's pods.
        nodes: the cluster's nodes by name.
        trained: whether workers of the job have reached ``job.steps``: then a script that ends without an outcome has
            failed. Otherwise it may be a script that does not use heterotrain, and its exit code is the answer.
    """
    trained = trained or any(pod.ready for pod in pods)  # only heterotrain answers the readiness probe
    return tuple(assess_worker(pod, nodes, trained=trained) for pod in pods)


def assess_worker(pod: PodView, nodes: Mapping[str, NodeView], *, trained: bool = False) -> Worker:
    """Return a pod with its state; for ``trained``, see ``worker_states``."""
    if pod.terminal:
        outcome = decode_outcome(pod.ended.message) if pod.ended else None
        state, reason = _assess_end(pod, nodes, outcome, trained=trained)
        plain = state is WorkerState.FINISHED and outcome is None
        cause = Cause.PLAIN_SCRIPT if plain else (outcome.cause if outcome is not None else None)
        return Worker(pod=pod, state=state, reason=reason, cause=cause)
    node = assess_node(nodes.get(pod.node), pod.node) if pod.node else None
    if node is not None and node.state is NodeState.LOST:
        return Worker(pod=pod, state=WorkerState.LOST, reason=node.reason)
    if pod.disruption:
        return Worker(
            pod=pod, state=WorkerState.LEAVING, reason=f"the cluster is about to remove it ({pod.disruption})"
        )
    if pod.deleting:
        return Worker(pod=pod, state=WorkerState.LEAVING, reason="its pod is being deleted")
    if node is None:
        return Worker(pod=pod, state=WorkerState.WAITING, reason=why_waiting(pod))
    if node.state is NodeState.LEAVING:
        return Worker(pod=pod, state=WorkerState.LEAVING, reason=node.reason)
    if pod.ready:
        return Worker(pod=pod, state=WorkerState.READY, reason=pod.trouble_beside)
    return Worker(pod=pod, state=WorkerState.STARTING, reason=why_starting(pod) or pod.trouble_beside)


def _assess_end(
    pod: PodView, nodes: Mapping[str, NodeView], outcome: Outcome | None, *, trained: bool
) -> tuple[WorkerState, str]:
    ended = pod.ended
    plain = outcome is not None and outcome.cause is Cause.PLAIN_SCRIPT
    if outcome is not None and outcome.ending is Ending.FINISHED:
        return (WorkerState.FAILED, _NO_OUTCOME) if plain and trained else (WorkerState.FINISHED, outcome.reason)
    taken = _taken_down(pod, nodes)
    if not taken and (limit := _over_own_limit(pod)):
        return WorkerState.FAILED, limit
    if outcome is not None and outcome.ending is Ending.LEFT:
        if outcome.told and not taken and pod.fatal_probes:
            return WorkerState.FAILED, _failed_probe(pod)
        return WorkerState.LEFT, outcome.reason
    if taken:
        return WorkerState.DISRUPTED, taken
    if outcome is not None:
        memory = f": {_DEVICE_MEMORY}" if outcome.cause is Cause.OUT_OF_DEVICE_MEMORY else ""
        return WorkerState.FAILED, f"{outcome.reason[:MAX_WORDS] if memory else outcome.reason}{memory}"
    if ended is None:
        return WorkerState.DISRUPTED, _refused(pod)
    return _assess_unexplained_end(pod, ended, trained=trained)


def _taken_down(pod: PodView, nodes: Mapping[str, NodeView]) -> str:
    """Return what in the cluster ended a pod; empty when nothing is known."""
    if pod.disruption:
        return f"the cluster removed it ({pod.disruption})"
    if pod.deleting:
        return "its pod was deleted"
    if pod.node:
        node = assess_node(nodes.get(pod.node), pod.node)
        if node.state is not NodeState.STAYS:
            return node.reason
    return ""


def _over_own_limit(pod: PodView) -> str:
    """Return the kubelet's words where it ended a pod for the pod's own limits; empty for any other end.

    Such evictions have no condition DisruptionTarget (eviction_manager.go in the kubelet), and end a worker by SIGTERM.
    """
    reason, _, words = pod.refused.partition(": ")
    if reason != EVICTED or pod.disruption:
        return ""
    return (
        f"the kubelet evicted it: {words.strip()[:MAX_WORDS]}: raise limits.ephemeral-storage or the emptyDir's "
        "sizeLimit, or write less to local disks"
    )


def _refused(pod: PodView) -> str:
    """Return why the kubelet refused a pod; a device that its plugin reports as unhealthy is one reason."""
    device = ": look at the device plugin and the devices of the node" if "UnexpectedAdmission" in pod.refused else ""
    why = f" ({pod.refused[:MAX_WORDS]}{device})" if pod.refused else ""
    return f"node {pod.node or '?'} refused the pod{why}"


def _failed_probe(pod: PodView) -> str:
    """Explain the end of a pod that only its own kubelet can have asked to end.

    A failed probe leaves no trace in the pod's status. The kubelet's event about it may be gone or not be there yet.
    """
    return (
        f"the kubelet ended it, probably because its {' or '.join(pod.fatal_probes)} failed: correct the probe or what "
        f"it checks (see `kubectl get events --field-selector involvedObject.name={pod.name}`)"
    )


def _assess_unexplained_end(pod: PodView, ended: Ended, *, trained: bool) -> tuple[WorkerState, str]:
    """Return the state after an unannounced end on a healthy node, without an outcome."""
    init = f"init container {ended.init_container}: " if ended.init_container else ""
    if ended.reason == "OOMKilled":
        smaller = "" if init else " or use smaller batches"
        words = "it used more memory than its limit (OOMKilled): raise resources.limits.memory"
        return WorkerState.FAILED, f"{init}{words}{smaller}"
    if ended.reason in _LOST_TRACK:
        return WorkerState.DISRUPTED, f"its node lost track of it ({ended.reason}), as after a reboot"
    if ended.exit_code in (_SIGKILL_EXIT, _SIGTERM_EXIT):
        if pod.fatal_probes:
            return WorkerState.FAILED, _failed_probe(pod)
        # PID 1 cannot send SIGKILL to itself, and the launcher reports what kills a rank: this came from outside.
        return WorkerState.DISRUPTED, f"it was killed from outside (exit code {ended.exit_code})"
    if ended.exit_code == 0:
        return (WorkerState.FAILED, _NO_OUTCOME) if trained else (WorkerState.FINISHED, _PLAIN)
    lines = ended.message.strip().splitlines()
    last_line = f": {lines[-1]}" if lines else ""
    why = f" ({ended.reason})" if ended.reason not in ("", "Error") else ""
    return WorkerState.FAILED, f"{init}exit code {ended.exit_code}{why}{last_line}"
