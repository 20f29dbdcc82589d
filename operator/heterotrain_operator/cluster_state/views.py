"""The inputs of decisions: a few fields of each object, as frozen values. Times are seconds since the epoch."""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property
from typing import Any, NamedTuple

from heterotrain_core.contract import keys
from heterotrain_core.contract.codec import Refused, decode_plan
from heterotrain_core.contract.plan import Plan

from heterotrain_operator.api.status import HeteroTrainJobStatus
from heterotrain_operator.api.v1alpha1 import HeteroTrainJobSpec


class JobKey(NamedTuple):
    """Identifies a job."""

    namespace: str
    name: str


class NodeReadiness(StrEnum):
    """The node's condition ``Ready``: the kubelet sets False; the control plane sets Unknown for a silent kubelet."""

    TRUE = "True"
    FALSE = "False"
    UNKNOWN = "Unknown"


@dataclass(frozen=True, slots=True, kw_only=True)
class JobView:
    """A job. An invalid spec is ``None``; ``problem`` then names the reason in one sentence.

    ``checkpoint_request`` is another text for each checkpoint that a user asks for, and empty when none is asked for;
    ``restart_request`` and ``retry_request`` are the same for restarts of the workers and of a failed job.
    """

    key: JobKey
    uid: str
    generation: int
    resource_version: str
    created_s: float
    deleting: bool
    labels: Mapping[str, str]
    spec: HeteroTrainJobSpec | None
    problem: str
    template: Mapping[str, Any]
    patches: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """By pool, what is different in its pods' template; only of a valid job."""
    status: HeteroTrainJobStatus
    packed_status: bytes
    checkpoint_request: str = ""
    restart_request: str = ""
    retry_request: str = ""

    @property
    def status_body(self) -> dict[str, Any]:
        """The status as the API server has it, unpacked again for each caller; see ``packed``."""
        found: dict[str, Any] = json.loads(zlib.decompress(self.packed_status))
        return found


