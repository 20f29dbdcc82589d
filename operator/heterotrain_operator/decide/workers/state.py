"""The state of each worker: waiting, starting, ready, leaving, lost or ended, and who caused the end.

It follows from conditions, from the state of the node and from the worker's own outcome. Exit codes alone are
ambiguous: an evicted worker ends with 0, and 137 stands both for out of memory and for a node that shuts down.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from heterotrain_core.contract.outcome import Ending, decode_outcome

from heterotrain_operator.cluster_state.views import Ended, NodeView, PodView
from heterotrain_operator.decide.workers.node_state import NodeState, assess_node

_SIGKILL_EXIT = 137
_SIGTERM_EXIT = 143
_LOST_TRACK = frozenset({"ContainerStatusUnknown", "Unknown"})
"""The kubelet's and containerd's reasons for a container that is missing after the node has restarted."""


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

    @property
    def alive(self) -> bool:
        """Whether it waits for a node, starts or is ready."""
        return self.state in ALIVE

    @property
    def placed(self) -> bool:
        """Whether it starts or is ready on a node."""
        return self.state in (WorkerState.STARTING, WorkerState.READY)

    @property
    def ended(self) -> bool:
        """Whether its training process has ended."""
        return self.state in ENDED


def worker_states(pods: Sequence[PodView], nodes: Mapping[str, NodeView]) -> tuple[Worker, ...]:
    """Return a job's pods with their states."""
    return tuple(assess_worker(pod, nodes) for pod in pods)


def assess_worker(pod: PodView, nodes: Mapping[str, NodeView]) -> Worker:
    """Return a pod with its state."""
    if pod.terminal:
        state, reason = _assess_end(pod, nodes)
        return Worker(pod=pod, state=state, reason=reason)
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
        gates = "its scheduling gates wait for the controller that set them, such as a queue" if pod.gated else ""
        return Worker(pod=pod, state=WorkerState.WAITING, reason=pod.unschedulable or gates)
    if node.state is NodeState.LEAVING:
        return Worker(pod=pod, state=WorkerState.LEAVING, reason=node.reason)
    if pod.ready:
        return Worker(pod=pod, state=WorkerState.READY)
    return Worker(
        pod=pod, state=WorkerState.STARTING, reason=": ".join(filter(None, (pod.waiting_reason, pod.waiting_message)))
    )


def _assess_end(pod: PodView, nodes: Mapping[str, NodeView]) -> tuple[WorkerState, str]:
    ended = pod.ended
    outcome = decode_outcome(ended.message) if ended else None
    if outcome is not None and outcome.ending is Ending.FINISHED:
        return WorkerState.FINISHED, outcome.reason
    taken = _taken_down(pod, nodes)
    if outcome is not None and outcome.ending is Ending.LEFT:
        if outcome.told and not taken and pod.fatal_probes:
            return WorkerState.FAILED, _failed_probe(pod)
        return WorkerState.LEFT, outcome.reason
    if taken:
        return WorkerState.DISRUPTED, taken
    if outcome is not None:
        return WorkerState.FAILED, outcome.reason
    if ended is None:
        return WorkerState.DISRUPTED, f"node {pod.node or '?'} refused the pod"
    return _assess_unexplained_end(pod, ended)


def _taken_down(pod: PodView, nodes: Mapping[str, NodeView]) -> str:
    """Return what in the cluster ended a pod; empty when nothing is known."""
    if pod.disruption:
        return f"the cluster removed it ({pod.disruption})"
    if pod.deleting:
        return "its pod was deleted"
    if pod.node and (node := assess_node(nodes.get(pod.node), pod.node)).state is not NodeState.STAYS:
        return node.reason
    return ""


def _failed_probe(pod: PodView) -> str:
    """Explain the end of a pod that only its own kubelet can have asked to end.

    A failed probe leaves no trace in the pod's status. The kubelet's event about it may be gone or not be there yet.
    """
    return (
        f"the kubelet ended it, probably because its {' or '.join(pod.fatal_probes)} failed: correct the probe or what "
        f"it checks (see `kubectl get events --field-selector involvedObject.name={pod.name}`)"
    )


def _assess_unexplained_end(pod: PodView, ended: Ended) -> tuple[WorkerState, str]:
    """Return the state after an unannounced end on a healthy node, without an outcome."""
    if ended.reason == "OOMKilled":
        return (
            WorkerState.FAILED,
            "it used more memory than its limit (OOMKilled): raise resources.limits.memory or use smaller batches",
        )
    if ended.reason in _LOST_TRACK:
        return WorkerState.DISRUPTED, f"its node lost track of it ({ended.reason}), as after a reboot"
    if ended.exit_code in (_SIGKILL_EXIT, _SIGTERM_EXIT):
        if pod.fatal_probes:
            return WorkerState.FAILED, _failed_probe(pod)
        # PID 1 cannot send SIGKILL to itself, and the launcher reports what kills a rank: this came from outside.
        return WorkerState.DISRUPTED, f"it was killed from outside (exit code {ended.exit_code})"
    if ended.exit_code == 0:
        return (
            WorkerState.FAILED,
            "it ended without an outcome: start the script with heterotrain-run, or let it use heterotrain.init()",
        )
    lines = ended.message.strip().splitlines()
    last_line = f": {lines[-1]}" if lines else ""
    return (
        WorkerState.FAILED,
        f"exit code {ended.exit_code}{f' ({ended.reason})' if ended.reason not in ('', 'Error') else ''}{last_line}",
    )