def packed(status: Mapping[str, Any]) -> bytes:
    """Return a status in a twentieth of its memory: its text takes a fifth, and repeats itself."""
    return zlib.compress(json.dumps(status, separators=(",", ":")).encode(), level=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class ValidJob(JobView):
    """A job whose spec is valid: only such a job has pods, a plan and a part in the allocation."""

    spec: HeteroTrainJobSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """How the training container ended, or else the init container of this name; ``message`` is its last words."""

    exit_code: int
    reason: str
    message: str
    finished_s: float
    init_container: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class PodView:
    """A worker's pod.

    Attributes:
        owner_uid: uid of the job that controls the pod; empty for an orphan, or a pod that merely has the labels.
        deletion_s: when the grace period of its deletion ends; 0 while it is not being deleted.
        disruption: reason of the condition ``DisruptionTarget``, or the kubelet's reason for ending the pod
            (``Terminated``, ``NodeShutdown``, …); empty without a disruption.
        gated: whether scheduling gates keep the scheduler from looking at the pod.
        gates: names of its scheduling gates.
        creating: whether it has a node and its training container was not created yet.
        start_problem: the kubelet's newest warning about a pod that is being created, ``Reason: message``.
        refused: the kubelet's reason and message for a pod that it refused to run.
        image: of its training container.
        image_digest: of the image that its training container runs; empty while that is not known.
        avoids: nodes that the operator has excluded for the pod.
        template: digest of what the user had written about it.
        restart: the job's request for a restart that it was made for; empty without one.
        main_started: whether its training container has run.
        all_started: whether each of its containers has run; init containers do not count.
        finalizers: those that keep it.
        noted: its labels and annotations of Kubernetes' projects (``*.x-k8s.io``), which plugins read.
        unschedulable: the scheduler's message if it found no node; empty otherwise.
        scheduled_s: when the scheduler gave it a node; 0 without one.
        waiting_reason: reason why the training (or an init) container does not run yet, e.g. ``ImagePullBackOff``.
        trouble_beside: which container beside the training one waits or has failed, and why; empty without one.
        plan_version: version of the plan in the pod's annotation.
        requests: resources that the scheduler reserves for the pod.
        priority: of its PriorityClass; 0 without one.
        address: at which other workers reach it, the pod's first one; empty while it has none.
        peer_port: where its first rank listens for other workers.
        fatal_probes: probes whose failure makes the kubelet end the training container.
        all_ended: whether every container has ended. The kubelet changes the phase a moment later, once it has cleaned
            up; until then the pod holds its node.
        conditions: types and statuses of an ended pod's conditions, for the job's rules about failures.
    """

    key: JobKey
    name: str
    uid: str
    resource_version: str
    pool: str
    index: int
    on_demand: bool
    ranks: int
    phase: str
    owner_uid: str = ""
    node: str = ""
    address: str = ""
    peer_port: int = keys.PEER_PORT
    created_s: float = 0.0
    deleting: bool = False
    deletion_s: float = 0.0
    ready: bool = False
    ready_since_s: float = 0.0
    gated: bool = False
    gates: tuple[str, ...] = ()
    creating: bool = False
    start_problem: str = ""
    refused: str = ""
    avoids: tuple[str, ...] = ()
    template: str = ""
    restart: str = ""
    main_started: bool = False
    all_started: bool = False
    finalizers: tuple[str, ...] = ()
    noted: tuple[tuple[str, str], ...] = ()
    image: str = ""
    image_digest: str = ""
    unschedulable: str = ""
    unschedulable_since_s: float = 0.0
    scheduled_s: float = 0.0
    waiting_reason: str = ""
    waiting_message: str = ""
    ended: Ended | None = None
    trouble_beside: str = ""
    disruption: str = ""
    requests: Mapping[str, float] = field(default_factory=dict)
    priority: int = 0
    plan_version: str = ""
    fatal_probes: tuple[str, ...] = ()
    all_ended: bool = False
    conditions: tuple[tuple[str, str], ...] = ()

    @property
    def terminal(self) -> bool:
        """Whether training has ended in this pod; a sidecar may still run."""
        return self.ended is not None or self.phase_ended

    @property
    def can_train(self) -> bool:
        """Whether the worker can be a member of its job."""
        return self.ready and not self.deleting and not self.phase_ended

    @property
    def phase_ended(self) -> bool:
        """Whether the whole pod has ended, sidecars included."""
        return self.phase in ("Succeeded", "Failed")


@dataclass(frozen=True, slots=True, kw_only=True)
class Taint:
    """A node's taint."""

    key: str
    value: str
    effect: str


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeView:
    """A node.

    Attributes:
        announced: what announces its end; empty without an announcement.
    """

    name: str
    resource_version: str
    labels: Mapping[str, str]
    taints: tuple[Taint, ...]
    allocatable: Mapping[str, float]
    readiness: NodeReadiness
    cordoned: bool
    announced: str = ""


class Departed(NamedTuple):
    """A member of an earlier plan that was lost without a pod."""

    uid: str
    name: str
    pool: str


@dataclass(frozen=True, kw_only=True)  # without slots, so that a plan is decoded once
class PlanObject:
    """The plan's ConfigMap in the cluster.

    Attributes:
        key: the job that it names.
        owner_uid: uid of the object that controls it; empty for an orphan or a ConfigMap that merely has the labels.
        text: the encoded plan; empty for one that is too long.
        departed: members that this plan lacks although the one before had them. Without this, an operator that ends
            between the writes of plan and status would never count their loss.
    """

    key: JobKey
    owner_uid: str
    resource_version: str
    text: str
    departed: tuple[Departed, ...] = ()

    @cached_property
    def plan(self) -> Plan | Refused:
        """The plan, or why it is refused. Decoding checks every value, which takes as long as half a pass."""
        return decode_plan(self.text, job_uid=self.owner_uid)
